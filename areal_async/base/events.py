"""The event log of a process, and failpoints: named places in the code at which a test kills the process.

The log is off unless `observe.event_log` is set. `docs/metrics.md#event-log` lists the events with their
fields, and the failpoints. A written line survives SIGKILL of its process. A last line without a newline is
incomplete. If `AREAL_ASYNC_FAILPOINTS` is not set, a failpoint costs one look-up in an empty dictionary.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "events"


class EventLog:
    """A log of events in one file. Any thread may call `write`."""

    def __init__(self, run_dir: Path, process: str) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{process}-{os.getpid()}.jsonl"
        self._head = {"process": process, "pid": os.getpid()}
        self._n = 0
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, event: str, fields: dict[str, Any]) -> None:
        n, self._n = self._n, self._n + 1
        times = {"time_s": time.time(), "mono_s": time.monotonic()}
        line = json.dumps({"event": event, "n": n} | self._head | times | fields, separators=(",", ":"))
        os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


_log: EventLog | None = None


def open_events(run_dir: Path, process: str) -> None:
    """Start the event log of this process. From now on `record` writes."""
    global _log
    close_events()
    _log = EventLog(run_dir, process)


def close_events() -> None:
    global _log
    log, _log = _log, None
    if log is not None:
        log.close()


def recording() -> bool:
    """Return whether events are written. Check it before collecting expensive fields."""
    return _log is not None


def record(event: str, **fields: Any) -> None:
    """Append one event, or do nothing if the log is off."""
    if _log is not None:
        _log.write(event, fields)


VARIABLE = "AREAL_ASYNC_FAILPOINTS"
SPENT_FOLDER = "failpoints"


@dataclass
class Point:
    at: int  # the pass at which it fires, from 1
    passed: int = 0


_armed: dict[str, Point] = {}
_spent_dir: Path | None = None


def arm(spec: str, run_dir: Path | None = None) -> None:
    """Replace the armed failpoints. Raises `ValueError` for an invalid list."""
    global _spent_dir
    points = {}
    for entry in filter(None, (part.strip() for part in spec.split(","))):
        name, at, count = entry.partition("@")
        if not name or (at and not (count.isdecimal() and int(count) > 0)):
            raise ValueError(f"{VARIABLE}: {entry!r} is not NAME or NAME@N")
        points[name] = Point(int(count or 1))
    _armed.clear()
    _armed.update(points)
    _spent_dir = run_dir / SPENT_FOLDER if run_dir is not None else None


def arm_from_environment(run_dir: Path) -> None:
    if spec := os.environ.get(VARIABLE):
        arm(spec, run_dir)


def failpoint(name: str) -> None:
    """Count a pass through the failpoint `name`. If the failpoint is armed for this pass, kill this process,
    but only once per run."""
    if not _armed:
        return
    point = _armed.get(name)
    if point is None:
        return
    point.passed += 1
    if point.passed == point.at and _first_in_run(f"{name}@{point.at}"):
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
