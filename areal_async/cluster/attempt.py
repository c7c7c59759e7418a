"""One start of a job, as a folder: its process, an order to stop, its ending.

Promises: of all processes that are started for one attempt (`attempt_process.py`) exactly one runs it,
whoever started them and whenever they arrive: the first that places its *claim*. It holds a lock on the claim
as long as it lives, and writes the ending before it exits. A file `stop` in the folder ends the run in order,
as one SIGTERM does, however often it is written, also if it exists before the process.

    request.json    the run, the same for all processes that are started
    claim           the process that runs it; the lock says if it lives
    stop            an order to end
    ending.json     the ending
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal_async.base.own_files import NotOurs, is_locked, read_own, sync, take_lock
from areal_async.base.processes import start_of
from areal_async.base.topology import Role
from areal_async.cluster.states import RunEnded
from areal_async.launch.folders import Owner

REQUEST, CLAIM, STOP, ENDING = "request.json", "claim", "stop", "ending.json"
RECORD_BYTES = 64 << 10
NOBODY = Owner(0, "")


class AttemptRequest(msgspec.Struct, frozen=True):
    """The job's mapping with paths relative to `files`, to be run below `run_dir` with changes."""

    job: dict[str, Any]
    files: str
    run_dir: str
    overrides: list[str]
    modules: dict[Role, str]
    cluster: dict[str, Any]  # The cluster file's content, for the run


def claim(folder: Path) -> bool:
    """Make this process the one that runs the attempt in `folder`; return False if another is. It has the
    claim until it exits: the descriptor with the lock is never closed."""
    return _claim(folder, Owner(os.getpid(), start_of(os.getpid()))) is not None


def void(folder: Path) -> bool:
    """Claim the attempt for nobody, so that no late process runs it; return False if a process has it."""
    fd = _claim(folder, NOBODY)
    if fd is not None:
        os.close(fd)
    return fd is not None or holder_of(folder) == "void"


def _claim(folder: Path, owner: Owner) -> int | None:
    mine = folder / f"{CLAIM}.{os.getpid()}.tmp"
    fd = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    take_lock(fd)
    os.write(fd, msgspec.json.encode(owner))
    os.fsync(fd)
    try:
        os.link(mine, folder / CLAIM)  # whole and locked from its first moment, and only once
    except FileExistsError:
        os.close(fd)
        return None
    finally:
        mine.unlink()
    sync(folder)
    return fd


def holder_of(folder: Path) -> Owner | Literal["nobody", "void", "gone"]:
    """Return the process that runs the attempt in `folder`; `nobody` before it is claimed, `void` if it was
    claimed for nobody, `gone` once the process has exited."""
    try:
        fd = os.open(folder / CLAIM, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return "nobody"
    with os.fdopen(fd, "rb") as file:
        owner = msgspec.json.decode(file.read(RECORD_BYTES), type=Owner)
        if is_locked(fd):
            return owner
    return "void" if owner == NOBODY else "gone"


def ending_of(folder: Path) -> RunEnded | None:
    """Return the ending that the attempt's process wrote; None if it wrote none."""
    with suppress(OSError, NotOurs, msgspec.DecodeError):
        return msgspec.json.decode(read_own(folder / ENDING, max_bytes=RECORD_BYTES), type=RunEnded)
    return None
