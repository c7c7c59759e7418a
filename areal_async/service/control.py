"""The status of a service: its answer to the request `Status`.

Promises: every service answers at its own endpoint before its own code runs. It answers from a separate
thread, so that it can answer while it computes. The answer has typed fields that the service fills itself, so
names of metrics and log lines may change."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import prometheus_client

from areal_async.rpc.board import NoticeHandler, StatusBoard, board
from areal_async.rpc.control_messages import ReadMetrics, ServiceStatus, Status
from areal_async.rpc.reply_book import ServerLimits
from areal_async.rpc.schema import Ok, Request
from areal_async.rpc.secret import Access
from areal_async.rpc.server import Answer, Handler, Peer, Server, by_type
from areal_async.service.context import ServiceContext

START_WAIT_S = 10.0
LAST_ANSWERS_S = 0.05  # Time to send the last answers

T = TypeVar("T")


class WorkThread:
    """A thread with its own event loop, on which `_work` runs."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Set `_stopping`, and wait for the end of the thread. May be called again."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # its loop has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(START_WAIT_S)

    def do(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule a coroutine on the thread's event loop. Any thread may call this."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._work())

    async def _work(self) -> None:
        raise NotImplementedError


class ControlServer(WorkThread):
    """An RPC server on its own thread. It answers while the process's own loop or native code is busy.

    Call `start`, then `stop`. In between, the server calls the handler of each request's type on its own
    thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        service: str,
        job: str,
        access: Access,
        handlers: Mapping[type[Request[Any]], Handler],
        limits: ServerLimits | None = None,
    ) -> None:
        """Create the server without starting it."""
        super().__init__("control")
        self._make = partial(
            Server,
            endpoint,
            service=service,
            job=job,
            access=access,
            handler=by_type(service, handlers),
            limits=limits,
        )
        self._started: Future[None] = Future()

    def start(self) -> None:
        """Serve the endpoint. Raises `EndpointError` if that is not possible."""
        super().start()
        self._started.result(START_WAIT_S)

    async def _work(self) -> None:
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


def answer_status(ctx: ServiceContext, board: StatusBoard = board) -> None:
    """Answer `Status` from `board` and `ReadMetrics` for the service of `ctx`, as long as this process
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
        # Repeating these requests does no harm, and cached pages of series would use much memory.
        limits=ServerLimits(cached_replies=0),
    ).start()
