"""The workers of a pool: started, replaced when they die, renewed when they have grown or their code changed.

Promises: a place whose process died is filled again, at growing intervals while that fails; a worker is
renewed between its calls, and only once another is ready for them; a version of a file that does not load is
refused and the one before goes on; a program that was loaded before is tried again before it is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from areal_async.runtime.log import get_logger
from reward_service import metrics
from reward_service.channel import Finished, Finishes, Forget, Loaded, LoadFailed, Report
from reward_service.process import WorkerProcess
from reward_service.programs import Program
from reward_service.slot import Slot

log = get_logger("pool")

START_LIMIT_S = 60.0
"""For a worker to load its rewards."""
RELOAD_LIMIT_S = 60.0
"""How long one that was loaded before is tried again: what it imports may be half saved, or memory short."""
LONGEST_RELOAD_PAUSE_S = 5.0
MAX_FAILED_STARTS = 4
"""Restarts in a row that do not get ready before the pool gives up."""
RENEWAL_PAUSE_S = 10.0
"""After a renewal that failed."""
HOUSEKEEPING_S = 0.5
"""How often files and memory are looked at."""
SOFT_SHARE = 0.75
"""Of the memory limit beyond what loading took: a worker that has grown so far is renewed between calls."""


@dataclass(frozen=True)
class Limits:
    """When a worker is renewed."""

    recycle_calls: int = 0
    """After so many invocations; 0: never for their number."""
    memory_bytes: int = 0
    """Killed beyond this; 0: no limit."""
    reload: bool = True
    """When the file of a reward has changed."""


@dataclass(frozen=True)
class Hooks:
    """What a crew tells its pool."""

    ready: Callable[[Slot], None]
    """A slot can take work."""
    finished: Callable[[Slot, list[Finished]], None]
    lost: Callable[[Slot, str], None]
    """The process is gone, its last reports are in: settle what it had. The cause is in words."""
    unloadable: Callable[[Program, str], None]
    """A program of the pool cannot be loaded."""
    hopeless: Callable[[str], None]
    """No worker can be kept running."""


class Crew:
    """Keeps `workers` places filled. All methods belong to one event loop."""

    def __init__(self, workers: int, programs: Mapping[int, Program], limits: Limits, hooks: Hooks) -> None:
        self.workers = workers
        self.slots = [Slot() for _ in range(workers)]
        self.changed = asyncio.Event()
        """Set whenever a process became ready or ended."""
        self._programs = programs
        self._limits = limits
        self._hooks = hooks
        self._reports = msgspec.msgpack.Decoder(Report)
        self._started = False
        self._closed = False
        self._restarts: set[asyncio.Task[None]] = set()
        self._renew_after_s = 0.0
        self._looked_s = 0.0

    @property
    def alive(self) -> int:
        return sum(slot.ready for slot in self.slots)

    async def start(self) -> None:
        """Start every worker, and wait until all are ready or `hopeless` or `unloadable` was called. Raises
        TimeoutError after `START_LIMIT_S`."""
        for slot in self.slots:
            self._start(slot)
        async with asyncio.timeout(START_LIMIT_S):
            while self.alive < self.workers and not self._closed:
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
            if slot.process is not None:
                await slot.process.ended.wait()

    async def load(self, program: Program) -> None:
        """Have every worker that lacks it load one more program, one worker after the other. Ends early when
        that fails."""
        for slot in list(self.slots):
            if slot.process is None or slot.doomed or program.broken or program.number in slot.programs:
                continue
            if program.number not in slot.loading:
                self._order_load(slot, program)
            while program.number in slot.loading and slot.process is not None and not program.broken:
                self.changed.clear()
                await self.changed.wait()

    def forget(self, program: Program) -> None:
        for slot in self.slots:
            slot.programs.discard(program.number)
            if slot.process is not None:
                slot.process.order(Forget(program.number))

    def rest(self, slot: Slot) -> None:
        """The slot has nothing to do: end its process if it is to leave."""
        if slot.leaving and not slot.inflight and not slot.doomed:
            slot.kill()

    def look_after(self, now_s: float) -> None:
        """Renew what is due; to be called often."""
        for slot in self.slots:
            if slot.process is not None and slot.loaded and slot.process.marker.running()[0] in slot.inflight:
                slot.started_s = (
                    now_s  # what it is to load waits behind that call, which has its own deadline
                )
            late = now_s - slot.started_s > START_LIMIT_S
            if late and slot.process is not None and (not slot.loaded or slot.loading):
                slot.kill()
        if now_s - self._looked_s < HOUSEKEEPING_S or self._closed:
            return
        self._looked_s = now_s
        if now_s < self._renew_after_s or any(slot.replaces or slot.trial for slot in self.slots):
            return
        if not (self._limits.reload and self._try_changed()):
            self._replace_used_up()

    # --- a worker's life -----------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        slot.loaded = slot.doomed = slot.over_memory = slot.load_again = False
        slot.leaving = ""
        slot.overdue = None
        slot.units_done = 0
        slot.loading, slot.programs = set(), set()
        slot.process = WorkerProcess(
            on_frame=lambda payload: self._on_frame(slot, payload),
            on_exit=lambda cause: self._on_exit(slot, cause),
        )
        slot.started_s = time.monotonic()
        for program in self._programs.values():
            if not program.broken or (slot.trial is not None and slot.trial[0] is program):
                self._order_load(slot, program)
        if not slot.loading:
            slot.loaded = True
            self.changed.set()

    def _order_load(self, slot: Slot, program: Program) -> None:
        assert slot.process is not None
        tried = slot.trial[1] if slot.trial is not None and slot.trial[0] is program else None
        slot.loading.add(program.number)
        slot.started_s = time.monotonic()
        slot.process.order(program.load(tried))

    def _on_frame(self, slot: Slot, payload: bytes) -> None:
        report = self._reports.decode(payload)
        match report:
            case Finishes(units):
                slot.progress.moved_s = time.monotonic()
                slot.units_done += len(units)
                self._hooks.finished(slot, units)
                self.rest(slot)
            case Loaded(number, batch, imports):
                slot.loading.discard(number)
                if (program := self._programs.get(number)) is not None:
                    slot.programs.add(number)
                    program.batch = batch
                    if slot.trial is None:
                        program.loaded(imports)
                    elif slot.trial[0] is program:
                        slot.imports = imports
                self._loaded(slot)
            case LoadFailed(number, message):
                self._load_failed(slot, number, message)

    def _loaded(self, slot: Slot) -> None:
        if slot.loading or slot.load_again:
            return
        if not slot.loaded:
            slot.loaded = True
            slot.failed_starts = 0
            slot.progress.moved_s = time.monotonic()
            slot.loaded_bytes = slot.process.memory_bytes() if slot.process is not None else 0
            if 0 < self._limits.memory_bytes < slot.loaded_bytes:
                self._too_large(slot)
                return
        slot.failed_loads = 0
        for number in slot.programs:
            self._programs[number].loaded_once = True
        if slot.trial is not None:
            self._accept(slot)
        elif slot.replaces is not None:
            self._leave(slot.replaces, "end")
            slot.replaces = None
        self.changed.set()
        self._hooks.ready(slot)

    def _too_large(self, slot: Slot) -> None:
        message = (
            f"once loaded it takes {slot.loaded_bytes >> 20} MiB, and reward.worker_memory_mb is "
            f"{self._limits.memory_bytes >> 20}. Raise that, or load less."
        )
        slot.loaded = False
        for program in [self._programs[number] for number in slot.programs]:
            self._load_failed(slot, program.number, f"the reward {program.spec.name!r}: {message}")

    def _load_failed(self, slot: Slot, number: int, message: str) -> None:
        slot.loading.discard(number)
        program = self._programs.get(number)
        if program is None:
            return
        if slot.trial is not None:
            if slot.trial[0] is program:
                self._refuse(slot, message)
            else:
                slot.kill()
        elif slot.replaces is not None:
            slot.kill()
        elif self._to_try_again(slot, program):
            log.warning("a reward was not loaded and is tried again", reward=program.spec.name, cause=message)
        else:
            self._hooks.unloadable(program, message)
            if not self._closed:
                self._loaded(slot)
        self.changed.set()

    def _to_try_again(self, slot: Slot, program: Program) -> bool:
        """Whether the failure may pass; the slot's process is then killed, and another started."""
        if slot.load_again:
            return True
        if not (self._started and program.loaded_once) or self._closed:
            return False
        now_s = time.monotonic()
        slot.failed_loads += 1
        if slot.failed_loads == 1:
            slot.failing_since_s = now_s
        slot.load_again = now_s - slot.failing_since_s < RELOAD_LIMIT_S
        if slot.load_again:
            slot.kill()
        return slot.load_again

    def _on_exit(self, slot: Slot, cause: str) -> None:
        assert slot.process is not None
        if slot.over_memory:
            cause = f"it grew beyond reward.worker_memory_mb = {self._limits.memory_bytes >> 20}"
        slot.doomed = True
        self._hooks.lost(slot, cause)
        slot.process.close()
        slot.process = None
        self.changed.set()
        if slot.leaving == "end" or slot.replaces is not None or slot.trial is not None:
            self.slots.remove(slot)
            if slot.trial is not None:
                self._refuse(slot, f"its process ended while loading it: {cause}")
            elif slot.replaces is not None and not self._closed:
                self._renew_after_s = time.monotonic() + RENEWAL_PAUSE_S
                log.warning("worker could not be renewed", cause=cause)
            return
        if not slot.loaded and not slot.load_again:
            self._failed_to_start(slot, f"a worker ended while loading its rewards: {cause}")
        if not self._closed:
            task = asyncio.create_task(self._restart(slot))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    def _failed_to_start(self, slot: Slot, why: str) -> None:
        slot.failed_starts += 1
        if not self._closed and (not self._started or slot.failed_starts >= MAX_FAILED_STARTS):
            self._hooks.hopeless(why)

    async def _restart(self, slot: Slot) -> None:
        while not self._closed:
            if slot.failed_starts:
                await asyncio.sleep(0.1 * 2**slot.failed_starts)
            elif slot.load_again:
                await asyncio.sleep(min(0.1 * 2**slot.failed_loads, LONGEST_RELOAD_PAUSE_S))
            if slot.leaving == "end":  # its place went meanwhile
                self.slots.remove(slot)
                return
            try:
                self._start(slot)
                return
            except OSError as error:
                self._failed_to_start(slot, f"a worker process cannot be started: {error}")

    # --- renewal -------------------------------------------------------------------------------------

    def _leave(self, slot: Slot, how: str) -> None:
        slot.leaving = "end" if how == "end" else "restart"
        self.rest(slot)

    def _try_changed(self) -> bool:
        """Begin to try the new version of a file, if there is one."""
        for program in self._programs.values():
            version = program.changed()
            if version is None:
                continue
            log.info("reward file changed", reward=program.spec.name)
            return self._begin(Slot(trial=(program, version)))
        return False

    def _accept(self, slot: Slot) -> None:
        """The version loads: from now on nothing is begun under the one before."""
        assert slot.trial is not None
        program, version = slot.trial
        program.take(version, slot.imports)
        slot.trial = None
        older = [other for other in self.slots if other is not slot and not other.leaving]
        for place, other in enumerate(older):
            # The slot that tried it takes one place; the others are filled again.
            self._leave(other, "end" if place == 0 else "restart")
        metrics.reloaded(program.spec, "taken")
        log.info("reward reloaded", reward=program.spec.name)

    def _refuse(self, slot: Slot, message: str) -> None:
        assert slot.trial is not None
        program, version = slot.trial
        if not program.refuse(version):
            return
        slot.kill()
        metrics.reloaded(program.spec, "refused")
        log.warning(
            "the new version of a reward's file cannot be loaded; the one before goes on",
            reward=program.spec.name,
            message=message,
        )

    def _replace_used_up(self) -> bool:
        """Begin to replace a worker that has run enough calls or has grown too much."""
        limits = self._limits
        for slot in self.slots:
            if not slot.ready or slot.process is None:
                continue
            calls = bool(limits.recycle_calls) and slot.units_done >= limits.recycle_calls
            grown = bool(limits.memory_bytes) and slot.process.memory_bytes() > self._soft_bytes(slot)
            if calls or grown:
                metrics.RENEWED.labels("calls" if calls else "memory").inc()
                log.info("worker is renewed", pid=slot.process.pid, calls=slot.units_done, grown=grown)
                return self._begin(Slot(replaces=slot))
        return False

    def _soft_bytes(self, slot: Slot) -> float:
        return slot.loaded_bytes + SOFT_SHARE * max(0, self._limits.memory_bytes - slot.loaded_bytes)

    def _begin(self, slot: Slot) -> bool:
        self.slots.append(slot)
        try:
            self._start(slot)
        except OSError as error:
            with contextlib.suppress(ValueError):
                self.slots.remove(slot)
            self._renew_after_s = time.monotonic() + RENEWAL_PAUSE_S
            log.warning("worker could not be renewed", cause=str(error))
            return False
        return True
