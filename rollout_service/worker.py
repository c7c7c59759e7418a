"""The rollout worker: leases groups, runs their episodes, puts what they produced.

Promises:
- Groups are leased while fewer episodes run than `concurrency.py` allows (the last group may go over it, and
  so may the late answer to an older request), and not while as many finished ones await acknowledgement: when
  the buffer is slow or away generation slows down, and nothing is thrown away for lack of room.
- An episode that finished is sent until the buffer has acknowledged or refused it, or its lease is lost.
- A lost lease ends its episodes; other leases do not notice.
- A worker told to stop leases no more, puts what finishes within its grace, and hands the rest over at once.
  One told to drain finishes what it has, and ends.
- A failing episode costs its own sample, and so does one that takes too long: the lease goes back once its
  other samples are stored, with the reason; where nothing succeeds anywhere the buffer ends the job. While
  nothing succeeds here, leases are asked for with growing pauses; at last this worker ends with the reason.
- A lease ends when the buffer says so, not by a clock of ours: during an outage of the buffer it is extended.
- Every wait has a deadline, and an outage of the buffer is waited out.

Does not decide what is leased, nor what becomes of a released group: that is the buffer's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from areal_async.config.job import JobConfig
from areal_async.errors import FaultError, RpcTimeout
from areal_async.rpc.client import Caller
from areal_async.rpc.messages import Drain, Heartbeat, LeasedGroup, Leases, VersionTag
from areal_async.runtime.events import record
from areal_async.runtime.log import get_logger
from areal_async.trajectory import EpisodeBuilder, pack
from rollout_service import metrics
from rollout_service.asking import Asking
from rollout_service.concurrency import Concurrency
from rollout_service.engines.base import DeadlinePassed, Engine
from rollout_service.episode_engine import EpisodeEngine
from rollout_service.failures import EpisodeTimeout, FailureStreak, is_its_own, within
from rollout_service.gateway import Gateway
from rollout_service.leases import DRAINED, Held
from rollout_service.process import sampling_of
from rollout_service.sending import Sender
from rollout_service.tuning import Tuning
from rollout_service.waiting import IDLE_WAIT_S, first_of, wait_out
from rollout_service.workflows import Context, Renderer, Workflow

log = get_logger("rollout")

HEARTBEAT_SHARE = 1 / 3
"""Of a lease's life; a heartbeat may be lost without losing the lease."""
DRAIN_LIMIT_S = 1.2
"""How long a worker that was told to stop lets its episodes run. With the limits of `sending.py` it stays
within the grace that a service has (`control.service.STOP_GRACE_S`)."""


class Worker:
    """One engine's worth of episodes. The engine has started."""

    def __init__(
        self,
        buffer: Caller,
        engine: Engine,
        workflow: Workflow,
        render: Renderer,
        *,
        job: JobConfig,
        name: str,
        gateway: Gateway | None = None,
    ) -> None:
        self._buffer = buffer
        self._engine = engine
        self._workflow = workflow
        self._render = render
        self._job = job
        self._name = name
        self._gateway = gateway
        self._sampling = sampling_of(job.rollout.sampling)
        self._held: dict[str, Held] = {}
        self._sender = Sender(buffer, name, self._held, on_settled=self._changed, on_refused=self._lose)
        self._failures = FailureStreak()
        self._asking = Asking(
            buffer,
            name,
            wanted=self._wanted_groups,
            serving=lambda: engine.version,
            granted=self._granted,
        )
        self._tuning = Tuning(job.rollout, self._asking.wake)
        self._running = 0
        self._leases_begun = 0
        self.drained = False
        """It was to finish what it had and to end; set before `run` returns."""
        self._draining = False
        """The buffer has said so."""
        self._stopping = False
        """This process was told to stop."""
        self._wake_heart = asyncio.Event()
        self._wake_drain = asyncio.Event()

    @property
    def concurrency(self) -> Concurrency:
        """How many episodes may run at once."""
        return self._tuning.concurrency

    def weights_changed(self) -> None:
        """The engine serves another version: ask for what this allows, and let the buffer know."""
        self._asking.wake()
        self._wake_heart.set()

    def exchanging_weights(self, going_on: bool) -> None:
        """An exchange of the engine's weights begins, or has ended."""
        self._tuning.exchanging(going_on)

    def replicas_serving(self, share: float) -> None:
        """So much of the engine serves now, 0 to 1."""
        self._tuning.serving(share)
        self.weights_changed()

    async def run(self, stop: asyncio.Event, *others: Coroutine[Any, Any, None]) -> None:
        """Work until `stop` is set, or until what was there when the buffer said to drain is done; `others`
        run beside. Raises what makes going on pointless."""
        sending = self._sender.run(self._failures.check)
        asking = self._asking.run(on_answer=self._wake_drain.set, late=self._too_late)
        tuning = self._tuning.run(self._engine.stats)
        loops = [asking, sending, self._beat(), tuning, self._until_drained(), *others]
        tasks = [asyncio.ensure_future(one) for one in loops]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._drain(tasks)
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await self._wind_up()

    # --- leases --------------------------------------------------------------------------------------

    def _wanted_groups(self) -> int:
        """How many more groups there is room for."""
        if self._failures.pause_s:
            return 0
        limit, size = self.concurrency.limit, self._job.rollout.group_size
        free = min(limit - self._running, 2 * limit - self._running - self._sender.episodes)
        return 0 if self._draining or self._stopping else max(0, math.ceil(free / size))

    def _granted(self, leases: Leases, serving: VersionTag) -> None:
        if leases.drain:
            self._told_to_drain()
        for group in leases.groups:
            if self._stopping:
                # Too late to begin: it goes back with the next look at what is held.
                self._held[group.lease_id] = Held(group, failure=DRAINED)
                self._sender.wake()
            else:
                self._begin(group, serving)

    def _too_late(self, leases: Leases) -> None:
        """What was granted while we were ending is handed back with the rest."""
        self._held |= {group.lease_id: Held(group) for group in leases.groups}

    def _begin(self, group: LeasedGroup, serving: VersionTag) -> None:
        held = self._held[group.lease_id] = Held(group)
        record(
            "leased",
            lease_id=group.lease_id,
            group_id=group.group_id,
            missing=group.missing,
            epoch=serving.epoch,
            version=serving.version,
        )
        self._leases_begun += 1
        held.turn = self._leases_begun
        self._running += len(group.missing)
        self._tuning.runs(self._running)
        for sample in group.missing:
            task = held.episodes[sample] = asyncio.ensure_future(self._episode(held, sample))
            # Not in the coroutine itself: one that is cancelled before it begins never runs.
            task.add_done_callback(partial(self._ended, held, sample))
        if len(self._held) == 1:
            self._wake_heart.set()

    def _lose(self, lease_id: str, reason: str) -> None:
        """The lease is somebody else's now: end its episodes. Cancelling one aborts its requests."""
        held = self._held.pop(lease_id, None)
        if held is None:
            return
        metrics.LOST.inc()
        record("lease_lost", lease_id=lease_id, reason=reason)
        dropped = self._sender.drop(lease_id)
        log.info(
            "lease lost",
            group_id=held.group.group_id,
            reason=reason,
            unfinished=len(held.episodes),
            unsent=dropped,
        )
        for task in held.episodes.values():
            task.cancel()

    # --- episodes ------------------------------------------------------------------------------------

    async def _episode(self, held: Held, sample: int) -> None:
        """One sample, from prompt to outbox. Takes every error of the workflow; see `_failed`."""
        group = held.group
        number = self._failures.begin()
        limit_s = self._job.rollout.episode_timeout_s
        episode_id = f"{group.group_id}.{sample}"
        # Cast: it passes on by `__getattr__` what it does not change.
        engine: Any = EpisodeEngine(
            self._engine, episode_id, held.turn, None if limit_s is None else time.monotonic() + limit_s
        )
        builder = EpisodeBuilder(
            self._job.job, group.task.task_id, group.group_id, sample, attempt=group.attempt
        )
        ctx = Context(
            engine,
            self._render,
            builder,
            episode_id=episode_id,
            sampling=self._sampling,
            seed=group.seed,
            sample=sample,
            attempt=group.attempt,
            lease_id=group.lease_id,
            gateway=self._gateway,
        )
        try:
            await within(limit_s, self._workflow(ctx, group.task))
            blob = pack(builder.build())
        except Exception as error:
            self._failed(held, sample, number, error)
        else:
            self._failures.succeeded()
            if group.lease_id in self._held:
                self._sender.add(group.lease_id, group.group_id, sample, blob)

    def _ended(self, held: Held, sample: int, _: asyncio.Task[None]) -> None:
        self._running -= 1
        self._tuning.runs(self._running)
        del held.episodes[sample]
        if not held.episodes:
            self._sender.complete(held.group.lease_id)
        self._sender.wake()
        self._changed()

    def _changed(self) -> None:
        """There may be room for more, or nothing left to do."""
        self._asking.wake()
        self._wake_drain.set()

    def _failed(self, held: Held, sample: int, number: int, error: Exception) -> None:
        metrics.FAILED.inc()
        if isinstance(error, EpisodeTimeout | DeadlinePassed):
            metrics.TIMED_OUT.inc()
        self._failures.failed(number, error)
        asyncio.get_running_loop().call_later(self._failures.pause_s, self._asking.wake)
        held.failure = f"{type(error).__name__}: {error}"
        held.at_fault = held.at_fault or is_its_own(error)
        log.warning("episode failed", group_id=held.group.group_id, sample=sample, error=held.failure)

    # --- signs of life -------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._wake_heart.clear()
            life_s = min((held.group.deadline_ms / 1000 for held in self._held.values()), default=math.inf)
            await first_of([], self._wake_heart, min(10 * IDLE_WAIT_S, life_s * HEARTBEAT_SHARE))
            if not self._held and not self._wake_heart.is_set():
                continue
            try:
                ack = await self._buffer.call(Heartbeat(self._name, list(self._held), self._engine.version))
            except (RpcTimeout, FaultError) as error:
                await wait_out(error, "heartbeat")
                continue
            for lease_id in ack.lost:
                # A group that has just become whole has no lease either: there the answer to its put tells.
                if lease_id in self._held and self._held[lease_id].episodes:
                    self._lose(lease_id, "the buffer no longer knows it")
            if ack.drain:
                self._told_to_drain()
            elif self._draining:
                self._draining = self.drained = False
                metrics.DRAINING.set(0)

    def _told_to_drain(self) -> None:
        if not self._draining:
            log.info("told to drain: no more leases", held=len(self._held))
        self._draining = True
        metrics.DRAINING.set(1)
        # One that is told to stop tells the buffer, and hears it from there.
        self.drained = self.drained or not self._stopping
        self._wake_drain.set()

    async def _until_drained(self) -> None:
        """Return once the buffer has said to drain, and what was there then is done."""
        while not self._draining or self._busy:
            self._wake_drain.clear()
            await first_of([], self._wake_drain)

    @property
    def _busy(self) -> bool:
        return bool(self._running or self._asking.under_way or self._held or not self._sender.idle)

    # --- the end -------------------------------------------------------------------------------------

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Let what runs finish and be sent, for at most `DRAIN_LIMIT_S`. Raises what makes that pointless.

        The buffer is told, so that it grants nothing to a request still under way: that would be found out
        only when the lease expires."""
        self._stopping = True
        telling = asyncio.ensure_future(self._tell_buffer())
        deadline_s = time.monotonic() + DRAIN_LIMIT_S
        try:
            while self._running or self._sender.episodes or self._asking.under_way or not telling.done():
                self._wake_drain.clear()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    log.info("the grace is over", unfinished=self._running, unsent=self._sender.episodes)
                    break
                going_on = [task for task in (telling, *tasks) if not task.done()]
                await first_of(going_on, self._wake_drain, left_s)
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            telling.cancel()

    async def _tell_buffer(self) -> None:
        try:
            await self._buffer.call(Drain(self._name, "it was told to stop"))
        except (RpcTimeout, FaultError) as error:
            log.info("the buffer was not told", error=str(error))

    async def _wind_up(self) -> None:
        """Give up what is unfinished, send what is finished, hand back every lease; all within seconds."""
        tasks = [task for held in self._held.values() for task in held.episodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sender.flush()
        gone = DRAINED if self._stopping else "the worker failed"
        await asyncio.gather(
            *(
                self._sender.release(lease_id, held.failure or gone, failed=held.at_fault)
                for lease_id, held in self._held.items()
                if not held.whole
            )
        )
        self._held.clear()
