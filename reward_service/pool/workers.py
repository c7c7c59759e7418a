"""The set of a pool's workers, which starts them, replaces dead ones, and renews those whose memory has
grown.

Promises: a dead process is replaced, with growing pauses while starts fail. Workers are renewed between
calls, one at a time. If a reward was loaded before and then fails to load, loading is tried again before the
pool gives up.
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
    WorkerOrder,
    WorkerReport,
)
from reward_service.pool.queue import Invocation, PooledReward
from reward_service.processes import WorkerProcess

log = get_logger("pool")

MAX_FAILED_STARTS = 4  # consecutive failed starts before the pool gives up
FIRST_PAUSE_S = 0.2
SOFT_SHARE = 0.75
"""Share of the room between a worker's memory after loading and the limit. A worker whose growth exceeds this
share is renewed between calls."""


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker during loading and growth."""

    memory_bytes: int = 0  # the worker is killed above this; 0: no limit
    start_s: float = 60.0
    look_s: float = 0.5


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """One worker and its state. After the worker's death, another worker takes the slot."""

    loading: set[int]
    """Numbers of the rewards that the worker must load and has not reported yet."""
    failed_starts: int = 0
    process: WorkerProcess = field(init=False)
    started_s: float = field(default_factory=time.monotonic)
    loaded: bool = False  # it has loaded every reward of its start
    doomed: bool = False  # it was killed or has ended
    leaving: bool = False  # it gets no more work; once it has none left, another worker replaces it
    running: Invocation | None = None  # its work, until it has reported it
    overdue: bool = False  # it was killed because its work took too long
    over_memory: bool = False
    trouble: str = ""  # reason why it was killed while it loaded a reward
    loaded_bytes: int = 0

    @property
    def ready(self) -> bool:
        return self.loaded and not (self.doomed or self.leaving)

    def order(self, order: WorkerOrder) -> None:
        self.process.send(msgspec.msgpack.encode(order))

    def kill(self) -> None:
        self.doomed = True
        self.process.kill()


class PoolOwner(Protocol):
    """The methods of a pool that `Workers` calls."""

    def dispatch(self) -> None: ...
    def on_finished(self, slot: WorkerSlot, done: FinishedUnit) -> None: ...
    def on_lost(self, slot: WorkerSlot, cause: str) -> None: ...
    def on_hopeless(self, message: str) -> None: ...


class Workers:
    """A set of `count` workers with the pool's rewards loaded. All methods belong to one event loop."""

    def __init__(
        self, count: int, rewards: Mapping[int, PooledReward], limits: WorkerLimits, owner: PoolOwner
    ) -> None:
        self.count = count
        self.slots: list[WorkerSlot] = []
        self.changed = asyncio.Event()  # set whenever a process becomes ready or ends
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
        """Start every worker, and wait until all are ready or one fails. Raises `TimeoutError` after the
        limit."""
        for _ in range(self.count):
            self.slots.append(self._start())
        async with asyncio.timeout(self._limits.start_s):
            while self.alive < self.count and not self._closed:
                self.changed.clear()
                await self.changed.wait()
        self._started = True

    def halt(self) -> None:
        """Stop starting processes."""
        self._closed = True
        self.changed.set()
        for task in list(self._restarts):
            task.cancel()

    def stop(self) -> None:
        """Kill every process and stop starting processes."""
        self.halt()
        for slot in self.slots:
            slot.kill()

    async def ended(self) -> None:
        """Wait until every process has ended."""
        for slot in list(self.slots):
            await slot.process.ended.wait()

    def look_after(self, now_s: float) -> None:
        """End workers that take too long to load, and renew workers whose memory has grown. The pool must
        call this often."""
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
        """Start a process. Raises `OSError`."""
        slot = WorkerSlot(set(self._rewards), failed_starts)
        slot.process = WorkerProcess(partial(self._on_frame, slot), partial(self._on_exit, slot))
        for reward in self._rewards.values():
            slot.order(reward.load_order())
        return slot

    def _on_frame(self, slot: WorkerSlot, payload: bytes) -> None:
        match self._reports.decode(payload):
            case FinishedUnit() as done:
                self._owner.on_finished(slot, done)
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
        for reward in self._rewards.values():
            reward.loaded_once = True
        self.changed.set()
        self._owner.dispatch()

    def _not_loaded(self, slot: WorkerSlot, reward: PooledReward, message: str) -> None:
        if slot.doomed:
            return
        if self._started and reward.loaded_once and slot.failed_starts < MAX_FAILED_STARTS - 1:
            # The error may pass: a file that it imports may be half saved, or memory may be short.
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
        """End a worker that is to be replaced and has no work left."""
        if slot.leaving and slot.running is None and not slot.doomed:
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
