"""The supervisor's control socket, on a thread of its own.

It answers requests for the status of the run, and for `areal-async scale` and `drain`.

Promises: the supervisor's own loop carries out the requests, one at a time. The answer reports the change, or
the reason why nothing changed. The buffer is told which worker leaves, so that it gives this worker no
further lease. Only peers with the secret of the run are served."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from areal_async.base.addresses import Address
from areal_async.base.errors import FaultError, FaultKind, WireError
from areal_async.base.log import get_logger
from areal_async.base.processes import exit_text
from areal_async.base.topology import Topology
from areal_async.launch.home_files import HomeFilesServer
from areal_async.rpc.board import board
from areal_async.rpc.client import Client
from areal_async.rpc.control_messages import (
    DrainWorker,
    ReadRecords,
    ScaleWorkers,
    ServiceStatus,
    Status,
    WorkersChanged,
    WriteRecord,
    WriteSamples,
)
from areal_async.rpc.messages import Drain
from areal_async.rpc.schema import Ok
from areal_async.rpc.secret import Access
from areal_async.rpc.server import Answer, Peer
from areal_async.service.control import ControlServer
from areal_async.service.record import RunLog

MAX_ASKED = 64  # Most requests that wait for the supervisor's loop

WorkersRequest = ScaleWorkers | DrainWorker

log = get_logger("supervisor")


@dataclass(frozen=True)
class LeavingWorker:
    since_s: float
    ended: Future[str] = field(default_factory=Future)  # Text about the end of the worker

    def left(self, name: str, status: int | None, now_s: float) -> None:
        """Inform the waiting clients that worker `name` has exited. `status` is None if the worker never
        ran."""
        took_s = now_s - self.since_s
        text = f"{name} has finished, handed back the rest and ended, in {took_s:.1f} s"
        if status is None:
            text = f"{name} did not run; it will not be started again"
        elif status != 0:
            text = f"{name} {exit_text(status)} after {took_s:.1f} s; its leases are given to others"
        self.ended.set_result(text)


@dataclass(frozen=True)
class FleetChange:
    """A change that the supervisor has begun: started workers, leaving workers, and the workers that stay."""

    joined: list[str]
    leaving: Mapping[str, Future[str]]
    workers: list[str]


class _Record(msgspec.Struct):
    kind: str = ""


class ControlSocket(ControlServer):
    """The socket's server. Call `start`, then `carry_out` in each round of the supervisor, then `stop`.

    If the buffer does not answer within `buffer_wait_s`, it is not told which workers leave."""

    def __init__(
        self,
        job: str,
        topology: Topology,
        keys: Access,
        buffer_wait_s: float,
        records: RunLog | None = None,
        files: HomeFilesServer | None = None,
    ) -> None:
        self._job = job
        self._records = records
        self._keys = keys
        self._buffer = Address(topology.buffer, "buffer")
        self._buffer_wait_s = buffer_wait_s
        self.trained = threading.Event()
        """Set once a trainer has recorded a step or its final model."""
        self._asked: queue.Queue[tuple[WorkersRequest, Future[FleetChange]]] = queue.Queue(MAX_ASKED)
        super().__init__(
            topology.control,
            service="supervisor",
            job=job,
            access=keys,
            handlers={
                Status: self._status,
                ScaleWorkers: self._scale,
                DrainWorker: self._drain,
                WriteRecord: self._write,
                WriteSamples: self._write_samples,
                ReadRecords: self._read,
                **(files.handlers() if files is not None else {}),
            },
        )

    def carry_out(self, begin: Callable[[WorkersRequest], FleetChange]) -> None:
        """Call `begin` for each request since the last call."""
        with suppress(queue.Empty):
            while True:
                request, begun = self._asked.get_nowait()
                try:
                    begun.set_result(begin(request))
                except Exception as error:
                    begun.set_exception(error)

    async def _status(self, peer: Peer, request: Status, attachments: list[memoryview]) -> ServiceStatus:
        return board.status("supervisor", serves=True)

    async def _write(self, peer: Peer, request: WriteRecord, attachments: list[memoryview]) -> Ok:
        line = bytes(attachments[0]) if len(attachments) == 1 else b""
        if not line.endswith(b"\n") or line.count(b"\n") != 1:
            raise FaultError("invalid", "a record is one line")
        try:
            kind = msgspec.json.decode(line, type=_Record).kind
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise FaultError("invalid", f"a record is an object of JSON: {error}") from error
        try:
            self._run_log.append(line)
        except OSError as error:
            raise FaultError("failed", str(error)) from error
        if kind in ("step", "model"):
            self.trained.set()
        return Ok()

    async def _write_samples(self, peer: Peer, request: WriteSamples, attachments: list[memoryview]) -> Ok:
        data = b"".join(map(bytes, attachments))
        try:
            await asyncio.to_thread(self._run_log.write_samples, request.folder, request.name, data)
        except (OSError, ValueError) as error:
            kind: FaultKind = "failed" if isinstance(error, OSError) else "invalid"
            raise FaultError(kind, str(error)) from error
        return Ok()

    async def _read(self, peer: Peer, request: ReadRecords, attachments: list[memoryview]) -> Answer:
        found = self._run_log.read(*request.kinds)
        return Ok(), [b"\n".join(map(msgspec.json.encode, found))]

    @property
    def _run_log(self) -> RunLog:
        if self._records is None:
            raise FaultError("invalid", "this supervisor keeps no records")
        return self._records

    async def _scale(self, peer: Peer, request: ScaleWorkers, _: list[memoryview]) -> WorkersChanged:
        begun = await self._begin(request)
        told = await asyncio.gather(*map(self._tell_buffer, begun.leaving))
        untold = [name for name, heard in zip(begun.leaving, told, strict=True) if not heard]
        late = f"so {', '.join(untold)} will be told at the end of that time"
        parts = {
            f"started {', '.join(begun.joined)}": begun.joined,
            f"draining {', '.join(begun.leaving)} (at most {request.limit_ms / 1000:.0f} s)": begun.leaving,
            f"the buffer does not answer, {late}": untold,
        }
        nothing = f"nothing to do: the workers are {', '.join(begun.workers)}"
        text = "; ".join(part for part, names in parts.items() if names) or nothing
        return WorkersChanged(text, begun.workers)

    async def _drain(self, peer: Peer, request: DrainWorker, attachments: list[memoryview]) -> WorkersChanged:
        if request.outside:
            if not await self._tell_buffer(request.worker):
                raise FaultError("unavailable", "the buffer does not answer; nothing was done")
            text = f"{request.worker} is leased nothing more; it ends once it has finished what it has"
            return WorkersChanged(text, [])
        begun = await self._begin(request)
        ((name, ending),) = begun.leaving.items()
        await self._tell_buffer(name)
        # Shielded, because other clients may wait for the same future.
        text = await asyncio.shield(asyncio.wrap_future(ending))
        return WorkersChanged(text, begun.workers)

    async def _begin(self, request: WorkersRequest) -> FleetChange:
        log.info("asked to change the workers", request=repr(request))
        begun: Future[FleetChange] = Future()
        try:
            self._asked.put_nowait((request, begun))
        except queue.Full:
            raise FaultError("busy", "the supervisor has requests enough under way", 500) from None
        return await asyncio.wrap_future(begun)

    async def _tell_buffer(self, name: str) -> bool:
        """Ask the buffer to stop giving leases to the worker. Return whether it has agreed."""
        client = Client(self._buffer, job=self._job, role="supervisor", name="control", access=self._keys)
        try:
            await client.connect(self._buffer_wait_s)
            await client.call(Drain(name, "it was told to drain"), timeout_s=self._buffer_wait_s)
        except WireError as error:
            log.warning("the buffer was not told", worker=name, error=str(error))
            return False
        finally:
            await client.close()
        return True
