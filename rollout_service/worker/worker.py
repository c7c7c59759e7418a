"""The rollout worker: leases groups, runs their episodes and sends the results to the buffer.

Promises:
- Groups are leased while fewer episodes run than `concurrency.py` allows (the last group may go over it, and
  so may the late answer to an older request), and not while as many finished ones await acknowledgement: if
  the buffer is slow or away, generation slows down, and no episode is discarded for lack of room.
- An episode that finished is sent until the buffer has acknowledged or refused it, or its lease is lost.
- A lost lease ends its episodes; other leases do not notice.
- A worker that is told to stop leases no more, sends the episodes that finish within its grace, and hands the
  rest over at once. A draining worker finishes its episodes and exits.
- An episode that its own answers end early counts as finished, with a note. An episode that fails otherwise,
  or waits too long for the engine, loses only its own sample: the lease is handed back with the reason once
  its other samples are stored. If no worker succeeds, the buffer ends the job. While this worker has no
  success, it asks for leases with growing pauses, and finally exits with the reason.
- The buffer, not a clock of the worker, ends a lease, and extends it by its own outages.
- Every wait has a deadline, and an outage of the buffer is waited out.

The buffer decides which groups are leased, and the fate of a released group.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import asdict

from areal_async.base.errors import FaultError, RpcTimeout
from areal_async.base.events import record, recording
from areal_async.base.log import get_logger
from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from areal_async.config.routes import replays
from areal_async.rpc.board import board
from areal_async.rpc.client import Client
from areal_async.rpc.messages import Drain, Heartbeat, Lease, LeasedGroup, Leases
from areal_async.trajectory import EpisodeBuilder, pack_routes
from rollout_service import metrics
from rollout_service.engines.base import DeadlinePassed
from rollout_service.gateway import Gateway
from rollout_service.process import speakers_of
from rollout_service.worker.concurrency import LOOK_S, ConcurrencyTuner
from rollout_service.worker.failures import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    EpisodeTimeout,
    FailureStreak,
    is_its_own,
    run_episode,
)
from rollout_service.worker.uploader import IDLE_WAIT_S, Uploader, first_of, wait_out
from rollout_service.workflows import Context, PolicyEngine, Workflow

log = get_logger("rollout")

DRAINED = "drained"  # The reason of handing a lease over that nothing is wrong with: this worker stops
LEASE_WAIT_MS = 2000  # Longest time that the buffer may hold a lease request until there is room
MAX_LEASE_CALLS = 3
"""Lease requests in flight at once: one with the version served now, and older ones on their way back."""
EMPTY_PAUSE_S = 0.05  # Least time between two requests when nothing is granted
HEARTBEAT_SHARE = 1 / 3
"""Share of a lease's life between two heartbeats: one may be lost without losing the lease."""


@dataclass(frozen=True)
class WorkerTiming:
    """Times of a worker, in seconds. `drain_s` and `flush_s` stay within the grace that a service has to stop
    (`areal_async.service.main.STOP_GRACE_S`)."""

    drain_s: float = 1.2
    """Time for which a worker that was told to stop lets its episodes run."""
    flush_s: float = 1.0
    """Time that it may then take to send finished episodes, and to hand leases back."""
    retry_pause_s: float = 0.5
    """Pause after a call that the buffer did not answer."""
    look_s: float = LOOK_S  # Between two looks at the engine's load
    first_failure_pause_s: float = FIRST_PAUSE_S
    longest_failure_pause_s: float = LONGEST_PAUSE_S


@dataclass
class LeaseState:
    """A lease that is open, and the episodes of it that are not finished."""

    group: LeasedGroup
    turn: int  # Number of the lease among those of this worker: the oldest goes first
    episodes: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # Running episodes by sample


@dataclass(eq=False)
class Worker:
    """Makes the episodes of the engines of all policies, which start before `run`."""

    buffer: Client
    engines: Mapping[str, PolicyEngine]
    workflow: Workflow
    _: KW_ONLY
    job: JobConfig
    name: str
    gateway: Gateway | None = None
    timing: WorkerTiming = WorkerTiming()
    first_failure_ends: bool = False

    def __post_init__(self) -> None:
        timing, job = self.timing, self.job
        self.tuners = {
            policy: ConcurrencyTuner(
                job.of(policy).rollout, each.engine.stats, self.weights_changed, look_s=timing.look_s
            )
            for policy, each in self.engines.items()
        }
        """Limits on the episodes of each policy's engine: the least of them counts."""
        self.leases: dict[str, LeaseState] = {}
        """The open leases, by id; the uploader says when one is closed."""
        self.uploader = Uploader(
            self.buffer,
            self.name,
            on_progress=self._on_progress,
            on_closed=self._closed,
            on_refused=self._lose,
            retry_pause_s=timing.retry_pause_s,
            flush_s=timing.flush_s,
        )
        self.failures = FailureStreak(
            first_pause_s=timing.first_failure_pause_s,
            longest_pause_s=timing.longest_failure_pause_s,
            first_ends=self.first_failure_ends,
        )
        self._routes = replays(job)
        self.running = 0  # Episodes that run
        self._leases_begun = 0
        self._asking: dict[asyncio.Task[Leases], list[VersionTag]] = {}
        """Lease requests in flight, each with the versions that it names."""
        self.drained = False  # It was to finish what it had and to end; set before `run` returns
        self.draining = False  # The buffer has said so
        self._stopping = False  # This process was told to stop
        self._ending = False  # No lease is begun any more
        self._failed_again, self._wake_leasing = asyncio.Event(), asyncio.Event()
        self._wake_heart, self._wake_drain = asyncio.Event(), asyncio.Event()

    def weights_changed(self) -> None:
        """Ask for more leases and send a heartbeat: the engine serves another version, or its number of
        serving replicas has changed."""
        self._wake_leasing.set()
        self._wake_heart.set()

    async def run(self, stop: asyncio.Event, *others: Coroutine[Any, Any, None]) -> None:
        """Work until `stop` is set, or until a drain has finished the running episodes. `others` run
        concurrently. Raises errors that make continuing pointless."""
        loops = [
            self._lease(),
            self.uploader.run(),
            self._beat(),
            *(tuner.run() for tuner in self.tuners.values()),
            self._until_drained(),
            self._until_hopeless(),
            *others,
        ]
        tasks = [asyncio.ensure_future(one) for one in loops]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._drain(tasks)
        finally:
            self._ending = True
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await self._wind_up()

    # --- leases --------------------------------------------------------------------------------------

    async def _lease(self) -> None:
        """Ask the buffer for leases until cancelled. Several requests are in flight at once, each under the
        versions that it named: the answer to one may take long and depends on them, so when another version
        is served the next request goes out beside it. Answers that arrive during the end count too."""
        calls = self._asking
        try:
            while True:
                self._wake_leasing.clear()
                serving = [each.engine.version for each in self.engines.values()]
                wanted = self.wanted_groups()
                if wanted and serving not in calls.values() and len(calls) < MAX_LEASE_CALLS:
                    calls[asyncio.ensure_future(self._ask(wanted, serving))] = serving
                await first_of([*calls], self._wake_leasing)
                answered = {call: calls.pop(call) for call in [*calls] if call.done()}
                for call, served in answered.items():
                    self._granted(call.result(), served)
        finally:
            for call in calls:
                call.cancel()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for answer, served in zip(answers, calls.values(), strict=True):
                if isinstance(answer, Leases):
                    self._granted(answer, served)

    async def _ask(self, wanted: int, serving: list[VersionTag]) -> Leases:
        began_s = time.monotonic()
        try:
            leases = await self.buffer.call(Lease(self.name, wanted, serving, LEASE_WAIT_MS))
        except (RpcTimeout, FaultError) as error:
            await wait_out(error, "lease", self.timing.retry_pause_s)
            return Leases([])
        if not leases.groups:
            log.debug("no lease", reason=leases.reason)
            await asyncio.sleep(max(0.0, began_s + EMPTY_PAUSE_S - time.monotonic()))
        return leases

    def wanted_groups(self) -> int:
        """Return how many more groups there is room for."""
        if self.failures.pause_s:
            return 0
        limit = min(tuner.concurrency.limit for tuner in self.tuners.values())
        size = self.job.rollout.group_size
        free = min(limit - self.running, 2 * limit - self.running - self.uploader.queue.episodes)
        return 0 if self.draining or self._ending else max(0, math.ceil(free / size))

    def _granted(self, leases: Leases, serving: Sequence[VersionTag]) -> None:
        if leases.drain:
            self._told_to_drain()
        for group in leases.groups:
            self._leases_begun += 1
            lease = self.leases[group.lease_id] = LeaseState(group, self._leases_begun)
            self.uploader.queue.open(group.lease_id, group.group_id, len(group.missing))
            if self._ending:
                # Too late to begin: it goes back at once.
                self.uploader.queue.fail(group.lease_id, self._reason_to_end)
                self.uploader.complete(group.lease_id)
            else:
                self._begin(lease, serving)
        self._wake_drain.set()

    def _begin(self, lease: LeaseState, serving: Sequence[VersionTag]) -> None:
        group = lease.group
        if recording():
            named = {"lease_id": group.lease_id, "group_id": group.group_id, "missing": group.missing}
            first, *others = map(asdict, serving)
            record("leased", **named, **first, others=others)
        self._runs(len(group.missing))
        loop = asyncio.get_running_loop()
        for sample in group.missing:
            task = lease.episodes[sample] = loop.create_task(self._episode(lease, sample))
            # Not in the coroutine itself: one that is cancelled before it begins never runs.
            task.add_done_callback(partial(self._ended, lease, sample))
        if len(self.leases) == 1:
            self._wake_heart.set()

    def _lose(self, lease_id: str, reason: str) -> None:
        """End the episodes of a lease that is somebody else's now. Cancelling one aborts its requests."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return
        metrics.LOST.inc()
        record("lease_lost", lease_id=lease_id, reason=reason)
        counts = {"unfinished": len(lease.episodes), "unsent": self.uploader.queue.drop(lease_id)}
        log.info("lease lost", group_id=lease.group.group_id, reason=reason, **counts)
        for task in lease.episodes.values():
            task.cancel()

    def _closed(self, lease_id: str) -> None:
        """Forget a lease that the uploader has sent or hands back."""
        self.leases.pop(lease_id, None)
        self._on_progress()

    # --- episodes ------------------------------------------------------------------------------------

    async def _episode(self, lease: LeaseState, sample: int) -> None:
        """One sample, from prompt to uploader. Takes every error of the workflow; see `_failed`."""
        group = lease.group
        number = self.failures.begin()
        limit_s = self.job.rollout.episode_timeout_s
        group_id, attempt, speakers = group.group_id, group.attempt, speakers_of(self.job)
        builder = EpisodeBuilder(
            self.job.job, group.task.task_id, group_id, sample, attempt=attempt, **speakers
        )
        ctx = Context(
            self.engines,
            builder,
            episode_id=f"{group_id}.{sample}",
            seed=group.seed,
            sample=sample,
            attempt=attempt,
            lease_id=group.lease_id,
            priority=lease.turn,
            deadline_s=None if limit_s is None else time.monotonic() + limit_s,
            agents=self.gateway,
            greedy=sample == self.job.rollout.greedy_sample,
            routes=self._routes,
        )
        work = self.workflow(ctx, group.task)
        try:
            episode, blob = await run_episode(ctx, work, limit_s, debug=self.first_failure_ends)
            routes = pack_routes(episode)
        except Exception as error:
            self._failed(lease, sample, number, error)
        else:
            self.failures.succeeded()
            self.uploader.add(group.lease_id, sample, blob, routes)

    def _ended(self, lease: LeaseState, sample: int, _: asyncio.Task[None]) -> None:
        self._runs(-1)
        del lease.episodes[sample]
        if not lease.episodes:
            self.uploader.complete(lease.group.lease_id)
        self._on_progress()

    def _runs(self, more: int) -> None:
        self.running += more
        for tuner in self.tuners.values():
            tuner.runs(self.running)

    def _failed(self, lease: LeaseState, sample: int, number: int, error: Exception) -> None:
        metrics.FAILED.inc()
        if isinstance(error, EpisodeTimeout | DeadlinePassed):
            metrics.TIMED_OUT.inc()
        self.failures.failed(number, error)
        asyncio.get_running_loop().call_later(self.failures.pause_s, self._wake_leasing.set)
        reason = f"{type(error).__name__}: {error}"
        self.uploader.queue.fail(lease.group.lease_id, reason, at_fault=is_its_own(error))
        log.warning("episode failed", group_id=lease.group.group_id, sample=sample, error=reason)
        self._failed_again.set()

    async def _until_hopeless(self) -> None:
        """Raises `WorkflowError` once it is pointless to go on."""
        while True:
            await self._failed_again.wait()
            self._failed_again.clear()
            self.failures.check()

    def _on_progress(self) -> None:
        """Wake the loops: there may be room for more, or nothing left to do."""
        self._wake_leasing.set()
        if self.draining or self._stopping:
            self._wake_drain.set()

    # --- heartbeats and drains -----------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._wake_heart.clear()
            lives_ms = [lease.group.deadline_ms for lease in self.leases.values()]
            life_s = min(lives_ms, default=math.inf) / 1000
            await first_of([], self._wake_heart, min(10 * IDLE_WAIT_S, life_s * HEARTBEAT_SHARE))
            held = list(self.leases)
            if not held and not self._wake_heart.is_set():
                continue
            try:
                ack = await self.buffer.call(Heartbeat(self.name, held))
            except (RpcTimeout, FaultError) as error:
                await wait_out(error, "heartbeat", self.timing.retry_pause_s)
                continue
            for lease_id in ack.lost:
                # A group that has just become whole has no lease either: there the answer to its put tells.
                if lease_id in self.leases and self.leases[lease_id].episodes:
                    self._lose(lease_id, "the buffer no longer knows it")
            if ack.drain:
                self._told_to_drain()
            elif self.draining:
                self.draining = self.drained = False
                metrics.DRAINING.set(0)
                board.draining = False

    def _told_to_drain(self) -> None:
        if not self.draining:
            log.info("told to drain: no more leases", held=len(self.leases))
        self.draining = True
        metrics.DRAINING.set(1)
        board.draining = True
        # One that is told to stop tells the buffer, and hears it from there.
        self.drained = self.drained or not self._stopping
        self._wake_drain.set()

    async def _until_drained(self) -> None:
        """Return once the buffer has requested a drain and the episodes running then are finished."""
        while not self.draining or self.running or self._asking or not self.uploader.idle:
            self._wake_drain.clear()
            await first_of([], self._wake_drain)

    # --- the end -------------------------------------------------------------------------------------

    @property
    def _reason_to_end(self) -> str:
        return DRAINED if self._stopping else "the worker failed"

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Let running episodes finish and be sent, for at most `drain_s`. Raises errors that make this
        pointless.

        The buffer is told, so that it grants nothing to a request in flight; such a grant would only be
        noticed when the lease expires.
        """
        self._stopping = self._ending = True
        draining = asyncio.ensure_future(self._tell_buffer())
        deadline_s = time.monotonic() + self.timing.drain_s
        try:
            while self.running or self.uploader.queue.episodes or self._asking or not draining.done():
                self._wake_drain.clear()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    log.info(
                        "the grace is over", unfinished=self.running, unsent=self.uploader.queue.episodes
                    )
                    break
                going_on = [task for task in (draining, *tasks) if not task.done()]
                await first_of(going_on, self._wake_drain, left_s)
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            draining.cancel()

    async def _tell_buffer(self) -> None:
        try:
            await self.buffer.call(Drain(self.name, "it was told to stop"))
        except (RpcTimeout, FaultError) as error:
            log.info("the buffer was not told", error=str(error))

    async def _wind_up(self) -> None:
        """Abandon unfinished episodes, send finished ones and hand back every lease, within seconds."""
        tasks = [task for lease in self.leases.values() for task in lease.episodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.uploader.close(self._reason_to_end)
        self.leases.clear()
