"""Rules about `reward`: what a reward takes, how it is asked, and what its groups do is known before anything
is started.

For built-in rewards the models decide; a function of one's own is looked up in the syntax tree: its keyword
arguments are what it takes, its mark says whether it judges episodes or groups. Imports no user code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_async.config.base import Section
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.config.reward import RewardSection, RouteSection
from areal_async.config.sandbox import SandboxArguments
from areal_async.config.verifiers import GROUP_REWARDS, REWARD_ARGUMENTS
from areal_async.config.workflowcheck import section_mistakes
from areal_async.ownfiles import read_regular


def asked(reward: RewardSection) -> Iterator[tuple[str, RewardSection | RouteSection]]:
    """Where each reward of a job is asked for: the dotted field, and what it holds."""
    yield "reward", reward
    for index, route in enumerate(reward.routes):
        yield f"reward.routes.{index}", route


def reward_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """What is wrong with the rewards of `job`, as far as no file has to be read."""
    yield from built_in_mistakes(job.reward)
    yield from _environment_is_there(job)
    yield from _masking_leaves_a_baseline(job)


def built_in_mistakes(reward: RewardSection) -> Iterator[Mistake]:
    """What is wrong with how built-in rewards are asked for, whatever the job."""
    for field, section in asked(reward):
        name, scope = section.name, section.scope
        if name in REWARD_ARGUMENTS:
            yield from _built_in(f"{field}.args", name, section.args)
            yield from _budget_ends_first(field, section, reward.timeout_s)
        if scope == "group" and name in REWARD_ARGUMENTS and name not in GROUP_REWARDS:
            problem = f"`{name}` judges one episode at a time, not the whole of a group"
            yield Mistake(f"{field}.scope", problem, "Set it to episode", (f"{field}.name",))
        if scope == "episode" and name in GROUP_REWARDS and name not in EITHER_SCOPE:
            yield Mistake(f"{field}.scope", f"`{name}` judges whole groups", "Set it to group", (field,))


EITHER_SCOPE = ("remote",)
"""Built-in rewards that judge what they are asked to."""


def programs_run(job: JobConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where `job` has programs run, and the arguments there: rewards, those inside others, the verifier of a
    workflow."""
    for field, section in asked(job.reward):
        yield from _programs_of(f"{field}.args", section.name, section.args)
    workflow = job.rollout.workflow_args
    given = workflow.get("verifier_args", {})
    if job.rollout.workflow == "self_correction" and isinstance(given, Mapping):
        yield from _programs_of("rollout.workflow_args.verifier_args", str(workflow.get("verifier")), given)


def _programs_of(field: str, name: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if issubclass(REWARD_ARGUMENTS.get(name, Section), SandboxArguments):
        yield field, arguments
    for where, part in _rewards_inside(field, name, arguments):
        if isinstance(part, Mapping) and isinstance(part.get("args", {}), Mapping):
            yield from _programs_of(f"{where}.args", str(part.get("name")), part.get("args", {}))


def _built_in(field: str, name: str, arguments: Mapping[str, Any]) -> Iterator[Mistake]:
    if "least" in arguments and issubclass(REWARD_ARGUMENTS[name], SandboxArguments):
        problem = "the levels that it chose among are gone: programs are isolated, or not at all"
        fix = "Remove it; or write `sandbox: none` to run programs without any protection (docs/sandbox.md)"
        yield Mistake(f"{field}.least", problem, fix)
        arguments = {key: value for key, value in arguments.items() if key != "least"}
    yield from section_mistakes(field, REWARD_ARGUMENTS[name], arguments, name)
    for where, part in _rewards_inside(field, name, arguments):
        inner = part.get("name") if isinstance(part, Mapping) else None
        if not isinstance(inner, str):
            continue
        given = part.get("args", {})
        if inner in REWARD_ARGUMENTS and isinstance(given, Mapping):
            yield from _built_in(f"{where}.args", inner, given)
        elif inner not in REWARD_ARGUMENTS and ".py:" not in inner:
            names = ", ".join(REWARD_ARGUMENTS)
            problem = f"{inner!r} is neither built in nor `path.py:name`"
            yield Mistake(f"{where}.name", problem, f"Use {names}, or the path and name of your function")


def _rewards_inside(field: str, name: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where a reward that is made of others names them, and what stands there."""
    parts = arguments.get("parts")
    if name == "weighted" and isinstance(parts, list | tuple):
        yield from ((f"{field}.parts.{index}", part) for index, part in enumerate(parts))
    if name == "cosine_length":
        yield f"{field}.of", arguments.get("of")


def _budget_ends_first(
    field: str, section: RewardSection | RouteSection, timeout_s: float
) -> Iterator[Mistake]:
    """A program that hangs, or an answer that is hard to compare, is wrong only if its budget ends before the
    deadline of the call."""
    budgets = list(_budgets(f"{field}.args", section.name, section.args))
    budget_s = sum(budget for _, budget in budgets)
    deadline_s = section.timeout_s or timeout_s
    if budgets and budget_s + BUDGET_GRACE_S > deadline_s:
        problem = (
            f"judging one answer may take {budget_s:g} s (budget_s), and the call itself ends after "
            f"{deadline_s:g} s: what takes too long would be a timeout, not a wrong answer"
        )
        fields = [where for where, _ in budgets]
        fix = f"Set it to {budget_s + BUDGET_GRACE_S:g} or more, or lower {' and '.join(fields)}"
        yield Mistake(f"{field}.timeout_s", problem, fix, tuple(fields))


def _budgets(field: str, name: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The time that a built-in reward may take, and those inside it, with the field that says so."""
    model = REWARD_ARGUMENTS.get(name)
    known = model.model_fields.get("budget_s") if model is not None else None
    budget_s = arguments.get("budget_s", known.default) if known is not None else None
    if isinstance(budget_s, int | float):
        yield f"{field}.budget_s", budget_s
    for where, part in _rewards_inside(field, name, arguments):
        if isinstance(part, Mapping) and isinstance(part.get("args", {}), Mapping):
            yield from _budgets(f"{where}.args", str(part.get("name")), part.get("args", {}))


BUDGET_GRACE_S = 1.0
"""To make and end jails, and to compare."""


def _environment_is_there(job: JobConfig) -> Iterator[Mistake]:
    workflow, arguments = job.rollout.workflow, job.rollout.workflow_args
    makes_none = workflow == "single_turn" or (workflow == "tool_use" and not arguments.get("environment"))
    for field, section in asked(job.reward):
        if section.name == "environment" and makes_none:
            problem = (
                f"`environment` is the reward that the workflow records, and {workflow} records none here"
            )
            fix = "Set it to another reward, or give the workflow an environment"
            involved = ("rollout.workflow", "rollout.workflow_args")
            yield Mistake(f"{field}.name", problem, fix, involved)


def _masking_leaves_a_baseline(job: JobConfig) -> Iterator[Mistake]:
    """That anything is left at all is another rule's matter (`config/verdictcheck.py`)."""
    reward, names = job.reward, ("on_timeout", "on_error", "on_abstain")
    masks = [f"reward.{name}.then" for name in names if getattr(reward, name).then == "mask"]
    grpo = job.trainer.objective.advantage == "grpo"
    if masks and reward.min_scored == 1 and job.rollout.group_size > 1 and grpo:
        problem = "the grpo advantage of a group of which one episode is left is zero, so nothing is learned"
        involved = ("rollout.group_size", "trainer.objective.advantage", *masks)
        yield Mistake("reward.min_scored", problem, "Set it to 2 or more", involved)


def own_reward_mistakes(reward: RewardSection) -> Iterator[Mistake]:
    """What is wrong with how functions of one's own are asked for, as far as their text tells."""
    for field, section in asked(reward):
        found = _own_function(section.name)
        if found is not None:
            path_text, _, name = section.name.rpartition(":")
            where = f"{name} in {path_text}"
            yield from _own_arguments(f"{field}.args", where, found.args, section.args)
            yield from _own_scope(f"{field}.scope", where, found, section.scope)


def scope_in_file(name: str) -> str | None:
    """The scope that `@reward` gives `path.py:function`; None where that cannot be read off the text."""
    found = _own_function(name)
    return marked_scope(found) if found is not None else None


def _own_function(name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    path_text, colon, function = name.rpartition(":")
    if not colon or not path_text.endswith(".py"):
        return None
    try:
        tree = ast.parse(read_regular(Path(path_text)))
    except (OSError, SyntaxError, ValueError):
        return None  # the name itself is the mistake
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return next((node for node in functions if node.name == function), None)


def _own_arguments(field: str, where: str, a: ast.arguments, given: Mapping[str, Any]) -> Iterator[Mistake]:
    positional = [argument.arg for argument in (*a.posonlyargs, *a.args)][1:]
    defaults = len(a.defaults)
    keywords = [*positional, *(argument.arg for argument in a.kwonlyargs)]
    needed = positional[: len(positional) - defaults] if len(positional) > defaults else []
    needed += [k.arg for k, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    takes = f"It takes {', '.join(keywords)}" if keywords else "Write it as `def …(given, *, …)`"
    for key in given:
        if key not in keywords and a.kwarg is None:
            yield Mistake(f"{field}.{key}", f"{where} has no argument {key!r}", takes)
    for key in needed:
        if key not in given:
            yield Mistake(f"{field}.{key}", f"{where} needs {key!r}, and it is missing", "Add it")


def _own_scope(
    field: str, where: str, function: ast.FunctionDef | ast.AsyncFunctionDef, scope: str
) -> Iterator[Mistake]:
    marked = marked_scope(function)
    if marked is None or marked == scope:
        return
    if marked == "group":
        yield Mistake(field, f"{where} is marked as judging whole groups", "Set it to group")
    else:
        yield Mistake(
            field,
            f"{where} is not marked as judging whole groups",
            'Write `@reward(scope="group")` above it, or set this to episode',
        )


def marked_scope(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """What `@reward` says; None where that cannot be read off the text."""
    for decorator in function.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")) != "reward":
            continue
        if not isinstance(decorator, ast.Call):
            return "episode"
        scope = next((keyword.value for keyword in decorator.keywords if keyword.arg == "scope"), None)
        if scope is None:
            return "episode" if all(keyword.arg for keyword in decorator.keywords) else None
        return scope.value if isinstance(scope, ast.Constant) and isinstance(scope.value, str) else None
    return None
