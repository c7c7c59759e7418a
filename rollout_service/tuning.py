"""Looking at the engine's load in time, and telling how many episodes may run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from areal_async.config.rollout import RolloutSection
from areal_async.runtime.log import get_logger
from rollout_service import metrics
from rollout_service.concurrency import LOOK_S, REASONS, Concurrency
from rollout_service.engines.base import EngineStats

log = get_logger("rollout")


class Tuning:
    """Of one worker. `on_change` is told when more or fewer episodes may run than before."""

    def __init__(self, section: RolloutSection, on_change: Callable[[], None]) -> None:
        self.concurrency = Concurrency(
            section.group_size,
            section.max_concurrent * section.replicas,
            section.concurrency,
            time.monotonic(),
        )
        self._on_change = on_change
        self._running = 0
        self._peak = 0
        """Most episodes at once since the last look."""

    def runs(self, episodes: int) -> None:
        """So many episodes run now."""
        self._running = episodes
        self._peak = max(self._peak, episodes)

    def exchanging(self, going_on: bool) -> None:
        """An exchange of the engine's weights begins, or has ended."""
        self.concurrency.exchanging(going_on, time.monotonic())

    def serving(self, share: float) -> None:
        """So much of the engine serves now, 0 to 1."""
        self.concurrency.serving(share)
        self._tell()

    async def run(self, load: Callable[[], EngineStats]) -> None:
        """Look at the engine's `load`, for ever."""
        self._tell()
        while True:
            await asyncio.sleep(LOOK_S)
            peak, self._peak = self._peak, self._running
            change = self.concurrency.look(load(), peak, time.monotonic())
            if change is not None:
                log.debug("concurrency", limit=change.limit, reason=change.reason)
                metrics.CONCURRENCY_CHANGES.labels(change.reason).inc()
                self._tell()
                self._on_change()

    def _tell(self) -> None:
        metrics.CONCURRENCY.set(self.concurrency.limit)
        for reason in REASONS:
            metrics.CONCURRENCY_REASON.labels(reason).set(reason == self.concurrency.last.reason)
