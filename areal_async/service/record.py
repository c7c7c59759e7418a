"""`metrics.jsonl`: the numbers of a run, one JSON object per line.

The supervisor is the only writer of the file. Services on any host send it their records over its control
socket (`open_records`). Numbers that JSON cannot express (NaN, infinity) are written as null."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import msgspec

from areal_async.base.addresses import Address
from areal_async.base.errors import FaultError, PeerGone, RpcTimeout, WireError, errno_of
from areal_async.base.log import as_plain, get_logger
from areal_async.base.versions import POLICY_NAME
from areal_async.config.trainings import FILE_KINDS
from areal_async.rpc.board import board
from areal_async.rpc.client import SyncClient
from areal_async.rpc.control_messages import ReadRecords, WriteRecord, WriteSamples
from areal_async.service.context import ServiceContext
from areal_async.service.samples import write_samples

log = get_logger("record")

WRITE_WAIT_S = 2.0
"""Longest time that `RemoteRecords.write` waits for its record to be written. During an outage of the
supervisor, only the first write waits."""
MOST_WAITING = 4096  # Records in flight; the writer of one more waits
FLUSH_S = 15.0
ANSWER_S = 30.0

RECORDS = "metrics.jsonl"
POLICY_FOLDER = re.compile(f"policies/{POLICY_NAME}")

_decoder = msgspec.json.Decoder(dict[str, Any])


class RunRecords(ABC):
    """The records of a run. `path` is their file on the home host. Use it as a context manager."""

    path: Path

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record, and add it to this process's `Status`.

        `time_s` (unix time in seconds) is added unless given. Raises OSError if the record cannot be
        written."""
        record = {"kind": kind, "time_s": round(time.time(), 3), **fields}
        line = msgspec.json.encode(record, enc_hook=as_plain) + b"\n"
        self.append(line)
        board.record(line)

    @abstractmethod
    def append(self, line: bytes) -> None:
        """Append the line of one record, completely or not at all. Raises OSError."""

    @abstractmethod
    def write_samples(self, folder: str, name: str, data: bytes) -> None:
        """Write the samples file `name` (see `samples.py`), and wait until it is written.

        `folder` is the folder of a policy below the run folder, or empty for the run folder itself. Raises
        OSError or `WireError`."""

    @abstractmethod
    def read(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the records of these kinds so far, in the order of writing. Without kinds, return all
        records.

        Raises OSError or `WireError`."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all records are written, up to a limit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunLog(RunRecords):
    """Appends records to the file. Any thread may write, but only one process at a time."""

    def __init__(self, path: Path, on_line: Callable[[bytes], None] = lambda line: None) -> None:
        """Open the file. `on_line` is called with each written line and must return quickly."""
        self.path = path
        self._on_line = on_line
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # otherwise our first record would join an incomplete line

    def append(self, line: bytes) -> None:
        with self._lock:
            before = os.fstat(self._fd).st_size
            written = os.write(self._fd, line)
            if written != len(line):
                os.ftruncate(self._fd, before)
                why = f"only {written} of {len(line)} bytes were written to {self.path}: the disk is full"
                raise OSError(errno.ENOSPC, why)
        self._on_line(line)

    def write_samples(self, folder: str, name: str, data: bytes) -> None:
        """Write the file as `RunRecords` does. Raises ValueError for an invalid folder or name."""
        if folder and POLICY_FOLDER.fullmatch(folder) is None:
            raise ValueError(f"{folder!r} is no folder of a policy")
        write_samples(self.path.parent / folder, name, data)

    def read(self, *kinds: str) -> list[dict[str, Any]]:
        return [record for record in read_run_log(self.path) if not kinds or record.get("kind") in kinds]

    def close(self) -> None:
        os.close(self._fd)


class RemoteRecords(RunRecords):
    """The run log of the supervisor, for other processes of the run.

    A separate thread sends each record once, in order. If the supervisor does not answer, only the first
    write waits, for at most `WRITE_WAIT_S`. Later writes only queue their records, and samples are refused,
    until the supervisor has written a record again. If `MOST_WAITING` records are queued, a writer waits for
    room."""

    def __init__(self, ctx: ServiceContext) -> None:
        self.path = Path(ctx.topology.home_host.run_dir) / RECORDS
        address, name = Address(ctx.topology.control, "supervisor"), f"{ctx.name}/records"
        self._client = SyncClient(address, job=ctx.job.job, role=ctx.role, name=name, access=ctx.keys)
        self._waiting: queue.Queue[tuple[bytes, Future[None]] | None] = queue.Queue(MOST_WAITING)
        self._failed: OSError | None = None
        self._silent = False
        """True after a wait without an answer, until a record is written."""
        self._thread = threading.Thread(target=self._send, name="records", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        if self._failed is not None:
            raise self._failed
        written = Future[None]()
        self._waiting.put((line, written))
        if not self._silent:
            try:
                written.result(WRITE_WAIT_S)
            except TimeoutError:
                self._silent = not written.done()

    def write_samples(self, folder: str, name: str, data: bytes) -> None:
        if self._silent:
            raise RpcTimeout("the run's home does not answer")
        try:
            self._client.connect(ANSWER_S)
            self._client.call(WriteSamples(name, folder), attachments=[data], timeout_s=ANSWER_S)
        except FaultError as error:
            if error.kind != "failed":
                raise
            raise OSError(errno_of(error) or errno.ENOSPC, error.message) from error
        except RpcTimeout:
            self._silent = True
            raise

    def read(self, *kinds: str) -> list[dict[str, Any]]:
        self._client.connect(ANSWER_S)
        _, attached = self._client.exchange(ReadRecords(list(kinds)), timeout_s=ANSWER_S)
        return [_decoder.decode(line) for line in bytes(attached[0]).split(b"\n") if line]

    def close(self) -> None:
        """Wait until all records are written, at most `FLUSH_S`."""
        self._waiting.put(None)
        self._thread.join(FLUSH_S)
        if self._thread.is_alive():
            log.warning("records were not written", number=self._waiting.qsize())
        self._client.close()

    def _send(self) -> None:
        while (entry := self._waiting.get()) is not None:
            line, written = entry
            try:
                self._deliver(line)
            except OSError as error:
                self._failed = error
                written.set_exception(error)
            except PeerGone:  # the connection is closed
                return
            else:
                self._silent = False
                written.set_result(None)

    def _deliver(self, line: bytes) -> None:
        """Retry until the line is written. Raises OSError if the home host has no space for it."""
        while True:
            try:
                self._client.connect(ANSWER_S)
                self._client.call(WriteRecord(), attachments=[line], timeout_s=ANSWER_S)
                return
            except FaultError as error:
                raise OSError(errno_of(error) or errno.ENOSPC, error.message) from error
            except PeerGone:
                raise
            except WireError as error:
                log.warning("the run's home does not answer; records wait", error=str(error))


def open_records(ctx: ServiceContext) -> RunRecords:
    """Return the run's records, for a process of the run."""
    if not ctx.topology.control:
        return RunLog(ctx.run_dir / RECORDS)
    return RemoteRecords(ctx)


class Tail:
    """Reader of the records that were appended to a file since the last call. An incomplete line is read once
    it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def records(self) -> Iterator[dict[str, Any]]:
        """Return all complete lines up to the end of the file that are JSON objects."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    with contextlib.suppress(msgspec.DecodeError):
                        yield _decoder.decode(line)


LIFE_KINDS = frozenset({"start", "resume", "restart", "death", "end"})
"""Kinds of records that are not results. These records are about the lives and deaths of processes."""


def holds_results(path: Path) -> bool:
    """Return whether a run log has a record of any other kind than `LIFE_KINDS`."""
    try:
        with path.open("rb") as file:
            return any(_decoder.decode(line).get("kind") not in LIFE_KINDS for line in file)
    except msgspec.DecodeError:
        return True


def read_run_log(path: Path) -> list[dict[str, Any]]:
    """Return all records of a run in the order of writing; none if the file does not exist yet.

    An invalid line (incomplete because of a crash) is skipped and logged."""
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n") if path.exists() else (), start=1):
        try:
            records += [_decoder.decode(line)] if line else []
        except msgspec.DecodeError:
            log.warning("unreadable record", path=str(path), line=number)
    return records


def held_out_name(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the held-out figure: `accuracy` only if every score is 0 or 1."""
    return "mean reward" if any(record.get("partial_credit") for record in records) else "accuracy"


def lives_of(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the records of each life of a run. A life lasts from a start or `resume` of the run to the next
    `resume`."""
    lives: list[list[Mapping[str, Any]]] = []
    for record in records:
        if not lives or record.get("kind") == "resume":
            lives.append([])
        lives[-1].append(record)
    return lives


def as_it_became(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of a run without work that a restarted trainer repeated.

    For each step and each evaluated version of a policy, only the last record is kept. The records stay in
    the order in which they were written."""
    last: dict[Any, int] = {}
    for number, record in enumerate(records):
        kind, key = record.get("kind"), "version" if record.get("kind") == "evaluation" else "step"
        is_work = kind in ("step", "evaluation", *FILE_KINDS)
        last[(kind, record.get("policy"), record.get(key)) if is_work else number] = number
    return [dict(records[number]) for number in sorted(last.values())]
