"""An event loop in a separate thread, for blocking code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a separate daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
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
        """Stop the loop, its helper threads and its thread."""
        self.run(_settle())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _settle() -> None:
    """Let calls that failed at close raise in their threads, and end the loop's helper threads."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=1.0)
    await asyncio.get_running_loop().shutdown_default_executor()
