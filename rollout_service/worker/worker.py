"""The rollout worker: it leases groups, runs their episodes and uploads the results.

Promises:

- The worker leases groups while fewer episodes run than `rollout.max_concurrent` allows. The last group, or a
  late answer to an older request, may exceed the limit. It also leases no groups while as many finished
  episodes as this limit await acknowledgement. So if the buffer is slow or unavailable, generation slows
  down, and no episode is discarded for lack of room.
- A finished episode is sent until the buffer has acknowledged or refused it, or its lease is lost.
- A lost lease ends only its own episodes.
- A worker that must stop takes no more leases. It uploads episodes that finish within its grace period, and
  then returns its incomplete leases. A worker that must drain finishes all its episodes, and then exits.
- An episode that was ended early by the fault of the model's answers counts as finished, and its header has
  the fault. Any other failed episode, or one that waits too long for the engine, costs only its own sample.
  Once the other samples of the lease are stored, the lease is returned with the reason. While this worker has
  only failures, it asks for leases with growing pauses, and finally exits with the reason. If no worker
  succeeds, the buffer ends the job.
- Only the buffer decides that a lease has expired, never the worker's clock, because the buffer extends
  leases after an outage.
- Every single wait has a deadline, but the worker continues to try for as long as the buffer is unavailable.

The buffer, not the worker, decides which groups are leased and what happens to a returned group.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import asdict, replace

from areal_async.base.errors import FaultError, RpcTimeout
from areal_async.base.events import record, recording
from areal_async.base.log import get_logger
from areal_async.base.records import Task
from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from areal_async.config.routes import replays
from areal_async.data.media import fetch_media
from areal_async.rpc.board import board
from areal_async.rpc.client import Client, wait_out
from areal_async.rpc.messages import Drain, Heartbeat, Lease, LeasedGroup, Leases
from areal_async.trajectory import EpisodeBuilder, TrajectoryError, pack_routes
from rollout_service import metrics
from rollout_service.engines.base import DeadlinePassed, GenerateRequest, GenerateResult
from rollout_service.gateway import Gateway
from rollout_service.process import speakers_of
from rollout_service.worker.failures import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    EpisodeTimeout,
    FailureStreak,
    is_its_own,
    run_episode,
)
from rollout_service.worker.uploader import IDLE_WAIT_S, Uploader, first_of
from rollout_service.workflows import Context, PolicyEngine, Workflow
from rollout_service.workflows.context import AlikeSamples

log = get_logger("rollout")

DRAINED = "drained"  # Reason to return a lease when nothing failed: this worker stops
LEASE_WAIT_MS = 2000  # Longest time that the buffer may hold a lease request until there is room
MAX_LEASE_CALLS = 3
"""Largest number of lease requests in flight: one that names the version served now, and older requests not
answered yet."""
EMPTY_PAUSE_S = 0.05  # Least seconds between two requests when nothing is granted
HEARTBEAT_SHARE = 1 / 3
"""Interval between heartbeats, as a share of a lease's duration. With this share, the loss of one heartbeat
does not cost the lease."""


@dataclass(frozen=True)
class WorkerTiming:
    """Times of a worker, in seconds. The sum of `drain_s` and `flush_s` must be below the grace period of a
    service (`areal_async.service.main.STOP_GRACE_S`)."""

    drain_s: float = 1.2
    """Time that episodes may continue after a stop request."""
    flush_s: float = 1.0
    """Time after `drain_s` to send finished episodes and return leases."""
    retry_pause_s: float = 0.5
    """Pause before the retry of a call that the buffer did not answer."""
    first_failure_pause_s: float = FIRST_PAUSE_S
    longest_failure_pause_s: float = LONGEST_PAUSE_S


@dataclass
class LeaseState:
    """An open lease and its unfinished episodes."""

    group: LeasedGroup
    turn: int  # Sequence number among this worker's leases: the oldest has priority
    episodes: dict[int, asyncio.Future[Any]] = field(default_factory=dict)  # Running episodes by sample
    late: asyncio.TimerHandle | None = None  # Ends the episodes that run without a task at their deadline
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # Held while the task's images are fetched


@dataclass(eq=False)
class Worker:
    """A worker that makes episodes with the engines of all policies. The engines must start before `run`."""

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
        sections = {policy: job.of(policy).rollout for policy in self.engines}
        self._most = {policy: each.max_concurrent * each.replicas for policy, each in sections.items()}
        """Largest number of episodes at once while all replicas of a policy serve."""
        self._serving = dict.fromkeys(self.engines, 1.0)
        """Share of each policy's replicas that serve."""
        metrics.CONCURRENCY.set(self.limit)
        self.leases: dict[str, LeaseState] = {}
        """Open leases by id. The uploader reports when a lease is closed."""
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
        self._voice = next(iter(self.engines.values()))
        self.running = 0  # Number of running episodes
        self._leases_begun = 0
        self._asking: dict[asyncio.Task[Leases], list[VersionTag]] = {}
        """Lease requests in flight, each with the versions that it names."""
        self.drained = False  # True if the worker ended because it drained. Set before `run` returns
        self.draining = False  # The buffer has told the worker to drain
        self._stopping = False  # This process was told to stop
        self._ending = False  # No new lease begins
        self._failed_again, self._wake_leasing = asyncio.Event(), asyncio.Event()
        self._wake_heart, self._wake_drain = asyncio.Event(), asyncio.Event()

    def weights_changed(self) -> None:
        """Ask for more leases and send a heartbeat, because an engine's version or the number of its serving
        replicas has changed."""
        self._wake_leasing.set()
        self._wake_heart.set()

    def serving(self, policy: str, share: float) -> None:
        """Set the share of a policy's replicas that serve, 0 to 1."""
        self._serving[policy] = share
        metrics.CONCURRENCY.set(self.limit)
        self.weights_changed()

    @property
    def limit(self) -> int:
        """Largest number of episodes at once. Each policy allows its `max_concurrent` for each of its serving
        replicas, and the smallest of these numbers applies. The limit is never less than one group."""
        most = min(math.floor(most * self._serving[policy]) for policy, most in self._most.items())
        return max(self.job.rollout.group_size, most)

    async def run(self, stop: asyncio.Event, *others: Coroutine[Any, Any, None]) -> None:
        """Work until `stop` is set, or until the worker has drained. The coroutines `others` run
        concurrently. Raises errors after which the worker cannot continue."""
        loops = [
            self._lease(),
            self.uploader.run(),
            self._beat(),
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
        """Ask the buffer for leases until cancelled. The buffer may answer late, and its answer depends on
        the versions in the request. So when the served version changes, a new request is sent without waiting
        for the answer to the old one. If an answer arrives while the worker ends, its leases are registered
        too, so that they are returned."""
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
        """Return how many more groups the worker can run."""
        if self.failures.pause_s:
            return 0
        limit, size = self.limit, self.job.rollout.group_size
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
                # Too late to begin, so the lease is returned immediately.
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
        self.running += len(group.missing)
        alike = self._alike(lease)
        for sample in group.missing:
            if alike is None or sample == self.job.rollout.greedy_sample:
                self._begin_task(lease, sample)
            else:
                self._begin_call(lease, sample, alike)
        if len(self.leases) == 1:
            self._wake_heart.set()

    def _lose(self, lease_id: str, reason: str) -> None:
        """End the episodes of a lost lease. Cancelling an episode aborts its requests."""
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
        """Forget a lease whose samples the uploader has all sent, or which it is about to return."""
        self.leases.pop(lease_id, None)
        self._on_progress()

    # --- episodes ------------------------------------------------------------------------------------

    def _begin_task(self, lease: LeaseState, sample: int) -> None:
        work = self._episode(lease, sample)
        task = lease.episodes[sample] = asyncio.get_running_loop().create_task(work)
        # Not in the coroutine itself, because a task cancelled before its start never runs it.
        task.add_done_callback(partial(self._ended, lease, sample))

    def _alike(self, lease: LeaseState) -> AlikeSamples | None:
        """Return the group's samples, if each makes the same one call, so that no sample needs a task."""
        only_call, group = getattr(self.workflow, "only_call", None), lease.group
        able = len(self.engines) == 1 and hasattr(self._voice.engine, "begin")
        if only_call is None or not able or self._routes or group.task.images:
            return None
        try:
            alike = self._context(lease, group.missing[0], greedy=False).alike(*only_call(group.task))
        except Exception:  # each sample's own task will report it
            return None
        if (limit_s := self.job.rollout.episode_timeout_s) is not None:
            lease.late = asyncio.get_running_loop().call_later(limit_s, self._too_late, lease)
        return alike

    def _begin_call(self, lease: LeaseState, sample: int, alike: AlikeSamples) -> None:
        request, number = alike.request(sample), self.failures.begin()
        call = lease.episodes[sample] = self._voice.engine.begin(request)
        call.add_done_callback(partial(self._answered, lease, sample, number, alike, request))

    def _too_late(self, lease: LeaseState) -> None:
        for sample, call in lease.episodes.items():
            if not isinstance(call, asyncio.Task) and not call.done():
                name = f"{lease.group.group_id}.{sample}"
                call.set_exception(DeadlinePassed(f"the request of {name} was not done by its deadline"))

    def _answered(
        self,
        lease: LeaseState,
        sample: int,
        number: int,
        alike: AlikeSamples,
        request: GenerateRequest,
        call: asyncio.Future[GenerateResult],
    ) -> None:
        """Upload the episode of an answer to a call without a task."""
        try:
            if not call.cancelled():
                blob = alike.blob(sample, request, call.result())
                self.failures.succeeded()
                self.uploader.add(lease.group.lease_id, sample, blob)
        except TrajectoryError:  # The task decides whose fault such an answer is
            self._begin_task(lease, sample)
            return
        except Exception as error:
            self._failed(lease, sample, number, error)
        self._ended(lease, sample, call)

    async def _episode(self, lease: LeaseState, sample: int) -> None:
        """Run one sample, from prompt to uploader. Catches every error of the workflow (see `_failed`)."""
        group = lease.group
        number = self.failures.begin()
        limit_s = self.job.rollout.episode_timeout_s
        ctx = self._context(lease, sample, greedy=sample == self.job.rollout.greedy_sample)
        try:
            work = self.workflow(ctx, ctx.seeing(await self._task_of(lease)))
            episode, blob = await run_episode(ctx, work, limit_s, debug=self.first_failure_ends)
            routes = pack_routes(episode)
            named = {each.digest for each in episode.header.media}
            media = {digest: data for digest, data in ctx.new_media.items() if digest in named}
        except Exception as error:
            self._failed(lease, sample, number, error)
        else:
            self.failures.succeeded()
            self.uploader.add(group.lease_id, sample, blob, routes, media)

    async def _task_of(self, lease: LeaseState) -> Task:
        """Return the task of a lease with the bytes of its images. The first of its samples fetches them."""
        async with lease.reading:
            task = lease.group.task
            if any(not image.data for image in task.images):
                found = await self._fetch_images(lease.group)
                images = tuple(each._replace(data=found[each.facts.digest]) for each in task.images)
                lease.group = replace(lease.group, task=replace(task, images=images))
        return lease.group.task

    async def _fetch_images(self, group: LeasedGroup) -> dict[str, bytes]:
        wanted = {group.group_id: [each.facts.digest for each in group.task.images]}
        fetch = await fetch_media(self.buffer, wanted, retry_pause_s=self.timing.retry_pause_s)
        for digest in fetch.lost:
            raise FaultError("invalid", f"the buffer has lost the image {digest} of {group.task.task_id}")
        return {digest: bytes(data) for digest, data in fetch.found.items()}

    def _context(self, lease: LeaseState, sample: int, *, greedy: bool) -> Context:
        group, limit_s = lease.group, self.job.rollout.episode_timeout_s
        task_id, speakers = group.task.task_id, speakers_of(self.job)
        return Context(
            self.engines,
            EpisodeBuilder(self.job.job, task_id, group.group_id, sample, attempt=group.attempt, **speakers),
            episode_id=f"{group.group_id}.{sample}",
            seed=group.seed,
            sample=sample,
            attempt=group.attempt,
            lease_id=group.lease_id,
            priority=lease.turn,
            deadline_s=None if limit_s is None else time.monotonic() + limit_s,
            agents=self.gateway,
            greedy=greedy,
            routes=self._routes,
        )

    def _ended(self, lease: LeaseState, sample: int, _: asyncio.Future[Any]) -> None:
        self.running -= 1
        del lease.episodes[sample]
        if not lease.episodes:
            if lease.late is not None:
                lease.late.cancel()
            self.uploader.complete(lease.group.lease_id)
        self._on_progress()

    def _failed(self, lease: LeaseState, sample: int, number: int, error: Exception) -> None:
        metrics.FAILED.inc()
        if isinstance(error, EpisodeTimeout | DeadlinePassed):
            metrics.TIMED_OUT.inc()
        self.failures.failed(number, error)
        asyncio.get_running_loop().call_later(self.failures.pause_s, self._wake_leasing.set)
        reason = f"{type(error).__name__}: {error}{_row_of(lease.group.task)}"
        self.uploader.queue.fail(lease.group.lease_id, reason, at_fault=is_its_own(error))
        log.warning("episode failed", group_id=lease.group.group_id, sample=sample, error=reason)
        self._failed_again.set()

    async def _until_hopeless(self) -> None:
        """Raise `WorkflowError` once retries are pointless."""
        while True:
            await self._failed_again.wait()
            self._failed_again.clear()
            self.failures.check()

    def _on_progress(self) -> None:
        """Wake the worker's loops, because there may be room for more leases, or no work left."""
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
                # A group that has just become complete has no lease either. The answer to its put reports
                # this.
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
        # A worker that is stopping told the buffer to drain it, and the buffer now repeats this.
        self.drained = self.drained or not self._stopping
        self._wake_drain.set()

    async def _until_drained(self) -> None:
        """Wait until the buffer has told the worker to drain and all its work is done."""
        while not self.draining or self.running or self._asking or not self.uploader.idle:
            self._wake_drain.clear()
            await first_of([], self._wake_drain)

    # --- the end -------------------------------------------------------------------------------------

    @property
    def _reason_to_end(self) -> str:
        return DRAINED if self._stopping else "the worker failed"

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Let running episodes finish and be sent, for at most `drain_s`. Raises errors after which waiting
        is pointless.

        The buffer is told not to grant leases to requests of this worker that are still in flight. Otherwise
        nobody would work on such a lease until it expires."""
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
        """Cancel unfinished episodes, send finished ones, and return every lease, all within seconds."""
        tasks = [task for lease in self.leases.values() for task in lease.episodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.uploader.close(self._reason_to_end)
        self.leases.clear()


def _row_of(task: Task) -> str:
    """Return the row of a task with images, for errors: its image may be what cannot be used."""
    row = task.task_id.split(":")[1:2] if task.images else []
    return f" (row {int(row[0]) + 1} of its task file)" if row else ""
