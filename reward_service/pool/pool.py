"""A warm pool of scoring processes, for one reward or many.

Promises:
- Every submitted call gets its verdicts exactly once, within a bounded time after a worker begins it.
- If a call passes its reward's deadline, its worker's process group is killed. Only that call gets the
  verdict `Timeout`.
- If a worker dies, its running call gets the verdict `Failure`.
- Closing the pool leaves no process of its workers' groups.
- Rewards share the workers' time in equal parts. At most `MAX_QUEUED` calls wait.

The pool does not isolate rewards, because they are the job's own code: a child process in a session of its
own escapes the kill, and malicious code can forge its worker's messages. If a joint invocation fails, each of
its calls runs again by itself. Only one verdict of a call counts.
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
from reward_service.pool.protocol import FinishedUnit, FrameError, WorkUnit
from reward_service.pool.queue import FairQueue, Invocation, PooledReward, QueuedCall
from reward_service.pool.workers import WorkerLimits, Workers, WorkerSlot
from reward_service.sdk import RewardLoadError

log = get_logger("pool")

TICK_S = 0.05  # seconds between checks of running calls, and so the largest delay of a deadline
CLOSE_LIMIT_S = 2.0


class WorkerPool:
    """A pool: `async with WorkerPool([spec], workers=2) as pool: await pool.submit([given], on_verdicts)`.

    `async with` starts every worker and raises `RewardLoadError` if a reward cannot be loaded. If a new
    worker cannot load a reward later, the pool breaks (`broken`). All methods belong to one event loop.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], *, workers: int, limits: WorkerLimits | None = None
    ) -> None:
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """Future that is done when the pool has given up. After that, every call gets the verdict
        `Failure`."""
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
        """Return the number of workers that have work."""
        return sum(slot.running is not None for slot in self._workers.slots)

    @property
    def queued(self) -> int:
        return self._queue.length

    @property
    def call_seconds(self) -> float:
        """Return the recent mean duration of a call, of all rewards together, in seconds."""
        return self._call_s

    def call_seconds_of(self, spec: RewardSpec) -> float:
        """Return the recent mean duration of a call of one reward, in seconds."""
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
        """Queue calls of the reward `spec` (by default the only reward). Waits while the queue is full.

        The event loop calls `on_verdicts` once for each call, in the order in which the calls end. It must
        not raise.
        """
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
                self.dispatch()
                await self._queue.room.wait()
            self._push(QueuedCall(reward, index, payloads, on_verdicts))
        self.dispatch()

    async def close(self) -> None:
        """Kill every worker's process group, give every waiting call its verdicts, and reap the processes. It
        is harmless to call this again."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._workers.stop()
        for slot in self._workers.slots:
            unit, slot.running = slot.running, None
            for call in unit.calls if unit is not None else ():
                self._refuse(call)
        self._refuse_queued()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._workers.ended()

    # --- what the workers tell -----------------------------------------------------------------------

    def on_finished(self, slot: WorkerSlot, done: FinishedUnit) -> None:
        unit = slot.running
        if unit is None or unit.number != done.unit:
            return  # a process that the reward has forked reports a unit again
        calls = unit.calls
        if len(done.verdicts) != sum(len(call.payloads) for call in calls):
            raise FrameError(f"{len(done.verdicts)} verdicts for the inputs of {len(calls)} calls")
        slot.running = None
        self._account(unit, done.elapsed_ms / 1000)
        if done.raised and len(calls) > 1:
            self._separate(calls)
        else:
            each = [done.verdicts] if len(calls) == 1 else [[verdict] for verdict in done.verdicts]
            for call, verdicts in zip(calls, each, strict=True):
                call.on_verdicts(call.index, verdicts, done.elapsed_ms / len(calls))
        self.dispatch()

    def on_lost(self, slot: WorkerSlot, cause: str) -> None:
        """Handle the end of a worker's process, after its last report. The call that the process was running
        gets its verdicts."""
        unit, slot.running = slot.running, None
        if unit is not None:
            spec, elapsed_s = unit.reward.spec, time.monotonic() - unit.began_s
            self._account(unit, elapsed_s)
            log.warning(
                "call lost its process", reward=spec.name, reason="deadline" if slot.overdue else cause
            )
            if len(unit.calls) > 1:
                self._separate(unit.calls)
            else:
                (call,), limit_ms = unit.calls, round(spec.timeout_s * 1000)
                verdict: Verdict = Timeout(limit_ms) if slot.overdue else Failure("process_died", cause)
                call.on_verdicts(call.index, [verdict] * len(call.payloads), elapsed_s * 1000)
        self.dispatch()

    def on_hopeless(self, message: str) -> None:
        """Break the pool, because a reward cannot be loaded or the workers keep dying."""
        if not self.broken.done():
            self.broken.set_result(RewardLoadError(message))
        self._workers.halt()
        self._refuse_queued()

    # --- calls ---------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Give queued calls to free workers."""
        while ready := [slot for slot in self._workers.slots if slot.ready and slot.running is None]:
            unit = self._queue.take(next(self._unit_numbers), len(ready))
            if unit is None:
                return
            ready[0].running = unit
            inputs = [msgspec.Raw(payload) for call in unit.calls for payload in call.payloads]
            ready[0].order(WorkUnit(unit.number, unit.reward.number, inputs))

    def _separate(self, calls: Sequence[QueuedCall]) -> None:
        """Run each call of a failed joint invocation by itself, because one of them made it fail."""
        for call in reversed(calls):
            call.single = True
            self._push(call, front=True)

    def _push(self, call: QueuedCall, *, front: bool = False) -> None:
        """Queue a call. With `front`, it is placed before calls that no worker has had yet."""
        if self._open():
            self._queue.push(call, front=front)
        else:
            self._refuse(call)

    def _account(self, unit: Invocation, elapsed_s: float) -> None:
        calls = len(unit.calls)
        unit.reward.used_s += elapsed_s - unit.charged_s
        unit.reward.latency.note(elapsed_s / calls)
        self._call_s += 0.05 * (elapsed_s / calls - self._call_s)

    async def _look_after(self) -> None:
        """Enforce the deadlines of calls, and the memory limit during long calls."""
        while True:
            shortest_s = min((p.spec.timeout_s for p in self._rewards.values()), default=1.0)
            await asyncio.sleep(min(TICK_S, shortest_s / 4))
            now_s = time.monotonic()
            for slot in list(self._workers.slots):
                if slot.running is not None and not slot.doomed:
                    self._look_at(slot, now_s - slot.running.began_s, slot.running.reward.spec.timeout_s)
            self._workers.look_after(now_s)

    def _look_at(self, slot: WorkerSlot, running_for_s: float, limit_s: float) -> None:
        slot.overdue = running_for_s > limit_s
        if running_for_s > TICK_S:
            slot.over_memory = 0 < self._limits.memory_bytes < slot.process.memory_bytes()
        if slot.overdue or slot.over_memory:
            slot.kill()

    def _open(self) -> bool:
        return not self._closed and not self.broken.done()

    def _refuse(self, call: QueuedCall) -> None:
        why = str(self.broken.result()) if self.broken.done() else "the pool was closed"
        call.on_verdicts(call.index, [Failure("pool", why)] * len(call.payloads), 0.0)

    def _refuse_queued(self) -> None:
        for call in self._queue.drain():
            self._refuse(call)
