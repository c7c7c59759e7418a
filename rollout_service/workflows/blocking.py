"""Blocking calls of the user's code, each in a thread with a deadline.

Promises: a call past its deadline raises `CallTimeout` and holds nobody up; a thread cannot be ended, so what
hangs keeps its place until it ends by itself, and there are at most `limit` places: when all are taken for a
whole deadline, further calls fail and say so, instead of piling up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from areal_async.errors import ArealError

T = TypeVar("T")

LIMIT = 64


class CallTimeout(ArealError):
    """A call did not return in time."""


class BlockingCalls:
    """Used from one event loop."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._places = asyncio.Semaphore(limit)

    async def __call__(self, function: Callable[..., T], *arguments: Any, timeout_s: float) -> T:
        """`function(*arguments)`, with what it raises. Raises `CallTimeout` after `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._places.acquire()
        except TimeoutError:
            raise CallTimeout(
                f"all {self._limit} threads for blocking calls were busy for {timeout_s:g} s: "
                "what they run hangs"
            ) from None
        outcome: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | None, error: BaseException | None) -> None:
            self._places.release()
            if outcome.done():
                return
            if error is None:
                outcome.set_result(result)  # type: ignore[arg-type]
            else:
                outcome.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = function(*arguments)
            except Exception as raised:
                # A future cannot carry this one.
                error = RuntimeError("StopIteration") if isinstance(raised, StopIteration) else raised
            except BaseException as raised:  # SystemExit of a tool must not end the worker
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            try:
                loop.call_soon_threadsafe(deliver, result, error)
            except RuntimeError:
                return  # the loop has closed meanwhile: nobody waits

        threading.Thread(target=run, name="blocking-call", daemon=True).start()
        try:
            async with asyncio.timeout_at(deadline_s):
                return await outcome
        except TimeoutError:
            if outcome.done() and not outcome.cancelled():
                raise  # the call's own TimeoutError
            raise CallTimeout(f"not back within {timeout_s:g} s") from None
