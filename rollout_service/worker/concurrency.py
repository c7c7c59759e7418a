"""The limit on the episodes that a worker runs at once.

`fixed`: as many as are allowed. `adaptive`: additive increase, multiplicative decrease, between a floor and a
ceiling. It begins at `START_SHARE` of the ceiling and doubles until the engine first says that it has enough
(its own queue, or its KV room), then rises by `STEP_SHARE` of the ceiling a look; under pressure it falls to
`FALL` of what runs. It rises only while the limit is used, because a job that waits for other parts gives no
information about the engine. A queue during or shortly after a weight update gives none either, because it
contains the requests that ran before.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from areal_async.base.log import get_logger
from areal_async.config.rollout import RolloutSection
from rollout_service import metrics
from rollout_service.engines.base import EngineStats

log = get_logger("rollout")

LOOK_S = 0.5  # Seconds between two changes at least
SETTLE_S = 2.0
"""Seconds between two decreases of the limit, so that running episodes can end first. After a weight update,
a queue counts again only after this time, because requests must return to the batch and to its metrics
first."""
START_SHARE = 0.5
STEP_SHARE = 1 / 32
FALL = 0.8
USED_SHARE = 0.9  # The limit counts as used when so much of it runs
QUEUE_SHARE = 0.1  # Share of the running requests: a longer queue in the engine is pressure
KV_FULL = 0.95
KV_CALM = 0.85  # No rise above it: the requests that run still grow

Mode = Literal["adaptive", "fixed"]
Reason = Literal["start", "fixed", "room", "queue", "kv", "replica lost", "replica back"]


class ConcurrencyChange(NamedTuple):
    """A new limit, and why it changed."""

    limit: int
    reason: Reason


class ConcurrencyLimit:
    """Allows `limit` episodes at once, at present. Pure: the clock comes with each look."""

    def __init__(
        self, floor: int, ceiling: int, mode: Mode, now_s: float = 0.0, *, look_s: float = LOOK_S
    ) -> None:
        """`floor` ≤ `ceiling`: the group size and the most that all replicas may run together."""
        self._look_s, self._floor, self._most, self._ceiling = look_s, floor, ceiling, ceiling
        self._adaptive = mode == "adaptive"
        self._starting = True  # No pressure has been seen yet
        self._next_s, self._queue_counts_s = now_s + look_s, now_s
        self.last = ConcurrencyChange(ceiling, "fixed")
        if self._adaptive:
            self.last = ConcurrencyChange(max(floor, math.ceil(ceiling * START_SHARE)), "start")

    @property
    def limit(self) -> int:
        return self.last.limit

    def serving(self, share: float) -> None:
        """Note the share of the replicas that serves, 0 to 1, and lower or raise the ceiling with it."""
        ceiling = max(self._floor, math.floor(self._most * share))
        if ceiling == self._ceiling:
            return
        lost, self._ceiling = ceiling < self._ceiling, ceiling
        if lost and self.limit > ceiling:
            self.last = ConcurrencyChange(ceiling, "replica lost")
        elif not lost and not self._adaptive:
            self.last = ConcurrencyChange(ceiling, "replica back")

    def exchanging(self, going_on: bool, now_s: float) -> None:
        """Note that a weight update begins, or has ended."""
        self._queue_counts_s = math.inf if going_on else now_s + SETTLE_S

    def look(self, stats: EngineStats, peak: int, now_s: float) -> ConcurrencyChange | None:
        """Take a reading into account; returns the change, if any. `peak` is the most episodes that ran since
        the last look: work that comes in bursts uses the limit too."""
        if not self._adaptive or now_s < self._next_s:
            return None
        change = self._decide(stats, peak, queue_counts=now_s >= self._queue_counts_s)
        self._next_s = now_s + self._look_s
        if change is None or change.limit == self.limit:
            return None
        if change.limit < self.limit:
            self._next_s = now_s + SETTLE_S
        self.last = change
        return change

    def _decide(self, stats: EngineStats, peak: int, *, queue_counts: bool) -> ConcurrencyChange | None:
        pressure: Reason | None = None
        if stats.kv_used >= KV_FULL:
            pressure = "kv"
        elif stats.waiting > max(1.0, stats.running * QUEUE_SHARE):
            if not queue_counts:
                return None
            pressure = "queue"
        if pressure is not None:
            self._starting = False
            runs = min(self.limit, stats.running + stats.waiting)
            return ConcurrencyChange(max(self._floor, math.floor(runs * FALL)), pressure)
        if peak < self.limit * USED_SHARE or stats.kv_used > KV_CALM or self.limit >= self._ceiling:
            return None
        step = self.limit if self._starting else max(1, math.ceil(self._ceiling * STEP_SHARE))
        return ConcurrencyChange(min(self._ceiling, self.limit + step), "room")


class ConcurrencyTuner:
    """Applies the limit to one engine: reads its `load` regularly, and is told of changes of its replicas and
    weights. `on_change` is called when more or fewer episodes may run than before."""

    def __init__(
        self,
        section: RolloutSection,
        load: Callable[[], EngineStats],
        on_change: Callable[[], None],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        ceiling = section.max_concurrent * section.replicas
        self.concurrency = ConcurrencyLimit(
            section.group_size, ceiling, section.concurrency, time.monotonic(), look_s=look_s
        )
        self._load, self._on_change, self._look_s = load, on_change, look_s
        self._running = self._peak = 0  # Episodes, and most of them at once since the last look
        self._changed = asyncio.Event()

    def runs(self, episodes: int) -> None:
        """Note how many episodes run now."""
        self._running = episodes
        self._peak = max(self._peak, episodes)

    def exchanging(self, going_on: bool) -> None:
        """Note that a weight update of the engine begins, or has ended."""
        self.concurrency.exchanging(going_on, time.monotonic())

    def serving(self, share: float) -> None:
        """Note the share of the engine that serves, 0 to 1."""
        self.concurrency.serving(share)
        self._changed.set()

    async def run(self) -> None:
        """Look at the engine's load until cancelled."""
        while True:
            metrics.CONCURRENCY.set(self.concurrency.limit)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._changed.wait()
            if self._changed.is_set() or self._look(self._load()):
                self._changed.clear()
                self._on_change()

    def _look(self, stats: EngineStats) -> bool:
        """Return whether the limit changes with this reading."""
        peak, self._peak = self._peak, self._running
        change = self.concurrency.look(stats, peak, time.monotonic())
        if change is not None:
            log.debug("concurrency", limit=change.limit, reason=change.reason)
        return change is not None
