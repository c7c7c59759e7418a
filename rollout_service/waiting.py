"""The waits that the loops of a worker are made of. Each has a deadline, or a stop signal."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from areal_async.errors import FaultError, RpcTimeout
from areal_async.runtime.log import get_logger

log = get_logger("rollout")
T = TypeVar("T")

IDLE_WAIT_S = 1.0
RETRY_PAUSE_S = 0.5


async def wait_out(error: RpcTimeout | FaultError, what: str) -> None:
    """Return after a pause for what may pass (the buffer is away, busy, or restarts), else raise."""
    if isinstance(error, FaultError) and error.kind in ("schema", "invalid", "fenced"):
        raise error
    log.warning("buffer does not answer", call=what, error=str(error))
    await asyncio.sleep(RETRY_PAUSE_S)


async def first_of(
    tasks: Sequence[asyncio.Task[Any]], event: asyncio.Event, timeout_s: float = IDLE_WAIT_S
) -> None:
    """Until one of the tasks is done, the event is set or the time is up."""
    if event.is_set():
        return
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([*tasks, waiter], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `stop` came first; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
