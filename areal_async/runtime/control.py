"""An RPC server on a thread of its own: it answers while the process's own loop, or native code, is busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from areal_async.rpc.endpoints import Access
from areal_async.rpc.schema import Request
from areal_async.rpc.server import Handler, Server, by_type

START_WAIT_S = 10.0
LAST_ANSWERS_S = 0.05
"""For answers that have just been given to go out."""


class ControlServer:
    """`start`, then the handler of its type answers each request on the server's thread, then `stop`."""

    def __init__(
        self,
        endpoint: str,
        *,
        service: str,
        job: str,
        access: Access,
        handlers: Mapping[type[Request[Any]], Handler],
    ) -> None:
        self._endpoint = endpoint
        self._service = service
        self._job = job
        self._access = access
        self._handler = by_type(service, handlers)
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

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = Server(
            self._endpoint, service=self._service, job=self._job, access=self._access, handler=self._handler
        )
        try:
            await server.start()
        except Exception as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._stopping.wait()
        await asyncio.sleep(LAST_ANSWERS_S)
        await server.stop()
