"""An event loop in a separate thread, for blocking code."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from areal_async.base.log import get_logger

CLOSE_S = 10.0  # Longest wait for threads that end

log = get_logger("loop_thread")
T = TypeVar("T")


class LoopThread:
    """An event loop in a separate daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._helpers = ThreadPoolExecutor(thread_name_prefix=name)
        self.loop.set_default_executor(self._helpers)
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Schedule `work` on the loop. Any thread may call this."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop for a caller in another thread, and return its result."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after an interrupt of this thread the work must not continue
            raise

    def close(self) -> None:
        """Stop the loop, its helper threads and its thread. A thread that does not end within `CLOSE_S` is
        left running."""
        until_s = time.monotonic() + CLOSE_S
        with suppress(TimeoutError):
            self.begin(_settle()).result(CLOSE_S)
        ending = threading.Thread(target=self._helpers.shutdown, daemon=True)
        ending.start()
        ending.join(max(0.0, until_s - time.monotonic()))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(max(1.0, until_s - time.monotonic()))
        if ending.is_alive() or self._thread.is_alive():
            log.warning("a thread hangs and is left behind", name=self._thread.name)
        else:
            self.loop.close()


async def _settle() -> None:
    """Wait until each call that `close` interrupted has raised its error in the thread that waits for the
    call."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=1.0)
