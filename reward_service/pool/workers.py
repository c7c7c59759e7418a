"""The workers of a pool: started, replaced when they die, renewed when they have grown.

Promises: a place whose process died is filled again, at growing intervals while that fails; a worker is
renewed between its calls, one at a time; a reward that was loaded before is tried
again before it is given up.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.retry import pause_s
from reward_service import metrics
from reward_service.pool.protocol import (
    FinishedUnit,
    RewardLoaded,
    RewardNotLoaded,
    UnitsFinished,
    WorkerOrder,
    WorkerReport,
)
from reward_service.pool.queue import Invocation, PooledReward
from reward_service.processes import WorkerProcess

log = get_logger("pool")

MAX_FAILED_STARTS = 4  # Starts in a row that do not get ready before the pool gives up
FIRST_PAUSE_S = 0.2
SOFT_SHARE = 0.75
"""Share of the memory limit beyond what loading took: a worker that has grown so far is renewed between
calls."""


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker while it loads and as it grows."""

    memory_bytes: int = 0  # Killed beyond this; 0: no limit
    start_s: float = 60.0
    look_s: float = 0.5


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """The place of one worker, and its state. If the worker dies, another one takes the place."""

    loading: set[int]
    """Rewards that it was told to load and has said nothing about yet."""
    failed_starts: int = 0
    process: WorkerProcess = field(init=False)
    started_s: float = field(default_factory=time.monotonic)
    loaded: bool = False  # It has loaded every reward that it was started with
    doomed: bool = False  # It was killed, or has ended
    leaving: bool = False  # It gets nothing more; once it has nothing left, another one takes the place
    inflight: dict[int, Invocation] = field(default_factory=dict)
    """Invocations that it was given and has not reported, by the number of its unit."""
    inflight_bytes: int = 0
    expected_s: float = 0.0
    last_number: int = 0
    seen: int = 0
    moved_s: float = 0.0  # When it was last seen to begin or report a unit, or was given one while idle
    overdue: int | None = None  # The unit that it was killed for; -1 when it began none
    over_memory: bool = False
    trouble: str = ""  # Why it was killed while it loaded a reward
    loaded_bytes: int = 0

    @property
    def ready(self) -> bool:
        return self.loaded and not (self.doomed or self.leaving)

    @property
    def taken(self) -> bool:
        """It runs something that must have the worker for itself; it has nothing else then."""
        return len(self.inflight) == 1 and next(iter(self.inflight.values())).suspect

    def order(self, order: WorkerOrder) -> None:
        self.process.send(msgspec.msgpack.encode(order))

    def add(self, number: int, invocation: Invocation) -> None:
        self.inflight[number] = invocation
        self.inflight_bytes += invocation.size_bytes
        self.expected_s += invocation.charged_s
        self.last_number = number

    def remove(self, number: int) -> Invocation | None:
        invocation = self.inflight.pop(number, None)
        if invocation is not None:
            self.inflight_bytes -= invocation.size_bytes
            self.expected_s = self.expected_s - invocation.charged_s if self.inflight else 0.0
        return invocation

    def kill(self, overdue: int | None = None) -> None:
        """Kill it, for the unit `overdue` that it runs for too long, if any; for -1 it began none."""
        self.doomed, self.overdue = True, self.overdue if overdue is None else overdue
        self.process.kill()


class PoolOwner(Protocol):
    """The pool as its workers see it."""

    def on_ready(self) -> None: ...
    def on_finished(self, slot: WorkerSlot, units: list[FinishedUnit]) -> None: ...
    def on_lost(self, slot: WorkerSlot, cause: str) -> None: ...
    def on_hopeless(self, message: str) -> None: ...


class Workers:
    """Keeps `count` places filled with processes that have the pool's rewards loaded. All methods belong to
    one event loop."""

    def __init__(
        self, count: int, rewards: Mapping[int, PooledReward], limits: WorkerLimits, owner: PoolOwner
    ) -> None:
        self.count = count
        self.slots: list[WorkerSlot] = []
        self.changed = asyncio.Event()  # Set whenever a process became ready or ended
        self._rewards = rewards
        self._limits = limits
        self._owner = owner
        self._reports = msgspec.msgpack.Decoder(WorkerReport)
        self._started = False
        self._closed = False
        self._restarts: set[asyncio.Task[None]] = set()
        self._looked_s = 0.0
        self._rng = random.Random()

    @property
    def alive(self) -> int:
        return sum(slot.ready for slot in self.slots)

    async def start(self) -> None:
        """Start every worker, and wait until all are ready or one cannot be. Raises TimeoutError after
        the limit."""
        for _ in range(self.count):
            self.slots.append(self._start())
        async with asyncio.timeout(self._limits.start_s):
            while self.alive < self.count and not self._closed:
                self.changed.clear()
                await self.changed.wait()
        self._started = True

    def halt(self) -> None:
        """Start no process any more."""
        self._closed = True
        self.changed.set()
        for task in list(self._restarts):
            task.cancel()

    def stop(self) -> None:
        """Kill every process and start none any more."""
        self.halt()
        for slot in self.slots:
            slot.kill()

    async def ended(self) -> None:
        """Wait until every process has ended."""
        for slot in list(self.slots):
            await slot.process.ended.wait()

    def look_after(self, now_s: float) -> None:
        """End workers that load for too long, and replace workers that are due. Call it often."""
        for slot in self.slots:
            if not slot.loaded and now_s - slot.started_s > self._limits.start_s:
                slot.kill()
        if now_s - self._looked_s < self._limits.look_s or self._closed:
            return
        self._looked_s = now_s
        if not any(slot.leaving for slot in self.slots):
            self._renew_used_up()

    # --- a worker's life -----------------------------------------------------------------------------

    def _start(self, failed_starts: int = 0) -> WorkerSlot:
        """Start a process. Raises OSError."""
        slot = WorkerSlot(set(self._rewards), failed_starts)
        slot.process = WorkerProcess(partial(self._on_frame, slot), partial(self._on_exit, slot))
        for reward in self._rewards.values():
            slot.order(reward.load_order())
        return slot

    def _on_frame(self, slot: WorkerSlot, payload: bytes) -> None:
        match self._reports.decode(payload):
            case UnitsFinished(units):
                slot.moved_s = time.monotonic()
                self._owner.on_finished(slot, units)
                self.end_if_done(slot)
            case RewardLoaded(number, batch):
                slot.loading.discard(number)
                self._rewards[number].batch = batch
                if not slot.loading and not slot.doomed:
                    self._on_loaded(slot)
            case RewardNotLoaded(number, message):
                self._not_loaded(slot, self._rewards[number], message)

    def _on_loaded(self, slot: WorkerSlot) -> None:
        slot.loaded_bytes = slot.process.memory_bytes()
        if 0 < self._limits.memory_bytes < slot.loaded_bytes:
            takes = f"once loaded it takes {slot.loaded_bytes >> 20} MiB, and reward.worker_memory_mb is"
            message = f"{takes} {self._limits.memory_bytes >> 20}. Raise that, or load less."
            for reward in list(self._rewards.values()):
                self._not_loaded(slot, reward, f"the reward {reward.spec.name!r}: {message}")
            return
        slot.loaded = True
        slot.failed_starts = 0
        slot.moved_s = time.monotonic()
        for reward in self._rewards.values():
            reward.loaded_once = True
        self.changed.set()
        self._owner.on_ready()

    def _not_loaded(self, slot: WorkerSlot, reward: PooledReward, message: str) -> None:
        if slot.doomed:
            return
        if self._started and reward.loaded_once and slot.failed_starts < MAX_FAILED_STARTS - 1:
            # It may pass: what it imports may be half saved, or memory short.
            log.warning("a reward was not loaded and is tried again", reward=reward.spec.name, cause=message)
            slot.trouble = message
            slot.kill()
        else:
            self._owner.on_hopeless(message)
        self.changed.set()

    def _on_exit(self, slot: WorkerSlot, cause: str) -> None:
        if slot.over_memory:
            cause = f"it grew beyond reward.worker_memory_mb = {self._limits.memory_bytes >> 20}"
        slot.doomed = True
        self._owner.on_lost(slot, cause)
        self.changed.set()
        if not slot.loaded:
            self._failed_to_start(slot, f"a worker ended while loading its rewards: {slot.trouble or cause}")
        if not self._closed:
            task = asyncio.create_task(self._restart(slot))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    def _failed_to_start(self, slot: WorkerSlot, why: str) -> None:
        slot.failed_starts += 1
        if not self._closed and (not self._started or slot.failed_starts >= MAX_FAILED_STARTS):
            self._owner.on_hopeless(why)

    async def _restart(self, slot: WorkerSlot) -> None:
        while not self._closed:
            if slot.failed_starts:
                await asyncio.sleep(pause_s(slot.failed_starts, self._rng, first_s=FIRST_PAUSE_S))
            try:
                self.slots[self.slots.index(slot)] = self._start(slot.failed_starts)
                return
            except OSError as error:
                self._failed_to_start(slot, f"a worker process cannot be started: {error}")

    # --- renewal -------------------------------------------------------------------------------------

    def end_if_done(self, slot: WorkerSlot) -> None:
        """End the process of a slot that is to leave and has nothing left to do."""
        if slot.leaving and not slot.inflight and not slot.doomed:
            slot.kill()

    def _renew_used_up(self) -> None:
        """Begin to renew a worker that has grown too much."""
        limit_bytes = self._limits.memory_bytes
        for slot in self.slots if limit_bytes else ():
            soft_bytes = slot.loaded_bytes + SOFT_SHARE * max(0, limit_bytes - slot.loaded_bytes)
            if slot.ready and slot.process.memory_bytes() > soft_bytes:
                metrics.RENEWED.inc()
                log.info("worker is renewed", pid=slot.process.pid)
                slot.leaving = True
                self.end_if_done(slot)
                return
