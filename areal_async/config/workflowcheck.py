"""Rules about `rollout.workflow_args`: they are known before anything is started.

For built-in workflows and environments the models decide; a workflow of one's own is looked up in the syntax
tree, its keyword arguments are what it takes. Imports no user code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal_async.config.base import Section
from areal_async.config.environments import BUILT_IN_TOOLS, ENVIRONMENT_OPTIONS
from areal_async.config.errors import Mistake
from areal_async.config.rewardcheck import part_of, runs_in_pool, scopes_of
from areal_async.config.workflow import WORKFLOW_ARGUMENTS
from areal_async.ownfiles import read_regular
from areal_async.registry import REWARDS

FIELD = "rollout.workflow_args"


def argument_mistakes(workflow: str, arguments: Mapping[str, Any]) -> list[Mistake]:
    """What is wrong with the arguments of a built-in workflow."""
    mistakes = [*section_mistakes(FIELD, WORKFLOW_ARGUMENTS[workflow], arguments, workflow)]
    broken = {mistake.field for mistake in mistakes}
    name, options = arguments.get("environment"), arguments.get("environment_args", {})
    if isinstance(name, str) and not {f"{FIELD}.environment", f"{FIELD}.environment_args"} & broken:
        mistakes += _environment(name, options)
    for tool in arguments.get("tools", ()) if workflow == "tool_use" else ():
        if isinstance(tool, str) and tool not in BUILT_IN_TOOLS and ".py:" not in tool:
            problem = f"{tool!r} is neither a built-in tool nor `path.py:name`"
            fix = f"Use {', '.join(BUILT_IN_TOOLS)}, or the path and name of a function marked @tool"
            mistakes.append(Mistake(f"{FIELD}.tools", problem, fix))
    if workflow == "self_correction":
        mistakes += _verifier(arguments.get("verifier"), arguments.get("verifier_args", {}))
    return mistakes


def _verifier(name: Any, arguments: Any) -> Iterator[Mistake]:
    """A built-in reward runs in the worker, which the ones that are servers cannot."""
    part = part_of(name) if isinstance(name, str) else None
    if part is None:
        return
    if not runs_in_pool(part):
        problem = f"`{name}` is a server of its own, and the verifier runs in the worker"
        yield Mistake(
            f"{FIELD}.verifier", problem, "Use a verifier, or path.py:name of a function of your own"
        )
    elif "episode" not in scopes_of(part):
        yield Mistake(f"{FIELD}.verifier", f"`{name}` judges whole groups", "Use one that judges an episode")
    elif isinstance(arguments, Mapping):
        field = f"{FIELD}.verifier_args"
        yield from REWARDS.mistakes(name, arguments, field=f"{FIELD}.verifier", args_field=field)


def _environment(name: str, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if name in ENVIRONMENT_OPTIONS:
        yield from section_mistakes(f"{FIELD}.environment_args", ENVIRONMENT_OPTIONS[name], options, name)
    elif ".py:" not in name:
        problem = f"{name!r} is neither a built-in environment nor `path.py:Class`"
        fix = f"Use {', '.join(ENVIRONMENT_OPTIONS)}, or the path and name of your class"
        yield Mistake(f"{FIELD}.environment", problem, fix)


def section_mistakes(
    field: str, kind: type[Section], given: Mapping[str, Any], owner: str
) -> Iterator[Mistake]:
    try:
        kind.model_validate(dict(given))
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return
    # What is refused for holding a password is not shown, nor what it is a part of.
    secret = any("holds a password" in detail["msg"] for detail in details)
    takes = ", ".join(field.alias or name for name, field in kind.model_fields.items()) or "nothing"
    for detail in details:
        name = ".".join(str(part) for part in detail["loc"])
        where = f"{field}.{name}" if name else field
        if detail["type"] == "extra_forbidden":
            yield Mistake(where, f"{owner} has no argument {name!r}", f"It takes {takes}")
        elif detail["type"] == "missing":
            about = kind.model_fields[name].description if name in kind.model_fields else ""
            yield Mistake(
                where, f"{owner} needs {name!r}, and it is missing", f"Add it. {about}".rstrip(". ")
            )
        else:
            message = str(detail["msg"]).removeprefix("Value error, ").rstrip(".")
            shown = "" if secret else f" = {detail.get('input')!r:.80}"
            problem = f"{owner} cannot take {name}{shown}: {message}"
            yield Mistake(where, problem, "Correct it")


def own_argument_mistakes(workflow: str, arguments: Mapping[str, Any]) -> Iterator[Mistake]:
    """What is wrong with the arguments of `path.py:function`, as far as the file's text tells."""
    path_text, _, name = workflow.rpartition(":")
    try:
        tree = ast.parse(read_regular(Path(path_text)))
    except (OSError, SyntaxError, ValueError):
        return  # `rollout.workflow` itself is the mistake
    found = next((n for n in tree.body if isinstance(n, ast.AsyncFunctionDef) and n.name == name), None)
    if found is None:
        return
    a = found.args
    positional = [argument.arg for argument in (*a.posonlyargs, *a.args)][2:]
    keywords = [*positional, *(argument.arg for argument in a.kwonlyargs)]
    needed = positional[: len(positional) - len(a.defaults)] if len(positional) > len(a.defaults) else []
    needed += [k.arg for k, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    takes = f"It takes {', '.join(keywords)}" if keywords else f"Write `async def {name}(ctx, task, *, …)`"
    for key in arguments:
        if key not in keywords and a.kwarg is None:
            yield Mistake(f"{FIELD}.{key}", f"{name} in {path_text} has no argument {key!r}", takes)
    for key in needed:
        if key not in arguments:
            yield Mistake(
                f"{FIELD}.{key}", f"{name} in {path_text} needs {key!r}, and it is missing", "Add it"
            )
