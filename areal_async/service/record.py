"""`metrics.jsonl`: the numbers of a run, one JSON object a line.

The supervisor alone writes the file. Services hand it their records over its control socket, wherever they
run (`open_records`). A number that JSON has no form for (NaN, infinity) is written as null.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

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
"""Longest wait of `RemoteRecords.write`, once per outage of the supervisor; the record is on its way then."""
MOST_WAITING = 4096  # Records on their way; whoever writes one more waits
FLUSH_S = 15.0
ANSWER_S = 30.0

POLICY_FOLDER = re.compile(f"policies/{POLICY_NAME}")

_decoder = msgspec.json.Decoder(dict[str, Any])


class RunRecords(Protocol):
    """Where the records of a run go, and come from."""

    path: Path
    """The file, on the home host."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record, and have this process's `Status` tell it; `time_s` (unix time in seconds) is
        added unless given. Raises OSError where it cannot be written."""

    def write_samples(self, folder: str, name: str, data: bytes) -> None:
        """Write the file `name` of samples, of the run or of a policy whose folder below that of the run is
        `folder`; see `samples.py`. Waits until it is written. Raises OSError or `WireError`."""

    def read(self, *kinds: str) -> list[dict[str, Any]]:
        """The records of these kinds so far, in the order they were written; of all where none is named.
        Raises OSError or `WireError`."""

    def close(self) -> None:
        """Wait, for a while, until all is written."""


class RunLog:
    """Appends records to the file. Any thread may write; one process at a time does."""

    def __init__(self, path: Path, on_line: Callable[[bytes], None] = lambda line: None) -> None:
        """`on_line` is called with the line of each record that is written; it must be quick."""
        self.path = path
        self._on_line = on_line
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # else the first record of ours would join the half line

    def write(self, kind: str, **fields: Any) -> None:
        line = line_of(kind, fields)
        self.append(line)
        board.record(line)

    def append(self, line: bytes) -> None:
        """Append the line of one record, or nothing of it. Raises OSError."""
        with self._lock:
            before = os.fstat(self._fd).st_size
            written = os.write(self._fd, line)
            if written != len(line):
                os.ftruncate(self._fd, before)
                raise OSError(
                    errno.ENOSPC,
                    f"only {written} of {len(line)} bytes were written to {self.path}: the disk is full",
                )
        self._on_line(line)

    def write_samples(self, folder: str, name: str, data: bytes) -> None:
        """Raises ValueError for what is no folder of a policy or no name of such a file."""
        if folder and POLICY_FOLDER.fullmatch(folder) is None:
            raise ValueError(f"{folder!r} is no folder of a policy")
        write_samples(self.path.parent / folder, name, data)

    def read(self, *kinds: str) -> list[dict[str, Any]]:
        return [record for record in read_run_log(self.path) if not kinds or record.get("kind") in kinds]

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteRecords:
    """The run log of the supervisor at `address`, for a process of the run.

    Records are written in their order, each once, from a thread of its own. A supervisor that does not answer
    holds up nobody for longer than one wait, however many records follow: once a write has waited in vain,
    the next ones do not wait, and samples are given up, until a record has been written. At `MOST_WAITING`
    records writing waits for room."""

    def __init__(self, address: Address, path: Path, *, job: str, name: str, ctx: ServiceContext) -> None:
        self.path = path
        self._client = SyncClient(address, job=job, role=ctx.role, name=f"{name}/records", access=ctx.keys)
        self._waiting: queue.Queue[tuple[bytes, Future[None]] | None] = queue.Queue(MOST_WAITING)
        self._failed: OSError | None = None
        self._silent = False
        """True where somebody has waited in vain since a record was last written."""
        self._thread = threading.Thread(target=self._send, name="records", daemon=True)
        self._thread.start()

    def write(self, kind: str, **fields: Any) -> None:
        if self._failed is not None:
            raise self._failed
        line, written = line_of(kind, fields), Future[None]()
        self._waiting.put((line, written))
        if not self._silent:
            try:
                written.result(WRITE_WAIT_S)
            except TimeoutError:
                self._silent = not written.done()
        board.record(line)

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
        """Wait until all is written, at most `FLUSH_S`."""
        self._waiting.put(None)
        self._thread.join(FLUSH_S)
        if self._thread.is_alive():
            log.warning("records were not written", number=self._waiting.qsize())
        self._client.close()

    def __enter__(self) -> RemoteRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self) -> None:
        while (entry := self._waiting.get()) is not None:
            line, written = entry
            try:
                self._deliver(line)
            except OSError as error:
                self._failed = error
                written.set_exception(error)
            except PeerGone:  # closed
                return
            else:
                self._silent = False
                written.set_result(None)

    def _deliver(self, line: bytes) -> None:
        """Try until it is written. Raises OSError where the home host has no room for it."""
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
    """The run's records, for a process of it."""
    if not ctx.topology.control:
        return RunLog(ctx.run_dir / RECORDS)
    path = Path(ctx.topology.home_host.run_dir) / RECORDS
    return RemoteRecords(
        Address(ctx.topology.control, "supervisor"), path, job=ctx.job.job, name=ctx.name, ctx=ctx
    )


RECORDS = "metrics.jsonl"


def line_of(kind: str, fields: Mapping[str, Any]) -> bytes:
    """A record as it is written."""
    record = {"kind": kind, "time_s": round(time.time(), 3), **fields}
    return msgspec.json.encode(record, enc_hook=as_plain) + b"\n"


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


LIFE_KINDS = frozenset({"start", "resume", "restart", "death", "scale", "end"})
"""Records of when a run lived, what died in it and how many workers it had: no results."""


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
        last[
            (kind, record.get("policy"), name) if kind in ("step", "evaluation", *FILE_KINDS) else number
        ] = number
    return [dict(records[number]) for number in sorted(last.values())]
