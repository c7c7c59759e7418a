"""File service on the home host of a run, for processes on other hosts.

Promises: processes can read only files that the job names and files of the run. Only the trainer can write,
and only the entries of a run folder in `WRITTEN`. A written file gets its final name only when it is
complete."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from areal_async.base.errors import FaultError, RunError
from areal_async.base.mistakes import ConfigError
from areal_async.base.own_files import NotBeneath, open_beneath, parts_of, remove_beneath, rename_beneath
from areal_async.base.topology import Role
from areal_async.config.content import CONTENT, OF_TRAINER, content_mistakes, store_url
from areal_async.config.job import JobConfig
from areal_async.launch.plan import with_fields
from areal_async.rpc.home_messages import HomeFile, HomeFiles, ListHome, ReadHome, RemoveHome, WriteHome
from areal_async.rpc.schema import Ok
from areal_async.rpc.server import Answer, Handler, Peer
from areal_async.storage.home import FILES, PROTOCOL, RUN
from areal_async.storage.transfer import fetch
from areal_async.storage.urls import local_path, url_of

WRITTEN = frozenset({"checkpoints", "model", "adapter", "batches", "published.jsonl"})
"""Entries that a trainer writes into the run's folder."""
MOST_BYTES = 8 << 20  # Largest answer
MOST_FILES = 100_000
CODE = frozenset({".py", ".json", ".yaml", ".yml", ".txt", ".toml", ".jinja"})
"""Suffixes of the files in the folder of a user's part that are sent together with the part."""
MOST_CODE_BYTES = 64 << 20
OWN = re.compile(r"(/[^:]*\.py):\w+")
UPLOAD = ".upload-"
UPLOAD_NAME = re.compile(r"[0-9a-f]{16}")


def exported(job: JobConfig) -> list[Path]:
    """Return the paths on the home host that processes on other hosts need: the job's model, tasks and part
    folders."""
    return [root.path for root in _roots(job)]


def code_folders(job: JobConfig) -> list[Path]:
    """Return the folders of the user's own parts."""
    texts: list[str] = []
    _on_texts(job.model_dump(mode="json"), texts.append)
    found = map(OWN.fullmatch, texts)
    return list(dict.fromkeys(Path(match[1]).parent for match in found if match is not None))


def content_of(role: Role, job: JobConfig) -> list[str]:
    """Return the fields of the job whose content a process of this role needs on its host."""
    tasks = ["tasks.train", "tasks.evaluation"] if job.kind != "rl" else []
    shares = job.placement.share is not None and job.tasks.evaluation is not None
    fields: Mapping[Role, list[str]] = {
        "buffer": ["tasks.train"],
        "trainer": ["model", *OF_TRAINER, *tasks],
        "rollout": ["model", *(["tasks.evaluation"] if shares else [])],
        "evaluator": ["model", "tasks.evaluation"],
        "reward": [],
    }
    return fields[role]


def bring_content(job: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """Fetch the content that a process of `role` needs from the job's home or from stores.

    Returns the job with its paths on this host. `HomeFileSystem` must be connected. Raises `ConfigError` or
    `StorageError`."""
    there = JobConfig.model_validate(job)
    places = {str(path): local_path(f"{PROTOCOL}://{FILES}{path}") for path in exported(there)}
    here = moved_to(job, places)
    for folder in code_folders(there):
        fetch(f"{PROTOCOL}://{FILES}{folder}", places[str(folder)])
    moved = JobConfig.model_validate(here)
    if mistakes := content_mistakes(moved, content_of(role, moved)):
        raise ConfigError(f"job {moved.job}", mistakes)
    return here


def with_home_store(job: JobConfig) -> JobConfig:
    """Return `job` with the run folder on the home host as its store, unless the job names a store."""
    if store_url(job) is not None:
        return job
    return with_fields(job, "checkpoint", store=f"{PROTOCOL}://{RUN}")


def moved_to(job: Mapping[str, Any], places: Mapping[str, Path]) -> dict[str, Any]:
    """Return the job with its paths on another host. `places` maps the beginnings of paths to their
    replacements."""
    longest_first = sorted(places, key=len, reverse=True)

    def move(value: str) -> str:
        begun = (old for old in longest_first if value == old or value.startswith((f"{old}/", f"{old}:")))
        old = next(begun, None)
        return value if old is None else f"{places[old]}{value[len(old) :]}"

    moved: dict[str, Any] = _on_texts(dict(job), move)
    return moved


def _on_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a copy of a JSON value in which each string `text` is replaced by `change(text)`."""
    if isinstance(value, dict):
        return {key: _on_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_on_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


class _Root(NamedTuple):
    """A file or folder at home that is served. `kind` decides which files in it are served (`serves`)."""

    path: Path
    kind: Literal["data", "code", "run"]

    def serves(self, name: str) -> bool:
        """Return whether a regular file with this name below the root is served. "" is the root itself."""
        if self.kind == "run":
            return not name.rpartition("/")[2].startswith(UPLOAD)
        hidden = any(part.startswith(".") for part in name.split("/"))
        return not hidden and (self.kind == "data" or Path(name).suffix in CODE)


class _Served(NamedTuple):
    """A listed file. The server opens it as `name` below `folder`."""

    about: HomeFile
    folder: Path
    name: str


def _roots(job: JobConfig) -> list[_Root]:
    data = [path for path in attrgetter(*CONTENT)(job) if path is not None and url_of(path) is None]
    return [*(_Root(path, "data") for path in data), *(_Root(path, "code") for path in code_folders(job))]


class HomeFilesServer:
    """The handlers of the requests in `home_messages.py`, for `job` with the run folder `run_dir`.

    The server reads only files that it finds when it lists the job's paths. Raises `RunError` if a user's
    part lies in the home directory itself, or above it."""

    def __init__(self, run_dir: Path, job: JobConfig) -> None:
        self._run_dir = run_dir
        self._roots = _roots(job)
        self._listings: dict[_Root, dict[str, _Served]] = {}
        for folder in code_folders(job):
            if Path.home().resolve().is_relative_to(folder.resolve()):
                raise RunError(
                    f"a part of the job lies in {folder}, and the files beside a part travel to other hosts: "
                    "move the part into a folder of its own"
                )

    def handlers(self) -> Mapping[type, Handler]:
        work: Mapping[type, Callable[..., Any]] = {
            ListHome: self._list,
            ReadHome: self._read,
            WriteHome: self._write,
            RemoveHome: self._remove,
        }
        return {request: partial(asyncio.to_thread, do) for request, do in work.items()}

    def _list(self, peer: Peer, request: ListHome, _: list[memoryview]) -> Answer:
        return HomeFiles(self._listed(self._readable(request.path, peer)))

    def _read(self, peer: Peer, request: ReadHome, _: list[memoryview]) -> Answer:
        if (served := self._served(self._readable(request.path, peer))) is None:
            raise FaultError("forbidden", f"{request.path} is not of this run")
        try:
            with os.fdopen(open_beneath(*served), "rb") as file:
                file.seek(request.begin)
                return Ok(), [file.read(max(0, min(request.size_bytes, MOST_BYTES)))]
        except (OSError, ValueError) as error:
            raise FaultError("invalid", f"{request.path} cannot be read: {error}") from error

    def _write(self, peer: Peer, request: WriteHome, attachments: list[memoryview]) -> Answer:
        path = self._writable(request.path)
        if UPLOAD_NAME.fullmatch(request.upload) is None or len(attachments) != 1 or request.offset < 0:
            raise FaultError("forbidden", "this is no piece of a file")
        folder, _, last = path.rpartition("/")
        fresh = f"{folder}/{UPLOAD}{request.upload}".lstrip("/")
        try:
            with os.fdopen(open_beneath(self._run_dir, fresh, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.seek(request.offset)
                file.write(attachments[0])
                if request.last:
                    file.truncate(request.offset)
                    file.flush()
                    os.fsync(file.fileno())
            if request.last:
                rename_beneath(self._run_dir, fresh, last)
        except OSError as error:
            raise FaultError("failed", f"{path} cannot be written: {error}") from error
        return Ok()

    def _remove(self, peer: Peer, request: RemoveHome, _: list[memoryview]) -> Answer:
        path = self._writable(request.path)
        try:
            remove_beneath(self._run_dir, path)
        except OSError as error:
            raise FaultError("failed", f"{path} cannot be removed: {error}") from error
        return Ok()

    def _served(self, roots: list[tuple[_Root, str]]) -> tuple[Path, str] | None:
        """Return the folder and the name below it of a readable file; None for any other file."""
        for root, name in roots:
            if root.kind == "run":  # A listing would not have the trainer's newest files
                return (self._run_dir, f"{root.path.name}/{name}".rstrip("/")) if root.serves(name) else None
            if root not in self._listings:
                self._listings[root] = _walk(root)
            if (served := self._listings[root].get(name)) is not None:
                return served.folder, served.name
        return None

    def _listed(self, roots: list[tuple[_Root, str]]) -> dict[str, HomeFile]:
        found: dict[str, HomeFile] = {}
        for root, inner in roots:
            self._listings[root] = listing = _walk(root)
            for name, served in listing.items():
                if not inner or name == inner:
                    found["" if name == inner else name] = served.about
                elif name.startswith(f"{inner}/"):
                    found[name[len(inner) + 1 :]] = served.about
        return found

    def _readable(self, name: str, peer: Peer) -> list[tuple[_Root, str]]:
        """Return the roots that contain `name`, each with the remaining path below it.

        Raises `FaultError` if this peer may read none of them."""
        root, rest, parts = self._parsed(name)
        if root == RUN and parts and peer.key in ("trainer", "") and parts[0] in WRITTEN:
            return [(_Root(self._run_dir / parts[0], "run"), "/".join(parts[1:]))]
        path = Path("/") / rest
        if root == FILES and (roots := [each for each in self._roots if path.is_relative_to(each.path)]):
            return [(each, "/".join(path.relative_to(each.path).parts)) for each in roots]
        raise FaultError("forbidden", f"{name} is not of this run")

    def _writable(self, name: str) -> str:
        """Return the path of `name` in the run's folder. Raises `FaultError` if the trainer may not write
        this name."""
        root, _, parts = self._parsed(name)
        if root != RUN or not parts or parts[0] not in WRITTEN:
            raise FaultError("forbidden", f"{name} is not for others to write")
        return "/".join(parts)

    def _parsed(self, name: str) -> tuple[str, str, list[str]]:
        """Return the first part of a name, the rest, and the parts of the path below the run's folder (none
        if the path is outside of this folder).

        Raises `FaultError` for a name that is not a plain relative path."""
        root, _, rest = name.partition("/")
        try:
            first, *parts = parts_of(rest)
        except NotBeneath as error:
            raise FaultError("forbidden", str(error)) from error
        return root, rest, parts if first == self._run_dir.name else []


def _walk(root: _Root) -> dict[str, _Served]:
    """Return the served files of `root`, by their names below it. Raises `FaultError`."""
    # The user names the root, so the root may be a link. Links below it are refused, except in the cache of
    # the hub.
    if root.kind == "run" and root.path.is_symlink():
        return {}
    top = root.path.resolve()
    if top.is_file():
        return {"": _Served(_about(top.stat()), top.parent, top.name)}
    found: dict[str, _Served] = {}
    total = 0
    for parent, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if root.kind == "run" or not name.startswith("."))
        below = Path(parent).relative_to(top)
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for last in [*sorted(names), *links]:
            name = (below / last).as_posix()
            if not root.serves(name):
                continue
            folder, inner = top, name
            status = os.lstat(top / name)
            if stat.S_ISLNK(status.st_mode) and root.kind == "data":
                folder, inner = _blob_of(top, name)
                status = os.lstat(folder / inner)
            if not stat.S_ISREG(status.st_mode):
                continue
            total += status.st_size
            if len(found) >= MOST_FILES or (root.kind == "code" and total > MOST_CODE_BYTES):
                fix = "keep code in a folder of its own"
                raise FaultError("invalid", f"{root.path} holds more than travels with a job: {fix}")
            found[name] = _Served(_about(status), folder, inner)
    return found


def _blob_of(top: Path, name: str) -> tuple[Path, str]:
    """Return the folder and name of the file that the link `name` in a snapshot of the hub's cache points to.

    The file must be in `blobs` of the same repository. Raises `FaultError` for any other link."""
    repository = top.parents[1] if top.parent.name == "snapshots" else None
    target = Path(os.path.normpath(top / Path(name).parent / os.readlink(top / name)))
    if repository is not None and target.parent == repository / "blobs":
        return repository, f"blobs/{target.name}"
    fix = "put the file or folder itself there"
    raise FaultError("invalid", f"{top / name} is a link, and links are not sent to other hosts: {fix}")


def _about(status: os.stat_result) -> HomeFile:
    return HomeFile(status.st_size, status.st_mtime_ns)
