"""Rules about what a job file points at: the model, the task files, the user's code, the run folder.

Only reads, and imports no user code: a function is looked up in the syntax tree.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.config.parts import own_part_mistakes
from areal_async.config.rewardcheck import reward_file_mistakes
from areal_async.config.rollout import BUILT_IN_WORKFLOWS
from areal_async.config.workflowcheck import own_argument_mistakes
from areal_async.ownfiles import read_regular
from areal_async.registry import REWARDS
from areal_async.tasks import TaskFileError, check_row, read_tasks, task_rows

READ_WHOLE_BYTES = 16 << 20
"""Task files up to this size are checked row by row; of larger ones only the first row."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def check_files(job: JobConfig) -> list[Mistake]:
    """Every mistake about the files that `job` names."""
    mistakes = [*_check_run_dir(job.run_dir), *_check_model(job)]
    rows, problems = _check_tasks("tasks.train", job.tasks.train, job.model)
    mistakes += problems
    if rows is not None and job.kind == "rl":
        mistakes += _check_passes(job, rows)
    if job.tasks.evaluation is not None:
        mistakes += _check_tasks("tasks.evaluation", job.tasks.evaluation, job.model)[1]
    if job.kind == "rl":
        mistakes += _check_redis_files(job)
        mistakes += _check_weights_files(job)
        mistakes += reward_file_mistakes(job.reward)
        mistakes += _check_code("rollout.workflow", job.rollout.workflow, BUILT_IN_WORKFLOWS, coroutine=True)
        mistakes += _check_arguments(job)
    mistakes += own_part_mistakes(job)
    return mistakes


def _check_run_dir(run_dir: Path) -> Iterator[Mistake]:
    nearest = run_dir
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        yield Mistake("run_dir", f"{nearest} is a file", "Give a folder")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Mistake("run_dir", f"{nearest} cannot be written to", "Change its permissions, or give another")


def _check_redis_files(job: JobConfig) -> Iterator[Mistake]:
    """That the named secrets and certificates can be read; what is in them is never shown."""
    login, tls = job.buffer.redis_login, job.buffer.redis_tls
    for section, name, path in (
        ("redis_login", "password_file", login.password_file),
        ("redis_login", "sentinel_password_file", login.sentinel_password_file),
        ("redis_tls", "ca_file", tls.ca_file),
        ("redis_tls", "cert_file", tls.cert_file),
        ("redis_tls", "key_file", tls.key_file),
    ):
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            problem = f"{path} does not exist or cannot be read"
            yield Mistake(f"buffer.{section}.{name}", problem, "Correct the path or its permissions")


def _check_weights_files(job: JobConfig) -> Iterator[Mistake]:
    keys, directory = job.weights.key_file, job.weights.directory
    if keys is not None and not (keys.is_file() and os.access(keys, os.R_OK)):
        problem = f"{keys} does not exist or cannot be read"
        yield Mistake("weights.key_file", problem, "Correct the path or its permissions")
    if directory is not None and not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        problem = f"{directory} is no directory that can be written to"
        yield Mistake("weights.directory", problem, "Make it, or give another that all hosts share")


def _check_model(job: JobConfig) -> Iterator[Mistake]:
    model = job.model
    if not model.is_dir():
        found = "is a file" if model.exists() else "does not exist"
        fix = (
            "Give a Hugging Face model directory; `hf download NAME --local-dir DIR` makes one of a hub model"
        )
        yield Mistake("model", f"{model} {found}", fix)
        return
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        problem = f"{model} has no {'' if missing else 'readable '}config.json"
        yield Mistake("model", problem, "Give a complete Hugging Face model directory")
        return
    if not any(model.glob("*.safetensors")):
        problem = f"{model} has no .safetensors weights (pickled .bin files are never loaded)"
        yield Mistake("model", problem, "Save it again with save_pretrained(..., safe_serialization=True)")
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        fix = "Save the tokenizer into the same directory with tokenizer.save_pretrained"
        yield Mistake("model", f"{model} has no tokenizer", fix)
    yield from _check_shards(model)
    if isinstance(config, dict):
        yield from _check_model_config(job, config)


def _check_shards(model: Path) -> Iterator[Mistake]:
    """That every file is there that the index of a model in several files names."""
    index = model / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
        missing = sorted(name for name in named if not (model / Path(name).name).is_file())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        yield Mistake("model", f"{index} cannot be read", "Give a complete Hugging Face model directory")
        return
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        problem = f"{model} lacks {missing[0]}{more} of the {len(named)} files that {index.name} names"
        yield Mistake("model", problem, "Download or copy the model again, with all its files")


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file():
        return True
    try:
        config = json.loads((model / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _check_model_config(job: JobConfig, config: dict[str, Any]) -> Iterator[Mistake]:
    architectures = config.get("architectures") or []
    if architectures and not any(str(name).endswith("ForCausalLM") for name in architectures):
        names = ", ".join(map(str, architectures))
        yield Mistake(
            "model", f"{names} is not a causal language model", "Give a model of a ...ForCausalLM class"
        )
    positions = config.get("max_position_embeddings")
    if job.kind == "rl" and isinstance(positions, int) and job.rollout.max_model_len > positions:
        yield Mistake(
            "rollout.max_model_len",
            f"{job.rollout.max_model_len} is more than the {positions} positions of the model",
            f"Set it to {positions} or less",
            ("model",),
        )


def _check_tasks(field: str, path: Path, model: Path) -> tuple[int | None, list[Mistake]]:
    """The number of rows where it is cheap to know, and the mistakes."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        fix = (
            "Give the path of a .parquet or .jsonl file of tasks; "
            "`hf download NAME --repo-type dataset --local-dir DIR` fetches a data set of the hub"
        )
        return None, [Mistake(field, f"{path} {found}", fix)]
    try:
        if path.stat().st_size <= READ_WHOLE_BYTES:
            table = read_tasks(path)
            rows: int | None = len(table)
            are_messages = any(not isinstance(task.prompt, str) for task in table)
        else:
            rows, row = None, next(task_rows(path), {})
            check_row(path, 0, row)
            are_messages = not isinstance(row["prompt"], str)
    except TaskFileError as error:
        return None, [Mistake(field, *_split(str(error)))]
    if are_messages and model.is_dir() and not _has_chat_template(model):
        problem = f"the prompts of {path} are messages, and the tokenizer in {model} has no chat template"
        fix = "Add one to the tokenizer (chat_template.jinja), or give tasks whose prompts are text"
        return rows, [Mistake(field, problem, fix, ("model",))]
    return rows, []


def _split(text: str) -> tuple[str, str]:
    """The problem and the fix of a reader's error, which are its sentences or the halves of one."""
    problem, _, fix = text.rstrip(".").rpartition(". ")
    if problem:
        return problem, fix
    return text.rstrip("."), "Correct the file, or choose another"


def _check_passes(job: JobConfig, rows: int) -> Iterator[Mistake]:
    passes, needed = job.tasks.passes, job.trainer.steps * job.buffer.batch_groups
    if passes is not None and passes * rows < needed:
        yield Mistake(
            "tasks.passes",
            f"{passes} × {rows} tasks are fewer than trainer.steps × buffer.batch_groups = {needed}",
            f"Set it to {-(-needed // rows)} or more, remove it, or lower trainer.steps",
            ("trainer.steps", "buffer.batch_groups", "tasks.train"),
        )


def _check_arguments(job: JobConfig) -> Iterator[Mistake]:
    """Code of the user's that the workflow's arguments name, and arguments of a workflow of their own."""
    workflow, arguments = job.rollout.workflow, job.rollout.workflow_args
    if workflow not in BUILT_IN_WORKFLOWS:
        yield from own_argument_mistakes(workflow, arguments)
        return
    if isinstance(agent := arguments.get("agent"), str):
        yield from _check_code("rollout.workflow_args.agent", agent, (), coroutine=True)
    tools = arguments.get("tools")
    named = [("environment", arguments.get("environment")), ("verifier", arguments.get("verifier"))]
    named += [("tools", tool) for tool in tools] if isinstance(tools, list) else []
    for key, name in named:
        # Names without a file are judged with the fields, but for the verifier's: it is a reward.
        if isinstance(name, str) and (".py:" in name or key == "verifier"):
            field = f"rollout.workflow_args.{key}"
            yield from _check_code(field, name, REWARDS.names, coroutine=None)


def _check_code(
    field: str, name: str, built_in: tuple[str, ...], *, coroutine: bool | None
) -> Iterator[Mistake]:
    """A built-in name, or `path.py:name` of a function that is defined at the top of that file."""
    path_text, colon, function = name.rpartition(":")
    if not colon or not path_text.endswith(".py"):
        if name not in built_in:
            problem = f"{name!r} is neither built in nor `path.py:name`"
            names = f"{', '.join(built_in)}, or " if built_in else ""
            yield Mistake(field, problem, f"Use {names}the path and name of your function")
        return
    path = Path(path_text)
    try:
        tree = ast.parse(read_regular(path), filename=path_text)
    except (OSError, UnicodeDecodeError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be read"
        yield Mistake(field, f"{path} {reason}", "Correct the path; it is relative to the job file")
        return
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        yield Mistake(field, f"{path} is not valid Python (line {line})", "Correct the file")
        return
    functions = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if function in functions:
        if coroutine and not isinstance(functions[function], ast.AsyncFunctionDef):
            yield Mistake(field, f"{function} in {path} is not a coroutine", "Write it as `async def`")
    elif function not in _other_names(tree):
        known = f"it defines {', '.join(functions)}" if functions else "it defines no function"
        yield Mistake(
            field, f"{path} has no function {function!r}; {known}", "Correct the name after the colon"
        )


def _other_names(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top level in other ways: assignments, classes, imports."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names
