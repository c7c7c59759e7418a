"""A worker's requests for leases: several under way at once, each under the version that it named."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from areal_async.errors import FaultError, RpcTimeout
from areal_async.rpc.client import Caller
from areal_async.rpc.messages import Lease, Leases, VersionTag
from areal_async.runtime.log import get_logger
from rollout_service.waiting import first_of, wait_out

log = get_logger("rollout")

LEASE_WAIT_MS = 2000
"""How long the buffer may hold a lease request until there is room."""
MAX_LEASE_CALLS = 3
"""Lease requests under way at once: one with the version served now, and older ones on their way back."""
EMPTY_PAUSE_S = 0.05
"""Least time between two requests when nothing is granted."""


class Asking:
    """`wanted` says how many groups there is room for, `serving` which version is served; `granted` takes
    each answer, and what was served when it was asked for."""

    def __init__(
        self,
        buffer: Caller,
        name: str,
        *,
        wanted: Callable[[], int],
        serving: Callable[[], VersionTag],
        granted: Callable[[Leases, VersionTag], None],
    ) -> None:
        self.under_way = 0
        """Requests that are not answered."""
        self._buffer = buffer
        self._name = name
        self._wanted = wanted
        self._serving = serving
        self._granted = granted
        self._awake = asyncio.Event()

    def wake(self) -> None:
        """There may be room for more, or another version is served."""
        self._awake.set()

    async def run(self, on_answer: Callable[[], None], late: Callable[[Leases], None]) -> None:
        """Keep asking. The answer to a request may take long, and depends on the version that it named: when
        another is served, the next request goes out beside it. `on_answer` follows each look at the answers;
        `late` takes what was granted while this was ended."""
        calls: dict[asyncio.Task[Leases], VersionTag] = {}
        try:
            while True:
                self._awake.clear()
                serving, wanted = self._serving(), self._wanted()
                if wanted and serving not in calls.values() and len(calls) < MAX_LEASE_CALLS:
                    calls[asyncio.ensure_future(self._ask(wanted, serving))] = serving
                    self.under_way = len(calls)
                await first_of([*calls], self._awake)
                for call in [call for call in calls if call.done()]:
                    serving = calls.pop(call)
                    self._granted(call.result(), serving)
                self.under_way = len(calls)
                on_answer()
        finally:
            for call in calls:
                call.cancel()
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(answer, Leases):
                    late(answer)

    async def _ask(self, wanted: int, serving: VersionTag) -> Leases:
        began_s = time.monotonic()
        try:
            leases = await self._buffer.call(Lease(self._name, wanted, serving, LEASE_WAIT_MS))
        except (RpcTimeout, FaultError) as error:
            await wait_out(error, "lease")
            return Leases([])
        if not leases.groups:
            log.debug("no lease", reason=leases.reason)
            await asyncio.sleep(max(0.0, began_s + EMPTY_PAUSE_S - time.monotonic()))
        return leases
