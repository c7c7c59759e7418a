"""Lease requests to the buffer, and the waits that the loops of a worker are made of.

Several lease requests are under way at once, each under the version that it named: the answer to one may take
long and depends on that version, so when another is served the next request goes out beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from areal_async.base.errors import FaultError, RpcTimeout
from areal_async.base.log import get_logger
from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.messages import Lease, Leases

log = get_logger("rollout")
T = TypeVar("T")

LEASE_WAIT_MS = 2000  # How long the buffer may hold a lease request until there is room
MAX_LEASE_CALLS = 3
"""Lease requests under way at once: one with the version served now, and older ones on their way back."""
EMPTY_PAUSE_S = 0.05  # Least time between two requests when nothing is granted
IDLE_WAIT_S = 1.0  # Longest wait of a loop that nothing wakes


class LeaseClient:
    """Asks for `wanted()` groups under the versions `serving()`, one of each policy. `on_grant(leases,
    versions)` is called with each answer and the versions that its request named, also with one that arrives
    while `run` ends."""

    def __init__(
        self,
        buffer: Client,
        name: str,
        *,
        wanted: Callable[[], int],
        serving: Callable[[], Sequence[VersionTag]],
        on_grant: Callable[[Leases, Sequence[VersionTag]], None],
        retry_pause_s: float,
    ) -> None:
        self.under_way = 0  # Requests that are not answered
        self._buffer = buffer
        self._name = name
        self._wanted = wanted
        self._serving = serving
        self._on_grant = on_grant
        self._retry_pause_s = retry_pause_s
        self._awake = asyncio.Event()

    def wake(self) -> None:
        """There may be room for more, or another version is served."""
        self._awake.set()

    async def run(self) -> None:
        """Keep asking until cancelled."""
        calls: dict[asyncio.Task[Leases], list[VersionTag]] = {}
        try:
            while True:
                self._awake.clear()
                serving, wanted = list(self._serving()), self._wanted()
                if wanted and serving not in calls.values() and len(calls) < MAX_LEASE_CALLS:
                    calls[asyncio.ensure_future(self._ask(wanted, serving))] = serving
                    self.under_way = len(calls)
                await first_of([*calls], self._awake)
                answered = {call: calls.pop(call) for call in [*calls] if call.done()}
                self.under_way = len(calls)
                for call, served in answered.items():
                    self._on_grant(call.result(), served)
        finally:
            for call in calls:
                call.cancel()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for answer, served in zip(answers, calls.values(), strict=True):
                if isinstance(answer, Leases):
                    self._on_grant(answer, served)

    async def _ask(self, wanted: int, serving: list[VersionTag]) -> Leases:
        began_s = time.monotonic()
        try:
            leases = await self._buffer.call(Lease(self._name, wanted, serving, LEASE_WAIT_MS))
        except (RpcTimeout, FaultError) as error:
            await wait_out(error, "lease", self._retry_pause_s)
            return Leases([])
        if not leases.groups:
            log.debug("no lease", reason=leases.reason)
            await asyncio.sleep(max(0.0, began_s + EMPTY_PAUSE_S - time.monotonic()))
        return leases


async def wait_out(error: RpcTimeout | FaultError, call: str, pause_s: float) -> None:
    """Return after a pause for what may pass (the buffer is away, busy, or restarts), else raise."""
    if isinstance(error, FaultError) and error.kind in ("schema", "invalid", "fenced"):
        raise error
    log.warning("buffer does not answer", call=call, error=str(error))
    await asyncio.sleep(pause_s)


async def first_of(
    tasks: Sequence[asyncio.Task[Any]], event: asyncio.Event, timeout_s: float = IDLE_WAIT_S
) -> None:
    """Wait until one of the tasks is done, the event is set or the time is up."""
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
