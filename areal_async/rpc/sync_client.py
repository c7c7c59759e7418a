"""`Client` for code that blocks, such as the trainer: the same promises, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from typing_extensions import Buffer

from areal_async.errors import PeerGone
from areal_async.rpc.client import TIMEOUT_S, Client
from areal_async.rpc.endpoints import Access
from areal_async.rpc.messages import R, Request, Welcome

T = TypeVar("T")


class SyncCaller(Protocol):
    """What a part of a service needs of a `SyncClient`: a place for a small fake in tests."""

    def call(
        self, request: Request[R], *, timeout_s: float | None = None, attachments: Sequence[Buffer] = ()
    ) -> R: ...

    def exchange(
        self, request: Request[R], *, timeout_s: float | None = None, attachments: Sequence[Buffer] = ()
    ) -> tuple[R, list[memoryview]]: ...


class SyncClient:
    """Ask the server at `endpoint`, blocking. Any thread may call; errors are those of `Client`."""

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        role: str,
        name: str,
        access: Access,
        timeout_s: float = TIMEOUT_S,
        max_in_flight: int = 64,
    ) -> None:
        self.endpoint = endpoint
        self._client = Client(
            endpoint,
            job=job,
            role=role,
            name=name,
            access=access,
            timeout_s=timeout_s,
            max_in_flight=max_in_flight,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def welcome(self) -> Welcome | None:
        """The last welcome, None before `connect`."""
        return self._client.welcome

    def __enter__(self) -> SyncClient:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self, timeout_s: float = 10.0) -> Welcome:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            name = f"rpc-{self.endpoint.rpartition('/')[2]}"
            self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
            self._thread.start()
        return self._wait(self._client.connect(timeout_s))

    def call(
        self, request: Request[R], *, timeout_s: float | None = None, attachments: Sequence[Buffer] = ()
    ) -> R:
        """As `Client.call`."""
        return self._wait(self._client.call(request, timeout_s=timeout_s, attachments=attachments))

    def exchange(
        self, request: Request[R], *, timeout_s: float | None = None, attachments: Sequence[Buffer] = ()
    ) -> tuple[R, list[memoryview]]:
        """As `Client.exchange`."""
        return self._wait(self._client.exchange(request, timeout_s=timeout_s, attachments=attachments))

    def close(self) -> None:
        """Fail calls of other threads with `PeerGone`, and end the thread."""
        if self._loop is None or self._thread is None:
            return
        self._wait(self._client.close())
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        asyncio.run_coroutine_threadsafe(_settle(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None:
            work.close()
            raise PeerGone(f"the client of {self.endpoint} is not connected")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of this thread must not leave the call running.
            future.cancel()
            raise


async def _settle() -> None:
    """Let the calls that were failed at close raise in their threads, and end the loop's helper threads."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=1.0)
    await asyncio.get_running_loop().shutdown_default_executor()
