"""One start of a job, as a folder with its claim, its stop file and its ending.

Promises: exactly one process runs an attempt, even if several processes are started for the attempt
(`attempt_process.py`). The first process that writes the file `claim` runs it. This process locks the file as
long as it lives, and writes the ending before it exits. A file `stop` in the folder stops the run in an
orderly way, as one SIGTERM does. The stop file may be written repeatedly, even before the process exists.

    request.json    the run; the same for all processes of the attempt
    claim           the process that runs it; the lock shows whether it lives
    stop            an order to end
    ending.json     the ending"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal_async.base.own_files import is_locked, lock_file, sync
from areal_async.base.processes import start_of
from areal_async.base.topology import Role
from areal_async.launch.folders import Owner

REQUEST, CLAIM, STOP, ENDING = "request.json", "claim", "stop", "ending.json"
RECORD_BYTES = 64 << 10
NOBODY = Owner(0, "")


class AttemptRequest(msgspec.Struct, frozen=True):
    """The job as a mapping with paths relative to `files`. The job runs below `run_dir` with the
    overrides."""

    job: dict[str, Any]
    files: str
    run_dir: str
    overrides: list[str]
    modules: dict[Role, str]
    cluster: dict[str, Any]  # Content of the cluster file for the run


def claim(folder: Path) -> bool:
    """Make this process the one that runs the attempt in `folder`. Return False if another process runs it.

    The process has the claim until it exits, because it never closes the descriptor that holds the lock."""
    return _claim(folder, Owner(os.getpid(), start_of(os.getpid()))) is not None


def void(folder: Path) -> bool:
    """Block the attempt, so that no late process runs it. Return False if a process already has the claim."""
    fd = _claim(folder, NOBODY)
    if fd is not None:
        os.close(fd)
    return fd is not None or holder_of(folder) == "void"


def _claim(folder: Path, owner: Owner) -> int | None:
    if (fd := lock_file(folder / CLAIM)) is None:
        return None
    if os.fstat(fd).st_size:  # a claim with content is never taken over
        os.close(fd)
        return None
    os.pwrite(fd, msgspec.json.encode(owner), 0)
    os.fsync(fd)
    sync(folder)
    return fd


def holder_of(folder: Path) -> Owner | Literal["nobody", "void", "gone"]:
    """Return the process that runs the attempt in `folder`.

    Returns `nobody` before the attempt is claimed, `void` if it was blocked, and `gone` once the process has
    exited."""
    try:
        fd = os.open(folder / CLAIM, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return "nobody"
    with os.fdopen(fd, "rb") as file:
        if not (record := file.read(RECORD_BYTES)):
            return "nobody"
        owner = msgspec.json.decode(record, type=Owner)
        if is_locked(fd):
            return owner
    return "void" if owner == NOBODY else "gone"
