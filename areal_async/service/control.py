"""The status of a service: its answer to the request `Status`.

Promises: every service answers at its own endpoint before its own code runs. It answers from a separate
thread, so that it can answer while it computes. The answer has typed fields that the service fills itself, so
clients do not depend on names of metrics or on log lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import prometheus_client

from areal_async.base.loop_thread import CLOSE_S, LoopThread
from areal_async.rpc.board import NoticeHandler, StatusBoard, board
from areal_async.rpc.control_messages import ReadMetrics, ServiceStatus, Status
from areal_async.rpc.reply_book import ServerLimits
from areal_async.rpc.schema import Ok, Request
from areal_async.rpc.secret import Access
from areal_async.rpc.server import Answer, Handler, Peer, Server, by_type
from areal_async.service.context import ServiceContext

LAST_ANSWERS_S = 0.05  # Time to send the last answers


class ControlServer:
    """An RPC server on its own thread. It answers while the process's own loop or native code is busy.

    Call `start`, then `stop`. In between, the server's thread calls the handler of each request's type."""

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
        handler = by_type(service, handlers)
        self._server = Server(
            endpoint, service=service, job=job, access=access, handler=handler, limits=limits
        )
        self._thread: LoopThread | None = None

    def start(self) -> None:
        """Serve the endpoint. Raises `EndpointError` if that is not possible."""
        self._thread = LoopThread("control")
        try:
            self._thread.run(self._server.start())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Send the last answers and end the thread. May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(TimeoutError):
                thread.begin(self._stop()).result(CLOSE_S)
            thread.close()

    async def _stop(self) -> None:
        await asyncio.sleep(LAST_ANSWERS_S)
        await self._server.stop()


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
