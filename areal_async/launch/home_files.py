"""What the home of a run serves of its files to processes on other hosts, and takes from them.

Promises: of the home host's files nobody reads any but those that the job names, and the run's own; the
trainer alone writes, and only what trainers leave in a run's folder; a file has its name once it is whole.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from areal_async.config.errors import ConfigError
from areal_async.config.job import JobConfig
from areal_async.errors import FaultError
from areal_async.rpc.home_messages import HomeFile, HomeFiles, ListHome, ReadHome, RemoveHome, WriteHome
from areal_async.rpc.schema import Ok
from areal_async.rpc.server import Answer, Handler, Peer
from areal_async.runtime.topology import Role
from areal_async.storage.content import CONTENT, OF_TRAINER, content_mistakes, store_url
from areal_async.storage.home import FILES, PROTOCOL, RUN
from areal_async.storage.remote import StorageMissing
from areal_async.storage.transfer import fetch
from areal_async.storage.urls import local_path, url_of

WRITTEN = frozenset({"checkpoints", "model", "adapter", "batches", "published.jsonl"})
"""What a trainer leaves in the run's folder."""
MOST_BYTES = 8 << 20  # Of one answer
MOST_FILES = 100_000
CODE = frozenset({".py", ".json", ".yaml", ".yml", ".txt", ".toml", ".jinja"})
"""Endings of the files beside a part of the user's that travel with it."""
MOST_CODE_BYTES = 64 << 20
OWN = re.compile(r"(/[^:]*\.py):\w+")
BUFFER = "buffer"
"""Folder of the files of a buffer's own Redis in a run's folder. They come home when the run has ended."""
UPLOAD = ".upload-"
UPLOAD_NAME = re.compile(r"[0-9a-f]{16}")


def exported(job: JobConfig) -> list[Path]:
    """What a job names by path on the home host and its processes elsewhere must have: its model, its tasks,
    and the folders of its own parts."""
    data = attrgetter(*CONTENT)(job)
    return [*(path for path in data if path is not None and url_of(path) is None), *code_folders(job)]


def code_folders(job: JobConfig) -> list[Path]:
    """The folders of the files of the user's own parts."""
    found = (OWN.fullmatch(text) for text in _texts(job.model_dump(mode="json")))
    return list(dict.fromkeys(Path(match[1]).parent for match in found if match is not None))


def content_of(role: Role, job: JobConfig) -> list[str]:
    """The fields whose content a process of this role must have on its host."""
    tasks = ["tasks.train", "tasks.evaluation"] if job.kind != "rl" else []
    fields: Mapping[Role, list[str]] = {
        "buffer": ["tasks.train"],
        "trainer": ["model", *OF_TRAINER, *tasks],
        "rollout": ["model"],
        "evaluator": ["model", "tasks.evaluation"],
        "reward": [],
    }
    return fields[role]


def bring_content(job: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """Have lie on this host what a process of `role` needs of what the job names, from its home or from
    stores; the job as it is here. `HomeFileSystem` is connected. Raises `ConfigError` or `StorageError`."""
    there = JobConfig.model_validate(job)
    places = {str(path): local_path(f"{PROTOCOL}://{FILES}{path}") for path in exported(there)}
    here = moved_to(job, places)
    for folder in code_folders(there):
        fetch(f"{PROTOCOL}://{FILES}{folder}", places[str(folder)])
    moved = JobConfig.model_validate(here)
    if mistakes := content_mistakes(moved, content_of(role, moved)):
        raise ConfigError(f"job {moved.job}", mistakes)
    return here


def bring_buffer(job: str, target: Path) -> None:
    """Have lie at `target` what a run of `job` that has ended left at home of its buffer, if anything.
    `HomeFileSystem` is connected. Raises `StorageError`."""
    if not target.exists():
        with suppress(StorageMissing):
            fetch(f"{PROTOCOL}://{RUN}/{job}/{BUFFER}", target)


def with_home_store(job: JobConfig) -> JobConfig:
    """`job` with the home of its run as the store, where it names none."""
    if store_url(job) is not None:
        return job
    store = job.checkpoint.model_copy(update={"store": f"{PROTOCOL}://{RUN}"})
    return job.model_copy(update={"checkpoint": store})


def moved_to(job: Mapping[str, Any], places: Mapping[str, Path]) -> dict[str, Any]:
    """The job with each path that begins with one of `places` where that lies on another host."""
    longest_first = sorted(places, key=len, reverse=True)

    def move(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: move(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [move(inner) for inner in value]
        if isinstance(value, str):
            for old in longest_first:
                if value == old or value.startswith((f"{old}/", f"{old}:")):
                    return f"{places[old]}{value[len(old) :]}"
        return value

    moved: dict[str, Any] = move(dict(job))
    return moved


def _texts(value: Any) -> Collection[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


class HomeFilesServer:
    """The handlers of the requests in `home_messages.py`, for the job whose run is in `run_dir`."""

    def __init__(self, run_dir: Path, files: Collection[Path]) -> None:
        self._run_dir = run_dir
        self._files = list(files)

    def handlers(self) -> Mapping[type, Handler]:
        return {
            ListHome: self._list,
            ReadHome: self._read,
            WriteHome: self._write,
            RemoveHome: self._remove,
        }

    async def _list(self, peer: Peer, request: ListHome, _: list[memoryview]) -> Answer:
        path = self._readable(request.path, peer)
        return HomeFiles(await asyncio.to_thread(self._listed, request.path, path))

    async def _read(self, peer: Peer, request: ReadHome, _: list[memoryview]) -> Answer:
        path = self._readable(request.path, peer)
        size = min(request.size_bytes, MOST_BYTES)

        def read() -> bytes:
            try:
                with path.open("rb") as file:
                    file.seek(request.begin)
                    return file.read(size)
            except (OSError, ValueError) as error:
                raise FaultError("invalid", f"{request.path} cannot be read: {error}") from error

        return Ok(), [await asyncio.to_thread(read)]

    async def _write(self, peer: Peer, request: WriteHome, attachments: list[memoryview]) -> Answer:
        path = self._writable(request.path)
        if UPLOAD_NAME.fullmatch(request.upload) is None or len(attachments) != 1 or request.offset < 0:
            raise FaultError("forbidden", "this is no piece of a file")
        fresh = path.with_name(f"{UPLOAD}{request.upload}")

        def write() -> None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(fd, "wb", closefd=True) as file:
                    file.seek(request.offset)
                    file.write(attachments[0])
                    if request.last:
                        file.truncate(request.offset)
                        file.flush()
                        os.fsync(file.fileno())
                if request.last:
                    fresh.replace(path)
            except OSError as error:
                raise FaultError("failed", f"{path} cannot be written: {error}") from error

        await asyncio.to_thread(write)
        return Ok()

    async def _remove(self, peer: Peer, request: RemoveHome, _: list[memoryview]) -> Answer:
        path = self._writable(request.path)

        def remove() -> None:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

        await asyncio.to_thread(remove)
        return Ok()

    def _listed(self, name: str, path: Path) -> dict[str, HomeFile]:
        code = name.startswith(f"{FILES}/") and self._is_code(path)
        found: dict[str, HomeFile] = {}
        walk = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
        total = 0
        for file in walk:
            if not file.is_file() or file.name.startswith(UPLOAD) or (code and file.suffix not in CODE):
                continue
            status = file.stat()
            total += status.st_size
            if len(found) >= MOST_FILES or (code and total > MOST_CODE_BYTES):
                raise FaultError(
                    "invalid", f"{path} holds more than travels with a job: keep code in a folder of its own"
                )
            relative = "" if file == path else file.relative_to(path).as_posix()
            found[relative] = HomeFile(status.st_size, status.st_mtime_ns)
        return found

    def _is_code(self, path: Path) -> bool:
        """Whether it is there as the folder of a part, and not as a model or data."""
        return (
            any(path == folder and folder.is_dir() for folder in self._files)
            and not (path / "config.json").exists()
        )

    def _readable(self, name: str, peer: Peer) -> Path:
        """The path that a name stands for. Raises `FaultError` for what the peer may not read."""
        root, _, rest = name.partition("/")
        _check(rest)
        if root == RUN and (
            peer.key in ("trainer", "") or (peer.key == BUFFER and rest.split("/")[1:2] == [BUFFER])
        ):
            return self._in_run(rest)
        path = Path("/") / rest
        if root == FILES and any(path == own or own in path.parents for own in self._files):
            return path
        raise FaultError("forbidden", f"{name} is not of this run")

    def _writable(self, name: str) -> Path:
        root, _, rest = name.partition("/")
        _check(rest)
        if root != RUN or rest.split("/")[1:2] == [] or rest.split("/")[1] not in WRITTEN:
            raise FaultError("forbidden", f"{name} is not for others to write")
        return self._in_run(rest)

    def _in_run(self, rest: str) -> Path:
        """`<job>/<path>` in the run's folder."""
        job, _, path = rest.partition("/")
        if job != self._run_dir.name or not path:
            raise FaultError("forbidden", f"{rest} is not of this run")
        return self._run_dir / path


def _check(rest: str) -> None:
    if not rest or any(part in ("", ".", "..") for part in rest.split("/")) or "\0" in rest:
        raise FaultError("forbidden", f"{rest!r} names no file")
