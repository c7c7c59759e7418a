"""Submission of a job to the controller: the sender packs the job, and the receiver unpacks it.

The sender packs the job as a mapping, together with the files below the job file's folder that the job names.
These are task files and the job's own code, with the modules beside it that the code imports. The receiver
does not trust the content. Names are checked before anything is written, sizes are limited, and only the
fields of the job are read. None of its code is loaded."""

from __future__ import annotations

import ast
import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.own_files import open_beneath, open_regular
from areal_async.base.yaml_file import too_nested
from areal_async.config.compose import read_composed
from areal_async.config.files import OWN_CODE
from areal_async.config.job import JobConfig
from areal_async.config.load import apply_overrides, flattened, load_job
from areal_async.config.paths import resolve_paths
from areal_async.launch.run_handle import has_work, job_to_resume

MOST_BYTES = 64 << 20  # Total size of the files of one submission
MOST_FILES = 256
MOST_LEVELS = 8  # Most nested folders
LONGEST_NAME_BYTES = 200
BY_PLACE = "Name large files by absolute paths on the controller's machine"


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/jobs`."""

    key: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{8,64}\Z")]
    """8 to 64 letters, digits, `-` and `_` of the sender's choice.

    A second submission with the same key gets the first one's answer and starts nothing. A sender that got no
    answer may therefore send the submission again."""
    job: dict[str, Any]
    """The content of a job file. Its `run_dir` has no effect, because runs are stored in the cluster's
    folder."""
    overrides: Annotated[list[Annotated[str, Meta(max_length=16 << 10)]], Meta(max_length=256)] = []
    """Overrides as on the command line: `key=value`, with the value in YAML."""
    files: Annotated[dict[str, bytes], Meta(max_length=MOST_FILES)] = {}
    """Files that the job names by relative paths. Keys are the paths, values are the contents in Base64."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Priority in the queue. The highest starts first."""


# --- the sender's side ---------------------------------------------------------------------------------


def pack(path: Path, overrides: Sequence[str], *, key: str, here: bool, priority: int = 0) -> Submission:
    """Return the submission of the job file at `path`.

    `here` means that the controller is on this machine, so paths of files that are not sent become absolute.
    If the controller is on another machine, the job file must name such files by absolute paths on that
    machine. Raises `ConfigError`."""
    load_job(path, overrides, files=False)
    content, base = read_composed(path), path.resolve().parent
    apply_overrides(content, overrides)
    content = flattened(content)
    content.pop("run_dir", None)
    resolved = copy.deepcopy(content)
    resolve_paths(resolved, base)
    package = _Package(base, here)
    packed = package.seen_there(content, resolved)
    if sum(map(len, package.files.values())) > MOST_BYTES or len(package.files) > MOST_FILES:
        problem = f"its files are more than {MOST_BYTES >> 20} MiB or {MOST_FILES}"
        package.mistakes.append(Mistake("file", problem, BY_PLACE))
    if package.mistakes:
        raise ConfigError(str(path), package.mistakes)
    return Submission(key, packed, files=package.files, priority=priority)


class _Package:
    """The files below the folder `base` that are sent."""

    def __init__(self, base: Path, here: bool) -> None:
        self._base = base
        self._here = here
        self.files: dict[str, bytes] = {}
        self.mistakes: list[Mistake] = []

    def seen_there(self, given: Any, resolved: Any, field: str = "") -> Any:
        """Return `given` with each path changed to the path that the controller sees. Pack the files that are
        sent. A value counts as a path if `resolve_paths` changed it."""
        if isinstance(given, dict):
            return {
                key: self.seen_there(value, resolved.get(key), f"{field}.{key}".strip("."))
                for key, value in given.items()
            }
        if isinstance(given, list) and isinstance(resolved, list) and len(given) == len(resolved):
            pairs = enumerate(zip(given, resolved, strict=True))
            return [self.seen_there(*pair, f"{field}.{number}") for number, pair in pairs]
        if given == resolved or not isinstance(given, str) or os.path.isabs(given) or given.startswith("~"):
            return given
        is_code = OWN_CODE.fullmatch(given) is not None
        found = Path(resolved.rpartition(":")[0] if is_code else resolved)
        small = found.is_file() and found.stat().st_size <= MOST_BYTES
        if found.is_relative_to(self._base) and small and not any(p.startswith("..") for p in found.parts):
            self._add(found)
            name = found.relative_to(self._base).as_posix()
            return f"{name}:{given.rpartition(':')[2]}" if is_code else name
        if self._here:
            return resolved
        why = "is a folder, which stays here" if found.is_dir() else "is no file below the job file's folder"
        fix = "Give its absolute path on the controller's machine, or put the file beside the job file"
        self.mistakes.append(Mistake(field, f"{given} {why}, and the controller is on another machine", fix))
        return given

    def _add(self, path: Path) -> None:
        """Pack a file below the base. For Python code, also pack the modules beside it that it imports."""
        name = path.relative_to(self._base).as_posix()
        if name in self.files or len(self.files) > MOST_FILES:
            return
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                self.files[name] = file.read(MOST_BYTES + 1)
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror or error}"
            raise ConfigError(str(path), [Mistake("file", problem, "Check its permissions")]) from None
        for module in _imports(self.files[name]) if path.suffix == ".py" else ():
            parts = module.split(".")
            for depth in range(1, len(parts) + 1):
                stem = path.parent.joinpath(*parts[:depth])
                for beside in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
                    if beside.is_file():
                        self._add(beside)


def _imports(code: bytes) -> Iterator[str]:
    """Yield the names of the modules that `code` imports. Yields nothing if `code` is not valid Python,
    because the loader of the code reports that error later."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module


# --- the receiver's side -------------------------------------------------------------------------------


def read_submission(body: bytes) -> Submission:
    """Return the submission in the body of a request after checking its limits. Raises `ConfigError`."""
    mistakes: list[Mistake] = []
    try:
        given = msgspec.json.decode(body, type=Submission)
    except (ValueError, RecursionError) as error:
        text = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ConfigError("the submission", [Mistake("body", text, "Send what the API page shows")]) from None
    if (where := too_nested(given.job)) is not None:
        problem = "it is nested too deep, or holds too many values"
        mistakes.append(Mistake(f"job.{where}", problem, "Flatten it"))
    if (size := sum(map(len, given.files.values()))) > MOST_BYTES:
        mistakes.append(Mistake("files", f"they have {size} bytes, and {MOST_BYTES} is the limit", BY_PLACE))
    if mistakes := mistakes or [*_name_mistakes(given.files)]:
        raise ConfigError("the submission", mistakes)
    return given


def _name_mistakes(files: Mapping[str, bytes]) -> Iterator[Mistake]:
    parts_of = {name: name.split("/", MOST_LEVELS) for name in files}
    folders = {"/".join(parts[:n]) for parts in parts_of.values() for n in range(1, len(parts))}
    for name, parts in parts_of.items():
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


def read_job(given: Submission, folder: Path) -> tuple[dict[str, Any], JobConfig]:
    """Return the mapping of a submitted job with all overrides, and the job with paths relative to `folder`.

    The files that the job names are not checked. Raises `ConfigError`."""
    content = copy.deepcopy(given.job)
    if mistakes := apply_overrides(content, given.overrides):
        raise ConfigError("the submission", mistakes)
    content["run_dir"] = "runs"
    return content, job_of(content, folder, folder)


def job_of(
    content: dict[str, Any], base: Path, run_dir: Path, overrides: Sequence[str] = (), *, files: bool = False
) -> JobConfig:
    """Return the job of a mapping whose files are in `base`.

    The job runs below `run_dir`, whatever `run_dir` the mapping has. Raises `ConfigError`, also if an
    override changes its name."""
    source = f"job {content.get('job', '')}"
    pinned = [*overrides, f"run_dir={json.dumps(str(run_dir))}"]
    job = load_job(content, pinned, source=source, base=base, files=files)
    if job.job != content.get("job"):
        raise ConfigError(source, [Mistake("job", "a job keeps its name", "Submit another job instead")])
    return job


def next_job(
    content: dict[str, Any], base: Path, run_dir: Path, overrides: Sequence[str] = (), *, files: bool = False
) -> tuple[JobConfig, bool]:
    """Return the job of the next start, and whether it resumes the work in its run folder.

    Raises `ConfigError`, `RunFolderError`."""
    run_folder = run_dir / str(content["job"])
    if run_folder.is_dir() and has_work(run_folder):
        return job_to_resume(run_folder, overrides, files=files), True
    return job_of(content, base, run_dir, overrides, files=files), False


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Create `folder`, write checked `files` into it, and flush them to the disk. Raises OSError."""
    folder.mkdir(parents=True, mode=0o700)
    for name, content in files.items():
        with os.fdopen(open_beneath(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
