"""Finished episodes to the buffer, and leases back to it.

Promises: an episode that was added is sent until the buffer has acknowledged or refused it, or its lease is
lost; a lease of which nothing more will come is forgotten, and handed back with the reason where it is not
whole.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from areal_async.errors import FaultError, RpcTimeout
from areal_async.rpc.client import Caller
from areal_async.rpc.messages import PutAck, PutEpisodes, Release
from areal_async.runtime.events import record
from areal_async.runtime.failpoint import failpoint
from areal_async.runtime.log import get_logger
from rollout_service import metrics
from rollout_service.leases import Held
from rollout_service.outbox import Outbox, Parcel
from rollout_service.waiting import IDLE_WAIT_S, first_of, wait_out

log = get_logger("rollout")

LINGER_S = 0.05
MAX_PUTS = 4
"""Messages with episodes under way at once."""
FLUSH_LIMIT_S = 1.0
RELEASE_LIMIT_S = 1.0


class Sender:
    def __init__(
        self,
        buffer: Caller,
        name: str,
        held: dict[str, Held],
        *,
        on_settled: Callable[[], None],
        on_refused: Callable[[str, str], None],
    ) -> None:
        """`held` are the worker's leases, by id. `on_settled` is called when a message was answered;
        `on_refused(lease, reason)` when no sample of a lease is wanted from us any more."""
        self._buffer = buffer
        self._name = name
        self._held = held
        self._on_settled = on_settled
        self._on_refused = on_refused
        self._outbox = Outbox(LINGER_S)
        self._puts: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    @property
    def episodes(self) -> int:
        """Finished and not yet acknowledged."""
        return self._outbox.episodes

    @property
    def idle(self) -> bool:
        return not self._puts and not self._outbox.episodes

    def add(self, lease_id: str, group_id: str, sample: int, blob: bytes) -> None:
        self._outbox.add(lease_id, group_id, sample, blob, time.monotonic())

    def complete(self, lease_id: str) -> None:
        """Nothing more will come for this lease."""
        self._outbox.complete(lease_id)

    def drop(self, lease_id: str) -> int:
        """The lease is lost: forget what waits for it; returns how many episodes that was."""
        return self._outbox.drop(lease_id)

    def wake(self) -> None:
        self._wake.set()

    async def run(self, check: Callable[[], None]) -> None:
        """Send what is due, and end the leases of which nothing more will come, for ever. `check` is called
        in each round, and may raise."""
        while True:
            self._wake.clear()
            check()
            while len(self._puts) < MAX_PUTS and (parcel := self._outbox.take(time.monotonic())):
                self._puts.add(asyncio.ensure_future(self._put(parcel)))
            self._close_leases()
            metrics.UNSENT.set(self._outbox.episodes)
            await first_of([*self._puts], self._wake, self._pause_s(full=len(self._puts) >= MAX_PUTS))
            for put in [put for put in self._puts if put.done()]:
                self._puts.discard(put)
                put.result()
                self._on_settled()

    async def flush(self) -> None:
        """Send what there is, for at most `FLUSH_LIMIT_S`."""
        try:
            async with asyncio.timeout(FLUSH_LIMIT_S):
                while True:
                    while parcel := self._outbox.take(math.inf):
                        self._puts.add(asyncio.ensure_future(self._put(parcel)))
                    if not self._puts:
                        break
                    done, self._puts = await asyncio.wait(self._puts, return_when=asyncio.FIRST_COMPLETED)
                    for put in done:
                        put.result()
        except (TimeoutError, RpcTimeout, FaultError):
            log.info("stopped with episodes unsent", episodes=self._outbox.episodes)
        for put in self._puts:
            put.cancel()
        await asyncio.gather(*self._puts, return_exceptions=True)

    async def release(self, lease_id: str, reason: str, *, failed: bool = False) -> None:
        """Handing back early is a courtesy: a lease that nobody renews ends by itself."""
        try:
            async with asyncio.timeout(RELEASE_LIMIT_S):
                await self._buffer.call(Release(self._name, lease_id, reason, failed))
        except (TimeoutError, RpcTimeout, FaultError) as error:
            log.info("lease not released", lease_id=lease_id, error=str(error))

    def _pause_s(self, *, full: bool) -> float:
        if full:
            return IDLE_WAIT_S
        return min(IDLE_WAIT_S, max(0.0, self._outbox.next_due_s() - time.monotonic()))

    async def _put(self, parcel: Parcel) -> None:
        """Send one message until it is answered. A repetition is harmless: each sample is stored once."""
        lease_id, group_id = parcel.lease_id, parcel.group_id
        while lease_id in self._held:
            record("put", lease_id=lease_id, group_id=group_id, samples=list(parcel.episodes))
            failpoint("rollout.before_put")
            try:
                ack = await self._buffer.call(
                    PutEpisodes(lease_id, group_id, list(parcel.episodes)),
                    attachments=list(parcel.episodes.values()),
                )
            except (RpcTimeout, FaultError) as error:
                await wait_out(error, "put")
                continue
            record(
                "put_acked",
                lease_id=lease_id,
                group_id=group_id,
                stored=ack.stored,
                refused=[[refusal.item, refusal.reason] for refusal in ack.refused],
                durability=ack.durability,
            )
            failpoint("rollout.after_put")
            metrics.EPISODES.inc(len(ack.stored))
            if held := self._held.get(lease_id):
                held.stored += len(ack.stored)
            if ack.refused:
                self._refused(parcel, ack)
            break
        self._outbox.settled(parcel)
        self._wake.set()
        self._on_settled()

    def _refused(self, parcel: Parcel, ack: PutAck) -> None:
        reasons = [refusal.reason.split(":")[0] for refusal in ack.refused]
        for reason in reasons:
            metrics.REFUSED.labels(reason).inc()
        first = ack.refused[0]
        log.info("episodes refused", n=len(reasons), item=first.item, reason=first.reason)
        held = self._held.get(parcel.lease_id)
        if held is None:
            return
        if "invalid" in reasons:
            held.failure = f"the buffer refused {first.item}: {first.reason}"
            held.at_fault = True
        else:
            # Stale, abandoned, past its deadline or leased to another: no sample of this group is wanted
            # from us any more.
            self._on_refused(parcel.lease_id, first.reason)

    def _close_leases(self) -> None:
        """Forget the leases of which nothing more will come; hand back those that are not whole."""
        for lease_id, held in list(self._held.items()):
            if held.episodes or self._outbox.holds(lease_id):
                continue
            del self._held[lease_id]
            if not held.whole:
                release = self.release(lease_id, held.failure, failed=held.at_fault)
                self._puts.add(asyncio.ensure_future(release))
            self._on_settled()
