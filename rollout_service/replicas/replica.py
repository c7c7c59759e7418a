"""One replica of a set: its engine, and the engine's successors if it dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from msgspec.structs import asdict

from areal_async.base.events import record
from areal_async.base.log import get_logger
from areal_async.base.processes import RestartPolicy, Restarts
from areal_async.base.versions import VersionTag
from rollout_service import metrics
from rollout_service.engines.base import Engine, EngineError, Weights
from rollout_service.replicas.exchange import StallDetector, UpdateStall, exchange
from rollout_service.replicas.placement import ReplicaLoad, most_requests

log = get_logger("replicas")

END_LIMIT_S = 15.0  # Seconds for the end of a lost engine; the rest of it ends with this process

Fetch = Callable[[], AbstractAsyncContextManager[Weights]]
"""Function that returns a context manager with the newest snapshot. The snapshot's files stay unchanged
inside the block."""


class ReplicaGone(EngineError):
    """An engine died more often than its restart policy allows."""

    restart_helps = True


@dataclass(eq=False)
class EngineReplica:
    """One replica: an engine, made by `make(index)`, and its successors if it dies. Call `trouble` every
    `WATCH_S`."""

    index: int
    make: Callable[[int], Engine]
    policy: RestartPolicy
    stuck_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.engine = self.make(self.index)
        self.serves = self.updating = False
        self.given = 0  # Requests given to it and not finished
        self.error: EngineError | None = None  # Reason of its last loss
        self._before = (0, 0)  # Tokens and requests of its earlier engines
        self._restarts = Restarts(self.policy)
        self._served_s: float | None = None
        self._pause_s: float | None = 0.0  # Before its next start. None: it died too often
        self._recorded: VersionTag | None = None
        self._most_requests = 1

    @property
    def has_room(self) -> bool:
        return self.given < self._most_requests

    def serve(self) -> None:
        """Record that the replica's engine has started. It has no requests yet."""
        self.serves, self._served_s = True, self.clock()
        self._detector = StallDetector(self.stuck_s, self.clock)
        self._most_requests = most_requests(self.engine.stats().capacity)
        self.given, self.updating = 0, False
        self.record_version()

    def record_version(self) -> None:
        """Record the newly served weights, before any unit of them is sampled."""
        tag = self.engine.version
        if self._recorded is None or self._recorded < tag:
            self._recorded = tag
            record("served", replica=self.index, **asdict(tag))

    async def exchange(self, snapshot: Weights) -> UpdateStall:
        """Make the engine serve `snapshot`. During this time, new requests go to other replicas, if there are
        any."""
        self.updating = True
        try:
            return await exchange(self.engine, snapshot, self.record_version)
        finally:
            self.updating = False

    def load(self) -> ReplicaLoad:
        stats = self.engine.stats()
        return ReplicaLoad(
            self.index, self.given, stats.capacity, stats.running + stats.waiting, stats.kv_used
        )

    def totals(self) -> tuple[int, int]:
        """Return the number of tokens and of requests, summed over the replica's present and earlier
        engines."""
        tokens, requests = self._before
        if self.serves:
            stats = self.engine.stats()
            tokens, requests = tokens + stats.tokens_total, requests + stats.requests_total
        return tokens, requests

    def trouble(self) -> str:
        """Return the reason why the replica's engine must be treated as dead, or an empty string."""
        if not self.serves:
            return ""
        if not self.engine.alive():
            return "the engine has ended"
        stats = self.engine.stats()
        tokens, running = stats.tokens_total + stats.decoded, self.given
        stuck_s = self._detector.look(
            tokens=tokens, requests=stats.requests_total, running=running, paused=self.updating
        )
        if stuck_s is None:
            return ""
        return f"no token for {stuck_s:.0f} s with {running} requests running (rollout.stuck_s)"

    def lose(self, error: EngineError) -> None:
        """Record that the replica's engine is dead. The caller must then call `revive`."""
        self._before, self.serves = self.totals(), False
        self._count_death(error)

    def _count_death(self, error: EngineError) -> None:
        self._pause_s = self._restarts.died(self.clock(), served_s=self._served_s)
        self._served_s, self.error = None, error
        metrics.ENGINE_DEATHS.inc()

    async def revive(self, fetch: Fetch) -> None:
        """Start another engine. Raises `ReplicaGone`. May be called again after it was cancelled, which is no
        death."""
        while True:
            try:
                async with asyncio.timeout(END_LIMIT_S):
                    await self.engine.stop()
            except (TimeoutError, EngineError) as error:
                log.warning("an engine did not end", error=str(error), replica=self.index)
            deaths, pause_s = len(self._restarts.deaths_s), self._pause_s
            if pause_s is None:
                raise ReplicaGone(
                    f"replica {self.index} died {deaths} times within {self.policy.window_s:.0f} s "
                    f"(supervisor.restarts), the last time with: {self.error}"
                ) from self.error
            told = {"replica": self.index, "deaths": deaths, "pause_s": round(pause_s, 2)}
            log.warning("engine is started again", **told, error=str(self.error))
            await asyncio.sleep(pause_s)
            self._pause_s = 0.0
            try:
                async with fetch() as snapshot:
                    self.engine = self.make(self.index)
                    await self.engine.start(snapshot)
                return
            except EngineError as error:
                self._count_death(error)
