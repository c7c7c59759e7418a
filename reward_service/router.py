"""The router of calls to their scorers: the pool of processes, or the backend of a reward that is not a
function.

Promises: every submitted call gets its verdicts exactly once and in bounded time. This holds even if a
backend loses a call: after the longest time that this call and all calls before it could take, the call gets
the verdict `Timeout`. If an answer cannot be judged through its own fault, it gets the score
`reward.on_fault.score`. If an episode ended early through the fault of its answers, it gets this score too,
and no reward is called.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.verdicts import Failure, FaultOf, Timeout, Verdict, settled
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec, Routing
from areal_async.config.rewardcheck import part_of, runs_in_pool
from reward_service import metrics
from reward_service.backends import Call, OnVerdicts, ScoringBackend, inputs_of
from reward_service.pool.inline import InlinePool
from reward_service.pool.pool import WorkerPool
from reward_service.pool.workers import WorkerLimits
from reward_service.sdk import RewardInput, RewardLoadError, sees_images

log = get_logger("reward")

GRACE_S = (
    5.0  # seconds beyond the deadlines of a call and all calls before it, after which the backend has lost it
)
LOOK_S = 0.25


class Router:
    """A router: `async with Router(job.reward) as router: await router.submit(spec, calls, on_verdicts)`.

    `async with` starts the scorers and raises `RewardLoadError` if a reward cannot be loaded.
    """

    def __init__(self, section: RewardSection, workers: int | None = None, *, inline: bool = False) -> None:
        """Create the router. With `inline`, reward functions run in this process, and an error in one ends
        the process (`pool/inline.py`)."""
        self.routing = Routing(section)
        self.specs = self.routing.specs
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """Future that is done when a reward of the job can no longer be computed."""
        self.pool: WorkerPool | InlinePool | None = None
        self._inline = inline
        self._section = section
        self._workers = workers or section.workers
        self._backends: dict[str, WatchedBackend] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            functions: list[RewardSpec] = []
            for spec in self.specs:
                part = part_of(spec.name)
                if part is None or runs_in_pool(part):
                    functions.append(spec)
                    continue
                backend = await self._stack.enter_async_context(part.make(spec, self._section))
                backend.broken.add_done_callback(self._break)
                watched = await self._stack.enter_async_context(WatchedBackend(spec, backend))
                self._backends[spec.key] = watched
            if functions:
                limits = WorkerLimits(self._section.worker_memory_mb << 20)
                self.pool = InlinePool(functions)
                if not self._inline:
                    self.pool = WorkerPool(functions, workers=self._workers, limits=limits)
                await self._stack.enter_async_context(self.pool)
                self.pool.broken.add_done_callback(self._break)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def submit(self, spec: RewardSpec, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        """Queue calls. Waits while the queue of their scorer is full. `on_verdicts` must not raise."""
        asked: list[Call] = []
        known: list[tuple[int, list[Verdict | None]]] = []

        def settle(index: int, verdicts: Sequence[Verdict], elapsed_ms: float) -> None:
            score = self._section.on_fault.score
            on_verdicts(index, [settled(verdict, score) for verdict in verdicts], elapsed_ms)

        def take(at: int, verdicts: list[Verdict], elapsed_ms: float) -> None:
            index, all_of_call = known[at]
            came = iter(verdicts)
            settle(index, [next(came) if one is None else one for one in all_of_call], elapsed_ms)

        for index, call in enumerate(calls):
            inputs = [_sendable(given) for given in inputs_of(call)]
            failed = [_failed(given) for given in inputs]
            left = [given for given in inputs if not given.fault]
            if left:
                asked.append(left if isinstance(call, list) else left[0])
                known.append((index, failed))
            else:
                settle(index, [one for one in failed if one is not None], 0.0)
        if asked and (watched := self._backends.get(spec.key)) is not None:
            await watched.submit(asked, take)
        elif asked:
            await self._the_pool.submit(asked, take, spec=spec)

    def capacity(self, spec: RewardSpec) -> int:
        """Return the number of a reward's calls that run at once."""
        watched = self._backends.get(spec.key)
        return self._the_pool.capacity if watched is None else watched.backend.capacity

    def call_seconds(self, spec: RewardSpec) -> float:
        """Return the recent mean duration of a call of a reward, in seconds."""
        watched = self._backends.get(spec.key)
        return self._the_pool.call_seconds_of(spec) if watched is None else watched.backend.call_seconds

    def sees_images(self, spec: RewardSpec) -> bool:
        """Return whether a reward gets the bytes of images. The servers of a remote reward say so."""
        watched = self._backends.get(spec.key)
        asked = watched is None or getattr(watched.backend, "wants_images", True)
        return asked and sees_images(spec)

    @property
    def alive(self) -> int:
        """Return the number of calls that can begin now, in the pool's workers and the backends."""
        pool = 0 if self.pool is None else self.pool.alive
        return pool + sum(watched.backend.alive for watched in self._backends.values())

    @property
    def busy(self) -> int:
        """Return the number of the pool's workers that have a call."""
        return 0 if self.pool is None else self.pool.busy

    @property
    def queued(self) -> int:
        return 0 if self.pool is None else self.pool.queued

    @property
    def _the_pool(self) -> WorkerPool | InlinePool:
        assert self.pool is not None
        return self.pool

    def _break(self, broken: asyncio.Future[RewardLoadError]) -> None:
        if not broken.cancelled() and not self.broken.done():
            self.broken.set_result(broken.result())


def watch(working: Router | WorkerPool) -> None:
    """Make the process gauges show the processes of `working` from now on."""
    metrics.WORKERS_ALIVE.set_function(lambda: working.alive)
    metrics.WORKERS_BUSY.set_function(lambda: working.busy)
    metrics.QUEUED.set_function(lambda: working.queued)


def _sendable(given: RewardInput) -> RewardInput:
    """Return `given` without lone surrogates in the answer, because these characters cannot be encoded in
    UTF-8."""
    response = given.response.encode(errors="replace").decode()
    return given if response == given.response else msgspec.structs.replace(given, response=response)


def _failed(given: RewardInput) -> Verdict | None:
    """Return the verdict for an episode that ended early through the fault of its answers, or None for any
    other episode."""
    kind, _, message = given.fault.partition(": ")
    return Failure(kind, message, fault=FaultOf.ANSWER) if given.fault else None


@dataclass(eq=False)
class OpenCall:
    """A call that a backend has not answered yet."""

    index: int
    episodes: int
    on_verdicts: OnVerdicts
    since_s: float
    ahead: int
    """Number of calls that the backend already had when it got this call."""
    deadline_s: float = 0.0


class WatchedBackend:
    """A backend whose calls get a `Timeout` if the backend does not answer them in time."""

    def __init__(self, spec: RewardSpec, backend: ScoringBackend, *, grace_s: float = GRACE_S) -> None:
        self.backend = backend
        self._spec = spec
        self._grace_s = grace_s
        self._asked: set[OpenCall] = set()
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
        batch: list[OpenCall] = []
        for index, call in enumerate(calls):
            batch.append(OpenCall(index, len(inputs_of(call)), on_verdicts, now_s, len(self._asked)))
            self._asked.add(batch[-1])
        self._put_off(batch)

        def take(index: int, verdicts: list[Verdict], elapsed_ms: float) -> None:
            self._answer(batch[index], verdicts, elapsed_ms)

        await self.backend.submit(calls, take)

    def _put_off(self, batch: Sequence[OpenCall]) -> None:
        """Set or extend the deadlines of calls, computed from the backend's present mean duration of a call.

        Deadlines must be extended, because the backend may learn how long a call takes only from these calls.
        """
        capacity = max(1, self.backend.capacity)
        round_s = max(self._spec.timeout_s, self.backend.call_seconds) + 1.0
        beyond_s = self._grace_s + self._spec.longest_s - self._spec.timeout_s
        for asked in batch:
            rounds = math.ceil((asked.ahead + 1) / capacity)
            asked.deadline_s = max(asked.deadline_s, asked.since_s + rounds * round_s + beyond_s)

    def _answer(self, asked: OpenCall, verdicts: list[Verdict], elapsed_ms: float) -> None:
        if asked not in self._asked:
            log.info("verdicts came too late", reward=self._spec.name)
            return
        self._asked.remove(asked)
        if len(verdicts) != asked.episodes:
            failure = Failure("remote", f"{len(verdicts)} verdicts came for {asked.episodes} episodes")
            verdicts = [failure] * asked.episodes
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
