"""A warm pool of scoring processes of our own, for one reward or many, of one job or many.

Promises: every call submitted gets its verdicts exactly once, in bounded time once a worker is free for it; a
call that runs past the deadline of its reward is ended by killing its worker's process group, and only that
call is a `Timeout`; a worker's death is a `Failure` of the call it was running, and the calls that waited
behind it run elsewhere; closing the pool leaves no process of its workers' groups. Jobs share the time of the
workers in equal parts. At most `MAX_QUEUED` calls of a job wait.

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

from areal_async.rpc.verdicts import Failure, Timeout, Verdict
from areal_async.runtime.log import get_logger
from reward_service.backends import Call, OnVerdicts
from reward_service.channel import Assignment, Finished
from reward_service.crew import START_LIMIT_S, Crew, Hooks, Limits
from reward_service.dispatch import RECALL_AFTER_S, STUCK_GRACE_S, State, has_room, next_action
from reward_service.handout import hand_out
from reward_service.programs import Program
from reward_service.queues import MAX_QUEUED, Entry, Queues
from reward_service.sdk import RewardLoadError
from reward_service.slot import Running, Slot
from reward_service.spec import RewardSpec

log = get_logger("pool")

TICK_S = 0.05
"""How often running calls are looked at: a deadline is enforced at most so much late."""
CLOSE_LIMIT_S = 2.0


class Pool:
    """`async with Pool([spec], workers=2) as pool: await pool.submit([given], on_verdicts)`.

    Entering starts every worker and raises `RewardLoadError` when a reward cannot be loaded. With `strict` a
    reward that later can be loaded no longer breaks the pool; else only its own calls fail. All methods
    belong to one event loop."""

    def __init__(
        self, specs: Sequence[RewardSpec], *, workers: int, limits: Limits | None = None, strict: bool = True
    ) -> None:
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """Done when the pool has given up; every call is then a `Failure`."""
        self._specs = list(specs)
        self._workers = workers
        self._limits = limits or Limits()
        self._strict = strict
        self._programs: dict[int, Program] = {}
        self._by_key: dict[str, Program] = {}
        hooks = Hooks(
            ready=lambda slot: self._dispatch(),
            finished=self._finished,
            lost=self._lost,
            unloadable=self._unloadable,
            hopeless=self._break,
        )
        self._crew = Crew(workers, self._programs, self._limits, hooks)
        self._queues = Queues()
        self._program_numbers = 0
        self._unit_numbers = itertools.count(1)
        self._call_s = 0.001
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def capacity(self) -> int:
        return self._workers

    @property
    def alive(self) -> int:
        return min(self._crew.alive, self._workers)

    @property
    def busy(self) -> int:
        """Workers that have something to do."""
        return sum(bool(slot.inflight) for slot in self._crew.slots)

    @property
    def queued(self) -> int:
        return self._queues.length

    @property
    def call_seconds(self) -> float:
        """Recent mean duration of a call, of all rewards together, in seconds."""
        return self._call_s

    def call_seconds_of(self, spec: RewardSpec, job: str = "") -> float:
        """Recent mean duration of a call of one reward, in seconds."""
        return self._queues.of(job, self._by_key[spec.key]).pace.call_s

    async def __aenter__(self) -> Self:
        try:
            for spec in self._specs:
                self._program(spec)
            await self._crew.start()
        except TimeoutError:
            names = ", ".join(repr(spec.name) for spec in self._specs)
            self._break(f"the reward {names} did not load within {START_LIMIT_S:.0f} s")
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

    @property
    def jobs(self) -> int:
        """Jobs that have added a reward."""
        return len({job for program in self._programs.values() for job in program.users})

    async def add(self, spec: RewardSpec, *, job: str) -> None:
        """Have the workers load one more reward for `job`; one that is there already gains another user.
        Raises `RewardLoadError`."""
        program = self._by_key.get(spec.key) or self._program(spec)
        program.users.append(job)
        await self._crew.load(program)
        if program.broken:
            message = program.broken
            self.discard(spec, job=job)
            raise RewardLoadError(message)

    def discard(self, spec: RewardSpec, *, job: str) -> None:
        """`job` is gone: its calls that wait are refused. After the last one the reward is forgotten."""
        program = self._by_key[spec.key]
        program.users.remove(job)
        for entry in self._queues.forget(job, program):
            self._refuse(entry)
        if not program.users:
            del self._programs[program.number], self._by_key[spec.key]
            self._crew.forget(program)

    async def submit(
        self,
        calls: Sequence[Call],
        on_verdicts: OnVerdicts,
        *,
        spec: RewardSpec | None = None,
        job: str = "",
    ) -> None:
        """Queue calls of `spec`, or of the only reward; waits while the queue of `job` is full. `on_verdicts`
        is called once for each call, from the event loop, in the order in which the calls end; it must not
        raise."""
        program = self._by_key[(spec or self._specs[0]).key]
        queue = self._queues.of(job, program)
        encode = msgspec.msgpack.Encoder().encode
        for index, call in enumerate(calls):
            inputs = call if isinstance(call, list) else [call]
            try:
                payloads = [encode(given) for given in inputs]
            except (TypeError, ValueError, OverflowError) as error:
                failure = Failure("input", f"the input cannot be sent: {error}")
                on_verdicts(index, [failure] * len(inputs), 0.0)
                continue
            while queue.job.length >= MAX_QUEUED and self._open():
                queue.job.room.clear()
                self._dispatch()
                await queue.job.room.wait()
            entry = Entry(queue, index, payloads, on_verdicts)
            if self._open() and not program.broken:
                self._queues.push(entry)
            else:
                self._refuse(entry)
        self._dispatch()

    async def close(self) -> None:
        """Kill every worker's group, give every call still waiting its verdicts, reap. Safe to repeat."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._crew.stop()
        for slot in self._crew.slots:
            for running in slot.inflight.values():
                for entry in running.entries:
                    self._refuse(entry)
            slot.inflight.clear()
        self._refuse_queued()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._crew.ended()

    # --- what the crew tells -------------------------------------------------------------------------

    def _finished(self, slot: Slot, units: list[Finished]) -> None:
        for done in units:
            running = slot.remove(done.unit)
            if running is None:  # it was recalled and has gone to another worker
                continue
            elapsed_s = done.elapsed_ms / 1000
            self._account(running, elapsed_s)
            entries = running.entries
            if len(entries) == 1:
                entries[0].on_verdicts(entries[0].index, done.verdicts, done.elapsed_ms)
            elif done.raised:
                self._separate(entries)
            else:
                share_ms = done.elapsed_ms / len(entries)
                for entry, verdict in zip(entries, done.verdicts, strict=True):
                    entry.on_verdicts(entry.index, [verdict], share_ms)
        self._dispatch()

    def _lost(self, slot: Slot, cause: str) -> None:
        """Give the call that the dead worker ran its verdicts; send the others round again.

        Where none can be blamed (a reward may spoil the marker itself) each of them goes round alone, and a
        call that loses a worker that had nothing else to do is the one."""
        assert slot.process is not None
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
        for running in reversed(slot.inflight.values()):
            for entry in reversed(running.entries):
                entry.suspect = entry.single = guilty is None
                running.queue.charge(-running.charged_s / len(running.entries))
                self._again(entry)
        slot.inflight.clear()
        slot.inflight_bytes, slot.expected_s = 0, 0.0
        self._dispatch()

    def _blame(self, guilty: Running, cause: str, elapsed_s: float, *, late: bool) -> None:
        spec = guilty.queue.program.spec
        log.warning("call lost its process", reward=spec.name, reason="deadline" if late else cause)
        if len(guilty.entries) > 1:
            self._separate(guilty.entries)
            return
        entry = guilty.entries[0]
        limit_ms = round(spec.timeout_s * 1000)
        verdict: Verdict = Timeout(limit_ms) if late else Failure("process_died", cause)
        entry.on_verdicts(entry.index, [verdict] * len(entry.payloads), elapsed_s * 1000)

    def _unloadable(self, program: Program, message: str) -> None:
        program.broken = message
        if self._strict:
            self._break(message)
        for entry in self._queues.drain(program):
            self._refuse(entry)

    def _break(self, message: str) -> None:
        if not self.broken.done():
            self.broken.set_result(RewardLoadError(message))
        self._crew.halt()
        self._refuse_queued()

    # --- calls ---------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand queued calls to workers that have room: few slow calls each, or many quick ones."""
        while self._queues.length:
            ready = [slot for slot in self._crew.slots if slot.ready and not slot.taken]
            if not ready:
                return
            slot = min(ready, key=lambda slot: slot.expected_s)
            if slot.inflight and not has_room(slot.expected_s):
                return
            queue = self._queues.next()
            assert queue is not None
            assert slot.process is not None
            idle = not slot.inflight
            units = hand_out(
                slot, queue, self._queues, workers=len(ready), number=lambda: next(self._unit_numbers)
            )
            if not units:
                return
            if idle:
                slot.progress.moved_s = time.monotonic()
            slot.process.order(Assignment(units))

    def _separate(self, entries: Sequence[Entry]) -> None:
        """One of these, run together, made them all fail: each is run by itself."""
        for entry in reversed(entries):
            entry.single = True
            self._again(entry)

    def _again(self, entry: Entry) -> None:
        """A call that was with a worker is to go to one again, before those that never were."""
        if self._open() and not entry.queue.program.broken and not entry.queue.gone:
            self._queues.push(entry, front=True)
        else:
            self._refuse(entry)

    def _account(self, running: Running, elapsed_s: float) -> None:
        calls = len(running.entries)
        running.queue.charge(elapsed_s - running.charged_s)
        running.queue.pace.note(elapsed_s / calls)
        self._call_s += 0.05 * (elapsed_s / calls - self._call_s)

    async def _look_after(self) -> None:
        """Enforce deadlines and take back the calls behind a slow one."""
        while True:
            shortest_s = min((p.spec.timeout_s for p in self._programs.values()), default=1.0)
            await asyncio.sleep(min(TICK_S, shortest_s / 4))
            now_s = time.monotonic()
            for slot in list(self._crew.slots):
                if slot.process is not None and slot.loaded and not slot.doomed:
                    self._look_at(slot, now_s)
            self._crew.look_after(now_s)

    def _look_at(self, slot: Slot, now_s: float) -> None:
        assert slot.process is not None
        number, began_ns = slot.process.marker.running()
        if slot.progress.saw(number, now_s) or not slot.inflight:
            return
        still_for_s = now_s - slot.progress.moved_s
        running = slot.inflight.get(number)
        limits_s = [running.timeout_s] if running else [unit.timeout_s for unit in slot.inflight.values()]
        state = State(
            running_for_s=max(now_s - began_ns / 1e9, still_for_s) if running else None,
            still_for_s=still_for_s,
            waiting=len(slot.inflight),
        )
        match next_action(state, max(limits_s)):
            case "kill_call":
                slot.overdue = number
                slot.kill()
            case "kill_stuck":
                if not slot.loading:
                    slot.overdue = -1
                    slot.kill()
            case "recall":
                self._recall(slot, number)
            case "nothing" if still_for_s > RECALL_AFTER_S:
                limit = self._limits.memory_bytes
                slot.over_memory = bool(limit) and slot.process.memory_bytes() > limit
                if slot.over_memory:
                    slot.kill()

    def _recall(self, slot: Slot, number: int) -> None:
        """Take back what waits behind a slow call, which has more than the time that it was given."""
        assert slot.process is not None
        slow = slot.inflight[number]
        more_s = max(0.0, RECALL_AFTER_S - slow.charged_s)
        slow.queue.charge(more_s)
        slow.charged_s += more_s
        slot.expected_s += more_s
        slot.process.marker.recall(slot.last_number)
        for other in [other for other in reversed(slot.inflight) if other != number]:
            running = slot.remove(other)
            assert running is not None
            running.queue.charge(-running.charged_s)
            for entry in running.entries:
                self._again(entry)
        self._dispatch()

    # --- programs ------------------------------------------------------------------------------------

    def _program(self, spec: RewardSpec) -> Program:
        self._program_numbers += 1
        program = Program(self._program_numbers, spec)
        self._programs[program.number] = program
        self._by_key[spec.key] = program
        return program

    # --- no more -------------------------------------------------------------------------------------

    def _open(self) -> bool:
        return not self._closed and not self.broken.done()

    def _refuse(self, entry: Entry) -> None:
        failure = Failure("pool", "the pool was closed")
        if self.broken.done():
            failure = Failure("pool", str(self.broken.result()))
        elif entry.queue.program.broken:
            failure = Failure("load", entry.queue.program.broken)
        entry.on_verdicts(entry.index, [failure] * len(entry.payloads), 0.0)

    def _refuse_queued(self) -> None:
        for entry in self._queues.drain():
            self._refuse(entry)
