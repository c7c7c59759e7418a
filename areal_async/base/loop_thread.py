"""Work in daemon threads: an event loop for blocking code, and single pieces of work. A process that exits
does not wait for disk or network operations in such threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from areal_async.base.log import get_logger

CLOSE_S = 10.0  # Longest wait for threads that end

log = get_logger("loop_thread")
T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str = "together") -> Future[T]:
    """Run `work` in a daemon thread with this `name`. The future cannot be cancelled."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(done)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


class Background:
    """Runner of one piece of work at a time in a thread. After a piece has failed, every later call raises
    its error."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._result: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Wait for the previous work, then start this work."""
        self.wait()
        self._result = in_thread(work, self._name)

    @property
    def is_running(self) -> bool:
        return self._result is not None and not self._result.done()

    def wait(self) -> None:
        """Wait until the work has finished. Raises its error."""
        if self._result is not None:
            self._result.result()

    def check(self) -> None:
        """Raise the error of failed work."""
        if not self.is_running:
            self.wait()


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
