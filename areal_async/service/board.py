"""What a service says of itself to whoever asks: the answer to the request `Status`.

Promises: every service of a run answers at an endpoint of its own, from before its own code runs, and from a
thread of its own, so that it answers while it computes; what it says are typed fields that it fills itself,
so that a metric or a log line may change its name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import prometheus_client

from areal_async.rpc.control_messages import (
    ReadMetrics,
    RunRecord,
    ServiceFigures,
    ServiceState,
    ServiceStatus,
    Status,
)
from areal_async.rpc.schema import Ok, Request
from areal_async.rpc.secret import Access
from areal_async.rpc.server import Answer, Handler, Peer, Server, by_type
from areal_async.service.context import ServiceContext
from areal_async.base.metrics import busy

MAX_RECORDS = 64  # Told at most; whoever asks more seldom than so many are written misses some
NOTICE_FIELDS = ("kind", "edge", "detail", "reason", "message", "group_id", "error")
"""Fields of a log record that a notice repeats."""

START_WAIT_S = 10.0
LAST_ANSWERS_S = 0.05  # Time for answers that have just been given to go out


class ControlServer:
    """An RPC server on a thread of its own: it answers while the process's own loop, or native code, is busy.

    `start`, then the handler of its type answers each request on the server's thread, then `stop`."""

    def __init__(
        self,
        endpoint: str,
        *,
        service: str,
        job: str,
        access: Access,
        handlers: Mapping[type[Request[Any]], Handler],
        cached_replies: int = 4096,
    ) -> None:
        """`cached_replies` is the server's."""
        self._make = partial(
            Server,
            endpoint,
            service=service,
            job=job,
            access=access,
            handler=by_type(service, handlers),
            cached_replies=cached_replies,
        )
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Raises `EndpointError` where the endpoint cannot be served."""
        self._thread.start()
        self._started.result(START_WAIT_S)

    def stop(self) -> None:
        """Give the last answers, and end the thread. Safe to repeat."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # its loop has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(START_WAIT_S)

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        """Have its thread do this beside, as long as it runs. Any thread may ask."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = self._make()
        try:
            await server.start()
        except Exception as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._stopping.wait()
        await asyncio.sleep(LAST_ANSWERS_S)
        await server.stop()


class StatusBoard:
    """What this process wants said of it. Any thread may write."""

    def __init__(self) -> None:
        self.draining = False  # Whether it finishes what it has and takes nothing more
        self.threads = 0  # CPU threads that it was told to compute with; 0: it was told none
        self.figures: Callable[[], ServiceFigures] = ServiceFigures  # Counts its work when it is asked
        self._records: deque[RunRecord] = deque(maxlen=MAX_RECORDS)
        self._recorded = 0
        self._waits: dict[str, str] = {}
        self._notice = ""
        self._notices = 0
        self._lock = threading.Lock()

    def follow_threads(self) -> None:
        """Have torch compute with the threads that were told, from here on. For the thread that computes,
        between two steps: torch's count is a thread's own."""
        import torch  # most services have no use for it

        if self.threads and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    def waits(self, subject: str, what: str) -> None:
        """Say that it waits for `what` of `subject`; nothing: it does not any more."""
        with self._lock:
            if what:
                self._waits[subject] = what
            else:
                self._waits.pop(subject, None)

    @contextmanager
    def waiting(self, subject: str, what: str) -> Iterator[None]:
        """Say so for the time of a block."""
        self.waits(subject, what)
        try:
            yield
        finally:
            self.waits(subject, "")

    def tell(self, text: str) -> None:
        """Say something that people should see once."""
        with self._lock:
            self._notice, self._notices = text, self._notices + 1

    def record(self, line: bytes) -> None:
        """Tell a line of metrics.jsonl that was written, where it is of a kind that is told."""
        with suppress(msgspec.ValidationError):
            record = _record_decoder.decode(line)
            with self._lock:
                self._records.append(record)
                self._recorded += 1

    def status(self, name: str, *, serves: bool) -> ServiceStatus:
        figures = self.figures()
        state: ServiceState = "starting" if not serves else "draining" if self.draining else "serving"
        with self._lock:
            told = self._notice, self._notices, list(self._records), self._recorded
            return ServiceStatus(name, os.getpid(), state, dict(self._waits), busy.totals(), figures, *told)


_record_decoder = msgspec.json.Decoder(RunRecord)
board = StatusBoard()


class NoticeHandler(logging.Handler):
    """Tells warnings and errors of ours as one line of text."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "areal_fields", {})
        extra = ", ".join(str(fields[name]) for name in NOTICE_FIELDS if fields.get(name))
        self._tell(record.getMessage() + (f" ({extra})" if extra else ""))


def answer_status(ctx: ServiceContext, board: StatusBoard = board) -> None:
    """Answer `Status` for the service of `ctx` from `board`, and `ReadMetrics`, as long as this process
    lives."""

    async def answer(peer: Peer, request: Status, attachments: list[memoryview]) -> ServiceStatus:
        board.threads = request.threads or board.threads
        ctx.moved(request.endpoints)
        return board.status(ctx.name, serves=ctx.has_served)

    async def series(peer: Peer, request: ReadMetrics, attachments: list[memoryview]) -> Answer:
        return Ok(), [prometheus_client.generate_latest()]

    logging.getLogger("areal").addHandler(NoticeHandler(board.tell))
    ControlServer(
        ctx.place.status,
        service=ctx.name,
        job=ctx.job.job,
        access=ctx.keys,
        handlers={Status: answer, ReadMetrics: series},
        cached_replies=0,  # asking twice does no harm, and pages of series would be held for long
    ).start()
