"""One replica of a set: its engine, what it was given, and its restarts.

Promises: an engine that was lost is ended before another takes its place; the next one starts after the pause
of the restart policy, with the newest snapshot, and serves only once it has the one that the set serves; more
deaths than the policy allows are the end, with the last error's words (a server's last log lines among them).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import Enum

from areal_async.errors import RpcTimeout, SnapshotError, WireError
from areal_async.rpc.messages import VersionTag
from areal_async.runtime.events import record
from areal_async.runtime.log import get_logger
from areal_async.runtime.restart import RestartPolicy, next_pause_s
from rollout_service import metrics
from rollout_service.engines.base import Engine, EngineError, Weights
from rollout_service.placement import ReplicaLoad, room_of
from rollout_service.progress import Vigil

log = get_logger("replicas")

END_LIMIT_S = 15.0
"""For the end of an engine that was lost; what is left of it ends with this process."""
FETCH_PAUSE_S = 0.5

Fetch = Callable[[], AbstractAsyncContextManager[Weights]]
"""The newest snapshot, whose files stay as they are inside the block."""


class ReplicaGone(EngineError):
    """An engine died more often than its restart policy allows."""

    restart_helps = True


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"
    """Dead, and to be started again."""
    GONE = "gone"


class Replica:
    def __init__(
        self,
        index: int,
        make: Callable[[int], Engine],
        policy: RestartPolicy,
        stuck_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.engine = make(index)
        self.phase = Phase.STARTING
        self.given = 0
        """Requests that it was given and that have not ended."""
        self.updating = False
        self.error: EngineError | None = None
        """Why it was lost last."""
        self._before = (0, 0)
        """Tokens and requests of the engines before this one."""
        self._make = make
        self._policy = policy
        self._stuck_s = stuck_s
        self._vigil = Vigil(stuck_s, clock)
        self._clock = clock
        self._deaths_s: list[float] = []
        self._early = 0
        self._served_s = 0.0
        self._told: VersionTag | None = None
        self._room = 1

    @property
    def serves(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def has_room(self) -> bool:
        return self.given < self._room

    def serve(self) -> None:
        """Its engine has started, and has been given nothing."""
        self.phase, self._served_s = Phase.SERVING, self._clock()
        self._vigil = Vigil(self._stuck_s, self._clock)
        self._room = room_of(self.engine.stats().capacity)
        self.given, self.updating = 0, False
        self.tell_version()

    def tell_version(self) -> None:
        """Write down which weights it serves from now on, before any unit of theirs is sampled."""
        tag = self.engine.version
        if self._told is None or self._told < tag:
            self._told = tag
            record("served", replica=self.index, epoch=tag.epoch, version=tag.version)

    def give_back(self) -> None:
        """A request that it was given has ended."""
        self.given = max(0, self.given - 1)

    def load(self) -> ReplicaLoad:
        stats = self.engine.stats()
        return ReplicaLoad(
            self.index, self.given, stats.capacity, stats.running + stats.waiting, stats.kv_used
        )

    def totals(self) -> tuple[int, int]:
        """Tokens and requests of all its engines."""
        tokens, requests = self._before
        if self.serves:
            stats = self.engine.stats()
            tokens, requests = tokens + stats.tokens_total, requests + stats.requests_total
        return tokens, requests

    def trouble(self) -> str:
        """Why its engine must be taken for dead; empty while it need not."""
        if not self.serves:
            return ""
        return self._vigil.trouble(self.engine, given=self.given, paused=self.updating)

    def lose(self, error: EngineError) -> None:
        """Its engine is dead. To be followed by `revive`."""
        stats = self.engine.stats()
        self._before = self._before[0] + stats.tokens_total, self._before[1] + stats.requests_total
        self.phase, self.error = Phase.LOST, error
        metrics.ENGINE_DEATHS.inc()

    async def revive(self, fetch: Fetch) -> None:
        """Return when another engine has started. Raises `ReplicaGone`."""
        while True:
            await end_engine(self.engine, replica=self.index)
            pause_s = self._next_pause_s()
            if pause_s is None:
                self.phase = Phase.GONE
                raise ReplicaGone(
                    f"replica {self.index} died {len(self._deaths_s)} times within "
                    f"{self._policy.window_s:.0f} s (supervisor.restarts), the last time with: {self.error}"
                ) from self.error
            log.warning(
                "engine is started again",
                replica=self.index,
                deaths=len(self._deaths_s),
                pause_s=round(pause_s, 2),
                error=str(self.error),
            )
            await asyncio.sleep(pause_s)
            try:
                async with fetch() as snapshot:
                    self.engine = self._make(self.index)
                    await self.engine.start(snapshot)
                return
            except EngineError as error:
                self.error, self._served_s = error, self._clock()
                metrics.ENGINE_DEATHS.inc()

    def _next_pause_s(self) -> float | None:
        now_s = self._clock()
        self._deaths_s = [*self._policy.recent(self._deaths_s, now_s), now_s]
        self._early = 0 if now_s - self._served_s >= self._policy.steady_s else self._early + 1
        return next_pause_s(len(self._deaths_s), None, self._policy, early=self._early)


async def end_engine(engine: Engine, **named: object) -> None:
    """End an engine that may be lost, as far as it lets itself be ended; `named` says in the log which."""
    try:
        async with asyncio.timeout(END_LIMIT_S):
            await engine.stop()
    except (TimeoutError, EngineError) as error:
        log.warning("an engine did not end", error=str(error), **named)


def fetching(newest: Callable[[], Weights], source: Fetch | None) -> Fetch:
    """The snapshot to start with: from `source` where there is one, however long the trainer takes to answer;
    else what the set serves."""

    @asynccontextmanager
    async def fetch() -> AsyncIterator[Weights]:
        if source is None:
            yield newest()
            return
        while True:
            block = source()
            try:
                snapshot = await block.__aenter__()
            except (RpcTimeout, WireError, SnapshotError) as error:
                log.warning("no snapshot to start with", error=str(error))
                await asyncio.sleep(FETCH_PAUSE_S)
                continue
            try:
                yield snapshot
            finally:
                await block.__aexit__(None, None, None)
            return

    return fetch
