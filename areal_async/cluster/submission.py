"""A job on its way to the controller: what is sent, and how it is unpacked there.

The sender packs the job as a mapping, and the files that it names beside the job file: code of its own, with
what that imports from beside it, and task files. The receiver trusts none of it: names are checked before
anything is written, sizes are bounded, and of the job only its fields are read. No code of it is loaded.
"""

from __future__ import annotations

import ast
import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.own_files import open_beneath, open_regular
from areal_async.base.yaml_file import too_nested
from areal_async.cluster.sweeps import combinations, named_jobs
from areal_async.config.compose import read_composed
from areal_async.config.fields import JOB_NAME
from areal_async.config.files import OWN_CODE
from areal_async.config.job import JobConfig
from areal_async.config.load import apply_overrides, flattened, load_job
from areal_async.config.paths import resolve_paths

MOST_BYTES = 64 << 20  # Files of one submission together
MOST_WRITTEN = 1 << 30  # The same, times the jobs of a sweep
MOST_FILES = 256
MOST_LEVELS = 8  # Folders in one another
LONGEST_NAME_BYTES = 200
MOST_OVERRIDES = 256
MOST_OVERRIDE_CHARS = 16 << 10
PRIORITIES = (-1000, 1000)
KEY = re.compile(r"[A-Za-z0-9_-]{8,64}")


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `POST /v1/jobs` takes."""

    key: str
    """8 to 64 letters, digits, `-` and `_` of the sender's choice. A second submission with the same key is
    answered as the first, and starts nothing: a sender that heard no answer may send it again."""
    job: dict[str, Any]
    """The content of a job file. Its `run_dir` has no effect: runs lie in the cluster's folder."""
    overrides: list[str] = []
    """`key=value`, with the value in YAML, as on the command line."""
    files: dict[str, bytes] = {}
    """Files that the job names by relative paths: content in Base64 by path."""
    sweep: list[str] = []
    """`key=a,b`: one job is made for each combination."""
    priority: int = 0
    """-1000 to 1000; the higher is started first."""
    memory_gb: float = 0.0
    """Memory that a job needs, in GiB; 0: it does not count."""


@dataclass(frozen=True)
class ReadJob:
    """One job of a submission: its mapping with all changes, and what it is."""

    content: dict[str, Any]
    config: JobConfig


# --- the sender's side ---------------------------------------------------------------------------------


def pack(
    path: Path,
    overrides: Sequence[str],
    *,
    key: str,
    here: bool,
    sweep: Sequence[str] = (),
    priority: int = 0,
    memory_gb: float = 0.0,
) -> Submission:
    """The submission of the job file at `path`. `here`: the controller is on this machine, and what does not
    travel is named by its place; else only paths that the file gives as absolute are taken to be the
    controller's. Raises `ConfigError`."""
    load_job(path, overrides, files=False)
    combinations(sweep)
    content, base = read_composed(path), path.resolve().parent
    apply_overrides(content, overrides)
    content = flattened(content)
    content.pop("run_dir", None)
    resolved = copy.deepcopy(content)
    resolve_paths(resolved, base)
    files: dict[str, bytes] = {}
    mistakes: list[Mistake] = []
    packed = _packed(content, resolved, "", base, here, files, mistakes)
    for name in [name for name in files if name.endswith(".py")]:
        for beside in _imported(base, name, set(files)):
            files[beside] = _content(base / beside)
    if sum(map(len, files.values())) > MOST_BYTES or len(files) > MOST_FILES:
        problem = f"its files are more than {MOST_BYTES >> 20} MiB or {MOST_FILES}"
        fix = "Name large files by absolute paths on the controller's machine"
        mistakes.append(Mistake("file", problem, fix))
    if mistakes:
        raise ConfigError(str(path), mistakes)
    return Submission(key, packed, files=files, sweep=list(sweep), priority=priority, memory_gb=memory_gb)


def _packed(
    given: Any,
    resolved: Any,
    field: str,
    base: Path,
    here: bool,
    files: dict[str, bytes],
    mistakes: list[Mistake],
) -> Any:
    """`given` with each path as the controller is to see it. What `resolve_paths` has changed is a path."""
    if isinstance(given, dict):
        return {
            key: _packed(value, resolved.get(key), f"{field}.{key}".strip("."), base, here, files, mistakes)
            for key, value in given.items()
        }
    if isinstance(given, list) and isinstance(resolved, list) and len(given) == len(resolved):
        return [
            _packed(value, other, f"{field}.{number}", base, here, files, mistakes)
            for number, (value, other) in enumerate(zip(given, resolved, strict=True))
        ]
    if given == resolved or not isinstance(given, str) or os.path.isabs(given) or given.startswith("~"):
        return given
    is_code = OWN_CODE.fullmatch(given) is not None
    found = Path(resolved.rpartition(":")[0] if is_code else resolved)
    small = found.is_file() and found.stat().st_size <= MOST_BYTES
    if found.is_relative_to(base) and small and not any(part.startswith("..") for part in found.parts):
        name = found.relative_to(base).as_posix()
        files[name] = _content(found)
        return f"{name}:{given.rpartition(':')[2]}" if is_code else name
    if here:
        return resolved
    what = "is no file below the job file's folder" if not found.is_dir() else "is a folder, which stays here"
    fix = "Give its absolute path on the controller's machine, or put the file beside the job file"
    mistakes.append(Mistake(field, f"{given} {what}, and the controller is on another machine", fix))
    return given


def _content(path: Path) -> bytes:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or error}"
        raise ConfigError(str(path), [Mistake("file", problem, "Check its permissions")]) from None


def _imported(base: Path, name: str, known: set[str]) -> Iterator[str]:
    """The modules beside the file `name`, below `base`, that it imports, and that those import."""
    folder = (base / name).parent
    try:
        tree = ast.parse(_content(base / name))
    except (SyntaxError, ValueError):
        return  # who loads it says so
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    for module in modules:
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            stem = folder.joinpath(*parts[:depth])
            for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                relative = path.relative_to(base).as_posix()
                if relative not in known and len(known) <= MOST_FILES and path.is_file():
                    known.add(relative)
                    yield relative
                    yield from _imported(base, relative, known)


# --- the receiver's side -------------------------------------------------------------------------------


def read_submission(body: bytes) -> Submission:
    """The submission in the body of a request, its bounds checked. Raises `ConfigError`."""
    try:
        given = msgspec.json.decode(body, type=Submission)
    except (ValueError, RecursionError) as error:
        text = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ConfigError("the submission", [Mistake("body", text, "Send what the API page shows")]) from None
    mistakes = [*_bounds(given)] or [*_name_mistakes(given.files)]
    if mistakes:
        raise ConfigError("the submission", mistakes)
    return given


def _bounds(given: Submission) -> Iterator[Mistake]:
    if (where := too_nested(given.job)) is not None:
        yield Mistake(f"job.{where}", "it is nested too deep, or holds too many values", "Flatten it")
    if not KEY.fullmatch(given.key):
        yield Mistake("key", "it has not the right form", "Give 8 to 64 letters, digits, - and _")
    low, high = PRIORITIES
    if not low <= given.priority <= high:
        yield Mistake("priority", f"{given.priority} is out of bounds", f"Give {low} to {high}")
    if not 0 <= given.memory_gb <= 1 << 20:
        yield Mistake("memory_gb", f"{given.memory_gb} is out of bounds", "Give the GiB that the job needs")
    for field, texts in (("overrides", given.overrides), ("sweep", given.sweep)):
        if len(texts) > MOST_OVERRIDES or any(len(text) > MOST_OVERRIDE_CHARS for text in texts):
            yield Mistake(field, "they are too many or too long", "Put them into the job file")
    if len(given.files) > MOST_FILES:
        yield Mistake("files", f"they are {len(given.files)}", f"Send at most {MOST_FILES}")
    if (size := sum(map(len, given.files.values()))) > MOST_BYTES:
        fix = "Name large files by absolute paths on the controller's machine"
        yield Mistake("files", f"they have {size} bytes, and {MOST_BYTES} is the limit", fix)


def _name_mistakes(files: Mapping[str, bytes]) -> Iterator[Mistake]:
    folders = {
        "/".join(parts[:depth])
        for name in files
        for parts in [name.split("/", MOST_LEVELS)]
        for depth in range(1, len(parts))
    }
    for name in files:
        parts = name.split("/", MOST_LEVELS)
        wrong = (
            not name.isprintable()
            or len(parts) > MOST_LEVELS
            or len(os.fsencode(name)) > LONGEST_NAME_BYTES
            or any(part in ("", ".", "..") or "\\" in part for part in parts)
            or name in folders
        )
        if wrong:
            fix = "Name it by its path below the job file, such as rewards/mine.py"
            yield Mistake("files", f"{name[:80]!r} cannot be the name of a file here", fix)


def read_jobs(given: Submission, folder: Path) -> list[ReadJob]:
    """The jobs of a submission, those of its sweep each, with paths that are relative to `folder`, where
    their files will lie, and free ports for metrics unless it names some. No file is looked at. Raises
    `ConfigError`."""
    content = dict(given.job)
    parts = combinations(given.sweep)
    found = []
    for each in parts:
        changed = copy.deepcopy(content)
        mistakes = apply_overrides(changed, [*given.overrides, *each.overrides])
        if mistakes:
            raise ConfigError("the submission", mistakes)
        changed["run_dir"] = "runs"
        found.append(changed)
    name = found[0].get("job")
    if given.sweep and isinstance(name, str) and JOB_NAME.fullmatch(name):
        for changed, unique in zip(found, named_jobs(name, [each.suffix for each in parts]), strict=True):
            changed["job"] = unique
    return [ReadJob(changed, job_of(changed, folder, folder)) for changed in found]


def job_of(
    content: dict[str, Any],
    base: Path,
    run_dir: Path,
    overrides: Sequence[str] = (),
    *,
    files: bool = False,
) -> JobConfig:
    """The job of a mapping whose files lie in `base`, which runs below `run_dir` whatever it says itself.
    Raises `ConfigError`."""
    name = str(content.get("job", ""))
    changed = copy.deepcopy(content)
    mistakes = apply_overrides(changed, overrides)
    if changed.get("job") != content.get("job"):
        mistakes.append(Mistake("job", "a job keeps its name", "Submit another job instead"))
    if mistakes:
        raise ConfigError(f"job {name}", mistakes)
    return load_job(changed | {"run_dir": str(run_dir)}, source=f"job {name}", base=base, files=files)


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write checked `files` into `folder`, which is made, and see them onto the disk. Raises OSError."""
    folder.mkdir(parents=True, mode=0o700)
    for name, content in files.items():
        with os.fdopen(open_beneath(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
