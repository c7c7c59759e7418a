"""The limit on the number of episodes that a worker runs at once.

With `fixed` it is always the ceiling. With `adaptive` it rises by addition and falls by multiplication,
between a floor and a ceiling. It starts at `START_SHARE` of the ceiling. It doubles until the engine's queue
or KV room first shows pressure. After that, it rises by `STEP_SHARE` of the ceiling at each look. Under
pressure, it falls to `FALL` of the running episodes.

The limit rises only while it is used. If a job waits for something other than the engine, the engine's load
is no guide. A queue during an exchange of weights, and shortly after it, does not count as pressure, because
it contains requests that ran before.
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

LOOK_S = 0.5  # Least seconds between two changes
SETTLE_S = 2.0
"""Seconds between a fall and the next one, because running episodes must end first. Also the seconds after an
exchange of weights until a queue counts again. Before that, interrupted requests must return to the batch,
and a reading must show this."""
START_SHARE = 0.5
STEP_SHARE = 1 / 32
FALL = 0.8
USED_SHARE = 0.9  # The limit counts as used if this share of it runs
QUEUE_SHARE = 0.1  # Share of the running requests. A longer queue in the engine is pressure
KV_FULL = 0.95
KV_CALM = 0.85  # No increase above it, because running requests still grow

Mode = Literal["adaptive", "fixed"]
Reason = Literal["start", "fixed", "room", "queue", "kv", "replica lost", "replica back"]


class ConcurrencyChange(NamedTuple):
    """A new limit, and the reason for the change."""

    limit: int
    reason: Reason


class ConcurrencyLimit:
    """Number of episodes that may run at once (`limit`). Pure: each call passes the time."""

    def __init__(
        self, floor: int, ceiling: int, mode: Mode, now_s: float = 0.0, *, look_s: float = LOOK_S
    ) -> None:
        """`floor` ≤ `ceiling`. The floor is the group size, the ceiling the most episodes of all replicas
        together."""
        self._look_s, self._floor, self._most, self._ceiling = look_s, floor, ceiling, ceiling
        self._adaptive = mode == "adaptive"
        self._starting = True  # No pressure so far
        self._next_s, self._queue_counts_s = now_s + look_s, now_s
        self.last = ConcurrencyChange(ceiling, "fixed")
        if self._adaptive:
            self.last = ConcurrencyChange(max(floor, math.ceil(ceiling * START_SHARE)), "start")

    @property
    def limit(self) -> int:
        return self.last.limit

    def serving(self, share: float) -> None:
        """Set the share of replicas that serve, 0 to 1. The ceiling changes with it."""
        ceiling = max(self._floor, math.floor(self._most * share))
        if ceiling == self._ceiling:
            return
        lost, self._ceiling = ceiling < self._ceiling, ceiling
        if lost and self.limit > ceiling:
            self.last = ConcurrencyChange(ceiling, "replica lost")
        elif not lost and not self._adaptive:
            self.last = ConcurrencyChange(ceiling, "replica back")

    def exchanging(self, going_on: bool, now_s: float) -> None:
        """Record that an exchange of weights begins or has ended."""
        self._queue_counts_s = math.inf if going_on else now_s + SETTLE_S

    def look(self, stats: EngineStats, peak: int, now_s: float) -> ConcurrencyChange | None:
        """Process a reading of the load. Return the change, or None. `peak` is the largest number of episodes
        that ran since the last look, because work in bursts uses the limit too."""
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
    """Applier of the limit to one engine. It reads the engine's `load` regularly, and is told of changes of
    replicas and weights. `on_change` is called when the number of allowed episodes changes."""

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
        self._running = self._peak = 0  # Running episodes, and the most at once since the last look
        self._changed = asyncio.Event()

    def runs(self, episodes: int) -> None:
        """Set the number of running episodes."""
        self._running = episodes
        self._peak = max(self._peak, episodes)

    def exchanging(self, going_on: bool) -> None:
        """Record that an exchange of the engine's weights begins or has ended."""
        self.concurrency.exchanging(going_on, time.monotonic())

    def serving(self, share: float) -> None:
        """Set the share of the engine that serves, 0 to 1."""
        self.concurrency.serving(share)
        self._changed.set()

    async def run(self) -> None:
        """Read the engine's load until cancelled."""
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
