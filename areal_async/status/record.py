"""`metrics.jsonl`: the numbers of a run, one JSON object a line, written by several processes.

Each record is one append of one line, so lines of different processes never mix. Appends share a lock on the
file; whoever mends its end (half a line, left by a power cut or a full disk) holds that lock alone, since the
half of a line may be one that another process is just writing. A number that JSON has no form for (NaN,
infinity) is written as null.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_async.runtime.log import as_plain, get_logger
from areal_async.runtime.status import board

log = get_logger("record")

_decoder = msgspec.json.Decoder(dict[str, Any])


class RunLog:
    """Appends records to one file. Safe to use from several processes and threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._threads = threading.Lock()
        with self._locked(fcntl.LOCK_EX):
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")  # else the first record of ours would join the half line

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with self._threads:  # threads share the descriptor, and with it its lock on the file
            fcntl.flock(self._fd, how)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record, and have this process's `Status` tell it; `time_s` (unix time in seconds) is
        added unless given. Raises OSError."""
        record = {"kind": kind, "time_s": round(time.time(), 3), **fields}
        line = msgspec.json.encode(record, enc_hook=as_plain) + b"\n"
        with self._locked(fcntl.LOCK_SH):
            written = os.write(self._fd, line)
            if written != len(line):
                self._take_back(written)
                raise OSError(
                    errno.ENOSPC,
                    f"only {written} of {len(line)} bytes were written to {self.path}: the disk is full",
                )
        board.record(line)

    def _take_back(self, written: int) -> None:
        """Remove the half line just written, unless another record has joined it meanwhile."""
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        if os.fstat(self._fd).st_size == end:
            os.ftruncate(self._fd, end - written)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tail:
    """The records appended to a file since the last look. A line counts once it has its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def records(self) -> Iterator[dict[str, Any]]:
        """All whole lines up to the end that are JSON objects."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    with contextlib.suppress(msgspec.DecodeError):
                        yield _decoder.decode(line)


LIFE_KINDS = frozenset({"start", "resume", "restart", "end"})
"""Records of when a run lived and what died in it: no results."""


def holds_results(path: Path) -> bool:
    """Whether a run log has anything but records of the run's own lives."""
    with path.open("rb") as file:
        for line in file:
            try:
                if _decoder.decode(line).get("kind") not in LIFE_KINDS:
                    return True
            except msgspec.DecodeError:
                return True
    return False


def read_run_log(path: Path) -> list[dict[str, Any]]:
    """All records of a run in the order they were written; none when there is no file yet.

    A line that is no record (one cut short by a crash) is left out and logged."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line:
            continue
        try:
            records.append(_decoder.decode(line))
        except msgspec.DecodeError:
            log.warning("unreadable record", path=str(path), line=number)
    return records


def held_out_name(records: Sequence[Mapping[str, Any]]) -> str:
    """What the held-out figure of a run is: a share of right answers only where every score was 0 or 1."""
    return "mean reward" if any(record.get("partial_credit") for record in records) else "accuracy"


def lives_of(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The records of each life of a run: from its start, and from each `resume`, to the next."""
    lives: list[list[Mapping[str, Any]]] = []
    for record in records:
        if not lives or record.get("kind") == "resume":
            lives.append([])
        lives[-1].append(record)
    return lives


def as_it_became(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of a run without those of work that a restarted trainer did again: of each step and of each
    version's evaluation of a policy, the last record, in the order of the last ones."""
    last: dict[Any, int] = {}
    for number, record in enumerate(records):
        kind = record.get("kind")
        name = record.get("version") if kind == "evaluation" else record.get("step")
        last[(kind, record.get("policy"), name) if kind in ("step", "evaluation", "sft") else number] = number
    return [dict(records[number]) for number in sorted(last.values())]
