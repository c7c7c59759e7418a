"""From a task to what scores it: the pool of processes, and the backends of rewards that are no functions.

Promises: every call submitted gets its verdicts exactly once and in bounded time, also from a backend that
forgets it: a call that has waited for longer than all calls before it could take is a `Timeout`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from areal_async.config.reward import RewardSection
from areal_async.config.rewardcheck import part_of, runs_in_pool
from areal_async.rpc.verdicts import Failure, Timeout, Verdict
from areal_async.runtime.log import get_logger
from reward_service import metrics
from reward_service.backends import Backend, BackendReward, Call, OnVerdicts
from reward_service.crew import Limits
from reward_service.pool import Pool
from reward_service.programs import own_file
from reward_service.sdk import RewardLoadError
from reward_service.spec import RewardSpec, Routing

log = get_logger("reward")

GRACE_S = 5.0
"""Beyond the deadlines of a call and all before it, until a backend is taken to have forgotten it."""
LOOK_S = 0.25


def limits_of(section: RewardSection) -> Limits:
    """When workers are renewed, as a job says."""
    return Limits(section.recycle_calls, section.worker_memory_mb << 20, section.reload)


class Router:
    """`async with Router(job.reward) as router: await router.submit(spec, calls, on_verdicts)`.

    Entering starts what is needed and raises `RewardLoadError` when a reward cannot be loaded. With `shared`
    the built-in rewards run in that pool and only those of the job's own get one here. `job` is whose turn
    the calls in a shared pool count for."""

    def __init__(
        self,
        section: RewardSection,
        *,
        workers: int | None = None,
        shared: Pool | None = None,
        job: str = "",
    ) -> None:
        self.routing = Routing(section)
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """Done when a reward of the job can be scored no longer."""
        self._section = section
        self._workers = workers or section.workers
        self._shared = shared
        self._job = job
        self._pools: dict[str, Pool] = {}
        """By the key of the reward."""
        self._backends: dict[str, Watched] = {}
        self._stack = AsyncExitStack()
        self.own: Pool | None = None
        """The pool of this router itself."""

    @property
    def specs(self) -> list[RewardSpec]:
        return self.routing.specs

    async def __aenter__(self) -> Self:
        try:
            own: list[RewardSpec] = []
            for spec in self.specs:
                part = part_of(spec.name)
                if part is not None and not runs_in_pool(part):
                    await self._add_backend(spec, part)
                elif self._shared is not None and own_file(spec.name) is None:
                    await self._share(spec, self._shared)
                else:
                    own.append(spec)
            if own:
                pool = Pool(own, workers=self._workers, limits=limits_of(self._section))
                self.own = await self._stack.enter_async_context(pool)
                self._pools |= {spec.key: pool for spec in own}
                pool.broken.add_done_callback(self._break)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def submit(self, spec: RewardSpec, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        """Queue calls; waits while the queue of what scores them is full. `on_verdicts` must not raise."""
        if (pool := self._pools.get(spec.key)) is not None:
            await pool.submit(calls, on_verdicts, spec=spec, job=self._job)
        else:
            await self._backends[spec.key].submit(calls, on_verdicts)

    def capacity(self, spec: RewardSpec) -> int:
        """Calls of a reward that are worked on at once."""
        if (backend := self._backends.get(spec.key)) is not None:
            return backend.backend.capacity
        pool = self._pools[spec.key]
        # The workers of a shared pool are shared: each job holds work for its part of them.
        return pool.capacity if pool is self.own else max(1, pool.capacity // max(1, pool.jobs))

    def call_seconds(self, spec: RewardSpec) -> float:
        """Recent mean duration of a call of a reward, in seconds."""
        backend = self._backends.get(spec.key)
        if backend is None:
            return self._pools[spec.key].call_seconds_of(spec, self._job)
        return backend.backend.call_seconds

    @property
    def alive(self) -> int:
        """What is ready to score now, workers of the pools and places of the backends together."""
        pools = {id(pool): pool.alive for pool in self._pools.values()}
        return sum(pools.values()) + sum(entry.backend.alive for entry in self._backends.values())

    @property
    def busy(self) -> int:
        """Workers of the router's own pool that have a call."""
        return self.own.busy if self.own is not None else 0

    @property
    def queued(self) -> int:
        return self.own.queued if self.own is not None else 0

    async def _add_backend(self, spec: RewardSpec, part: type[BackendReward]) -> None:
        backend = await self._stack.enter_async_context(part.make(spec, self._section))
        self._backends[spec.key] = await self._stack.enter_async_context(Watched(spec, backend))
        backend.broken.add_done_callback(self._break)

    async def _share(self, spec: RewardSpec, shared: Pool) -> None:
        await shared.add(spec, job=self._job)
        self._stack.callback(shared.discard, spec, job=self._job)
        self._pools[spec.key] = shared
        shared.broken.add_done_callback(self._break)
        # The pool outlives the router, which it would keep in memory.
        self._stack.callback(shared.broken.remove_done_callback, self._break)

    def _break(self, broken: asyncio.Future[RewardLoadError]) -> None:
        if not broken.cancelled() and not self.broken.done():
            self.broken.set_result(broken.result())


@dataclass(eq=False)
class Asked:
    """A call that a backend has and has not answered."""

    index: int
    episodes: int
    on_verdicts: OnVerdicts
    since_s: float
    ahead: int
    """Calls that the backend had when it got this one."""
    deadline_s: float = 0.0
    answered: bool = field(default=False)


class Watched:
    """A backend, and the deadlines of what it was given."""

    def __init__(self, spec: RewardSpec, backend: Backend) -> None:
        self.backend = backend
        self._spec = spec
        self._asked: set[Asked] = set()
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._look_after(), name="reward-backend")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for asked in list(self._asked):
            self._answer(asked, [Failure("pool", "the reward service ends")] * asked.episodes, 0.0)

    async def submit(self, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        now_s = time.monotonic()
        batch: list[Asked] = []
        for index, call in enumerate(calls):
            episodes = len(call) if isinstance(call, list) else 1
            asked = Asked(index, episodes, on_verdicts, now_s, len(self._asked))
            self._asked.add(asked)
            batch.append(asked)
        self._put_off(batch)

        def take(index: int, verdicts: list[Verdict], elapsed_ms: float) -> None:
            self._answer(batch[index], verdicts, elapsed_ms)

        await self.backend.submit(calls, take)

    def _put_off(self, batch: Sequence[Asked]) -> None:
        """Set deadlines, or move them on, by what calls take the backend now: it may learn that only from
        the calls themselves."""
        capacity = max(1, self.backend.capacity)
        round_s = max(self._spec.timeout_s, self.backend.call_seconds) + 1.0
        beyond_s = GRACE_S + getattr(self.backend, "patience_s", 0.0)
        for asked in batch:
            rounds = math.ceil((asked.ahead + 1) / capacity)
            asked.deadline_s = max(asked.deadline_s, asked.since_s + rounds * round_s + beyond_s)

    def _answer(self, asked: Asked, verdicts: list[Verdict], elapsed_ms: float) -> None:
        if asked.answered:
            log.info("verdicts came too late", reward=self._spec.name)
            return
        asked.answered = True
        self._asked.discard(asked)
        if len(verdicts) != asked.episodes:
            message = f"{len(verdicts)} verdicts came for {asked.episodes} episodes"
            verdicts = [Failure("remote", message)] * asked.episodes
        asked.on_verdicts(asked.index, verdicts, elapsed_ms)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            self._put_off([asked for asked in self._asked if asked.deadline_s < now_s])
            for asked in [asked for asked in self._asked if asked.deadline_s < now_s]:
                metrics.OVERDUE.labels(self._spec.label).inc()
                limit_ms = round(self._spec.timeout_s * 1000)
                self._answer(asked, [Timeout(limit_ms)] * asked.episodes, limit_ms)
