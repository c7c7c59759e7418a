"""Places where a process can be made to kill itself, so that crashes are tested where they hurt most.

    AREAL_ASYNC_FAILPOINTS="trainer.after_publish@3,rollout.before_put"

kills a trainer with SIGKILL at its third pass of that place and a rollout worker at its first. Each entry
fires once per run folder (a file under `run_dir/failpoints` remembers it), in whichever process comes first;
with `*` at its end (`trainer.after_publish@3*`) it fires in every process that gets there. Not set, a
failpoint costs one look at an empty dictionary.

The places:
    trainer  before_batch after_batch after_train after_publish before_commit after_commit
             mid_checkpoint (files written, not named) after_checkpoint (named, buffer not told)
             after_checkpointed
    buffer   after_shelve (large episodes in their file) before_write after_write (confirmed by Redis)
             before_reply
    rollout  before_put after_put
    reward   after_claim before_verdict
    weights  publisher_sent peer_sent (a chunk goes to a socket) received (a chunk is verified and written)
             bucket_sent (tensors went into an engine)
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from areal_async.runtime.events import record

VARIABLE = "AREAL_ASYNC_FAILPOINTS"
FOLDER = "failpoints"


@dataclass
class Point:
    at: int
    """The pass at which it fires, from 1."""
    always: bool = False
    passed: int = 0


_armed: dict[str, Point] = {}
_spent_dir: Path | None = None


def arm(spec: str, run_dir: Path | None = None) -> None:
    """Replace what is armed. Raises ValueError for what is no such list."""
    global _spent_dir
    points = {}
    for entry in filter(None, (part.strip() for part in spec.split(","))):
        name, at, count = entry.removesuffix("*").partition("@")
        if not name or (at and not (count.isdecimal() and int(count) > 0)):
            raise ValueError(f"{VARIABLE}: {entry!r} is not NAME, NAME@N or NAME@N*")
        points[name] = Point(int(count or 1), always=entry.endswith("*"))
    _armed.clear()
    _armed.update(points)
    _spent_dir = run_dir / FOLDER if run_dir is not None else None


def arm_from_environment(run_dir: Path) -> None:
    if spec := os.environ.get(VARIABLE):
        arm(spec, run_dir)


def failpoint(name: str) -> None:
    """Kill this process here, if this place is armed and it is its turn."""
    if not _armed:
        return
    point = _armed.get(name)
    if point is None:
        return
    point.passed += 1
    if point.passed < point.at or (point.passed > point.at and not point.always):
        return
    if point.always or _first_in_run(f"{name}@{point.at}"):
        record("failpoint", name=name, hit=point.passed)
        os.kill(os.getpid(), signal.SIGKILL)


def _first_in_run(entry: str) -> bool:
    if _spent_dir is None:
        return True
    _spent_dir.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(_spent_dir / entry, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
