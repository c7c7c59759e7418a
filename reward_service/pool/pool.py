"""A warm pool of scoring processes of our own, for one reward or many.

Promises: every call submitted gets its verdicts exactly once, in bounded time once a worker is free for it; a
call that runs past the deadline of its reward is ended by killing its worker's process group, and only that
call is a `Timeout`; a worker's death is a `Failure` of the call it was running, and the calls that waited
behind it run elsewhere; closing the pool leaves no process of its workers' groups. Rewards share the time of
the workers in equal parts. At most `MAX_QUEUED` calls wait.

Does not promise isolation: a reward is the job's own code. A child that a reward moves into a session of its
own escapes the kill, and code that sets out to forge its worker's messages or marker can. A call may run
twice when its worker dies before reporting it, or when others of one invocation with it made that fail; one
verdict counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Self

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.verdicts import Failure, Timeout, Verdict
from areal_async.config.reward_routing import RewardSpec
from reward_service.backends import Call, OnVerdicts, inputs_of
from reward_service.pool.protocol import Assignment, FinishedUnit, WorkUnit
from reward_service.pool.queue import (
    RECALL_AFTER_S,
    STUCK_GRACE_S,
    TARGET_BATCH_S,
    FairQueue,
    Invocation,
    PooledReward,
    QueuedCall,
    next_action,
)
from reward_service.pool.workers import WorkerLimits, Workers, WorkerSlot
from reward_service.sdk import RewardLoadError

log = get_logger("pool")

TICK_S = 0.05  # How often running calls are looked at: a deadline is enforced at most so much late
CLOSE_LIMIT_S = 2.0


class WorkerPool:
    """`async with WorkerPool([spec], workers=2) as pool: await pool.submit([given], on_verdicts)`.

    Entering starts every worker and raises `RewardLoadError` when a reward cannot be loaded; one that later
    can be loaded no longer breaks the pool. All methods belong to one event loop."""

    def __init__(
        self, specs: Sequence[RewardSpec], *, workers: int, limits: WorkerLimits | None = None
    ) -> None:
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """A future that is done when the pool has given up; from then on every call is a `Failure`."""
        self.capacity = workers
        self._call_s = 0.001
        self._specs = list(specs)
        self._limits = limits or WorkerLimits()
        self._rewards: dict[int, PooledReward] = {}
        self._by_key: dict[str, PooledReward] = {}
        self._workers = Workers(workers, self._rewards, self._limits, self)
        self._queue = FairQueue(self._rewards)
        self._unit_numbers = itertools.count(1)
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def alive(self) -> int:
        return self._workers.alive

    @property
    def busy(self) -> int:
        """Workers that have something to do."""
        return sum(bool(slot.inflight) for slot in self._workers.slots)

    @property
    def queued(self) -> int:
        return self._queue.length

    @property
    def call_seconds(self) -> float:
        """Recent mean duration of a call, of all rewards together, in seconds."""
        return self._call_s

    def call_seconds_of(self, spec: RewardSpec) -> float:
        """Recent mean duration of a call of one reward, in seconds."""
        return self._by_key[spec.key].latency.call_s

    async def __aenter__(self) -> Self:
        try:
            for number, spec in enumerate(self._specs, 1):
                self._rewards[number] = self._by_key[spec.key] = PooledReward(number, spec)
            await self._workers.start()
        except TimeoutError:
            names = ", ".join(repr(spec.name) for spec in self._specs)
            self.on_hopeless(f"the reward {names} did not load within {self._limits.start_s:.0f} s")
        except BaseException:
            await self.close()
            raise
        if self.broken.done():
            await self.close()
            raise self.broken.result()
        self._watch = asyncio.create_task(self._look_after(), name="reward-pool")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(
        self, calls: Sequence[Call], on_verdicts: OnVerdicts, *, spec: RewardSpec | None = None
    ) -> None:
        """Queue calls of `spec`, or of the only reward; waits while the queue is full. `on_verdicts` is
        called once for each call, from the event loop, in the order in which they end; it must not raise."""
        reward = self._by_key[(spec or self._specs[0]).key]
        encode = msgspec.msgpack.Encoder().encode
        for index, given in enumerate(calls):
            inputs = inputs_of(given)
            try:
                payloads = [encode(one) for one in inputs]
            except (TypeError, ValueError, OverflowError) as error:
                failure = Failure("input", f"the input cannot be sent: {error}")
                on_verdicts(index, [failure] * len(inputs), 0.0)
                continue
            while self._queue.full and self._open():
                self._queue.room.clear()
                self._dispatch()
                await self._queue.room.wait()
            call = QueuedCall(reward, index, payloads, on_verdicts)
            if self._open():
                self._queue.push(call)
            else:
                self._refuse(call)
        self._dispatch()

    async def close(self) -> None:
        """Kill every worker's group, give every call still waiting its verdicts, reap. Safe to repeat."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._workers.stop()
        for slot in self._workers.slots:
            for call in (call for unit in slot.inflight.values() for call in unit.calls):
                self._refuse(call)
            slot.inflight.clear()
        self._refuse_queued()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._workers.ended()

    # --- what the workers tell -----------------------------------------------------------------------

    def on_ready(self) -> None:
        self._dispatch()

    def on_finished(self, slot: WorkerSlot, units: list[FinishedUnit]) -> None:
        for done in units:
            unit = slot.remove(done.unit)
            if unit is None:  # it was recalled and has gone to another worker
                continue
            elapsed_s = done.elapsed_ms / 1000
            self._account(unit, elapsed_s)
            calls = unit.calls
            if done.raised and len(calls) > 1:
                self._separate(calls)
                continue
            each = [done.verdicts] if len(calls) == 1 else [[verdict] for verdict in done.verdicts]
            for call, verdicts in zip(calls, each, strict=True):
                call.on_verdicts(call.index, verdicts, done.elapsed_ms / len(calls))
        self._dispatch()

    def on_lost(self, slot: WorkerSlot, cause: str) -> None:
        """Handle the end of a process after its last reports. The call that it ran gets its verdicts, and the
        others are sent again.

        If no call can be blamed (a reward may damage the marker itself), each is sent again alone. A call
        that then loses a worker with no other work is the cause.
        """
        number, began_ns = slot.process.marker.running()
        alone = len(slot.inflight) == 1 and next(iter(slot.inflight.values())).suspect
        if alone:
            number = next(iter(slot.inflight))
        # A unit that the process was not killed for, but was running then, is as innocent as the rest.
        blamed = alone or slot.overdue in (None, number)
        guilty = slot.remove(number) if blamed else None
        if guilty is not None:
            most_s = guilty.timeout_s + STUCK_GRACE_S
            elapsed_s = max(0.0, min(time.monotonic() - began_ns / 1e9, most_s))
            self._account(guilty, elapsed_s)
            self._blame(guilty, cause, elapsed_s, late=slot.overdue is not None)
        for unit in reversed(slot.inflight.values()):
            unit.reward.used_s -= unit.charged_s
            for call in reversed(unit.calls):
                call.suspect = call.single = guilty is None
                self._again(call)
        slot.inflight.clear()
        slot.inflight_bytes, slot.expected_s = 0, 0.0
        self._dispatch()

    def _blame(self, guilty: Invocation, cause: str, elapsed_s: float, *, late: bool) -> None:
        spec = guilty.reward.spec
        log.warning("call lost its process", reward=spec.name, reason="deadline" if late else cause)
        if len(guilty.calls) > 1:
            self._separate(guilty.calls)
            return
        call = guilty.calls[0]
        limit_ms = round(spec.timeout_s * 1000)
        verdict: Verdict = Timeout(limit_ms) if late else Failure("process_died", cause)
        call.on_verdicts(call.index, [verdict] * len(call.payloads), elapsed_s * 1000)

    def on_hopeless(self, message: str) -> None:
        """Fail all calls of a reward that cannot be loaded, or of a pool that cannot keep a worker
        running."""
        if not self.broken.done():
            self.broken.set_result(RewardLoadError(message))
        self._workers.halt()
        self._refuse_queued()

    # --- calls ---------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand queued calls to workers that have room: few slow calls each, or many quick ones."""
        while self._queue.length:
            ready = [slot for slot in self._workers.slots if slot.ready and not slot.taken]
            if not ready:
                return
            slot = min(ready, key=lambda slot: slot.expected_s)
            if slot.inflight and slot.expected_s > TARGET_BATCH_S / 2:
                return
            reward = self._queue.next()
            assert reward is not None
            idle = not slot.inflight
            taken = self._queue.take(
                reward, workers=len(ready), busy=not idle, assigned_bytes=slot.inflight_bytes
            )
            if not taken:
                return
            units = []
            for unit in taken:
                number = next(self._unit_numbers)
                slot.add(number, unit)
                inputs = [msgspec.Raw(payload) for call in unit.calls for payload in call.payloads]
                units.append(WorkUnit(number, reward.number, inputs))
            if idle:
                slot.moved_s = time.monotonic()
            slot.order(Assignment(units))

    def _separate(self, calls: Sequence[QueuedCall]) -> None:
        """One of these, run together, made them all fail: each is run by itself."""
        for call in reversed(calls):
            call.single = True
            self._again(call)

    def _again(self, call: QueuedCall) -> None:
        """Queue a call again that was with a worker, before calls that never were."""
        if self._open():
            self._queue.push(call, front=True)
        else:
            self._refuse(call)

    def _account(self, unit: Invocation, elapsed_s: float) -> None:
        calls = len(unit.calls)
        unit.reward.used_s += elapsed_s - unit.charged_s
        unit.reward.latency.note(elapsed_s / calls)
        self._call_s += 0.05 * (elapsed_s / calls - self._call_s)

    async def _look_after(self) -> None:
        """Enforce deadlines and take back the calls behind a slow one."""
        while True:
            shortest_s = min((p.spec.timeout_s for p in self._rewards.values()), default=1.0)
            await asyncio.sleep(min(TICK_S, shortest_s / 4))
            now_s = time.monotonic()
            for slot in list(self._workers.slots):
                if slot.loaded and not slot.doomed:
                    self._look_at(slot, now_s)
            self._workers.look_after(now_s)

    def _look_at(self, slot: WorkerSlot, now_s: float) -> None:
        number, began_ns = slot.process.marker.running()
        if number != slot.seen:
            slot.seen, slot.moved_s = number, now_s
            return
        if not slot.inflight:
            return
        still_for_s = now_s - slot.moved_s
        running = slot.inflight.get(number)
        limits_s = [running.timeout_s] if running else [unit.timeout_s for unit in slot.inflight.values()]
        running_for_s = max(now_s - began_ns / 1e9, still_for_s) if running else None
        match next_action(
            max(limits_s), running_for_s=running_for_s, still_for_s=still_for_s, waiting=len(slot.inflight)
        ):
            case "kill_call":
                slot.kill(overdue=number)
            case "kill_stuck" if not slot.loading:
                slot.kill(overdue=-1)
            case "recall":
                self._recall(slot, number)
            case "nothing" if still_for_s > RECALL_AFTER_S:
                slot.over_memory = 0 < self._limits.memory_bytes < slot.process.memory_bytes()
                if slot.over_memory:
                    slot.kill()

    def _recall(self, slot: WorkerSlot, number: int) -> None:
        """Take back what waits behind a slow call, which has more than the time that it was given."""
        slow = slot.inflight[number]
        more_s = max(0.0, RECALL_AFTER_S - slow.charged_s)
        slow.reward.used_s += more_s
        slow.charged_s += more_s
        slot.expected_s += more_s
        slot.process.marker.recall(slot.last_number)
        for other in [other for other in reversed(slot.inflight) if other != number]:
            unit = slot.remove(other)
            assert unit is not None
            unit.reward.used_s -= unit.charged_s
            for call in unit.calls:
                self._again(call)
        self._dispatch()

    def _open(self) -> bool:
        return not self._closed and not self.broken.done()

    def _refuse(self, call: QueuedCall) -> None:
        why = str(self.broken.result()) if self.broken.done() else "the pool was closed"
        call.on_verdicts(call.index, [Failure("pool", why)] * len(call.payloads), 0.0)

    def _refuse_queued(self) -> None:
        for call in self._queue.drain():
            self._refuse(call)
