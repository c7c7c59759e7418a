"""What waits for a worker, and whose turn it is.

Jobs share the time of the workers, not their number of calls: the turn goes to the job that has used the
least, and within it to the reward that has. A job that was away does not come back with a claim to all the
time it did not use.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from reward_service.backends import OnVerdicts
from reward_service.dispatch import Pace
from reward_service.programs import Program

MAX_QUEUED = 8192
"""Calls of one job that wait."""


class Entry:
    """One call on its way to its verdicts."""

    __slots__ = ("index", "on_verdicts", "payloads", "queue", "single", "size_bytes", "suspect")

    def __init__(self, queue: Queue, index: int, payloads: list[bytes], on_verdicts: OnVerdicts) -> None:
        self.queue = queue
        self.index = index
        self.payloads = payloads
        self.size_bytes = sum(map(len, payloads))
        self.on_verdicts = on_verdicts
        self.single = False
        """It failed together with others: it runs in an invocation of its own."""
        self.suspect = False
        """It lost a worker whose death nobody could be blamed for: it runs alone on its worker."""


class Turn:
    """Time that somebody has used, on a clock that stands still for those who are away."""

    __slots__ = ("used_s",)

    def __init__(self) -> None:
        self.used_s = 0.0


T = TypeVar("T", bound=Turn)


class Queue(Turn):
    """The waiting calls of one reward for one job."""

    __slots__ = ("gone", "job", "pace", "program", "waiting")

    def __init__(self, job: JobQueue, program: Program) -> None:
        super().__init__()
        self.job = job
        self.program = program
        self.pace = Pace()
        self.gone = False
        """Its job is."""
        self.waiting: deque[Entry] = deque()

    def charge(self, spent_s: float) -> None:
        """Time of a worker, of the job and this reward of it."""
        self.used_s += spent_s
        self.job.used_s += spent_s


class JobQueue(Turn):
    """The queues of one job."""

    __slots__ = ("clock_s", "length", "queues", "room")

    def __init__(self) -> None:
        super().__init__()
        self.queues: dict[int, Queue] = {}
        self.length = 0
        self.clock_s = 0.0
        self.room = asyncio.Event()


class Queues:
    """All that waits, by job and reward."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobQueue] = {}
        self._clock_s = 0.0
        self.length = 0

    def of(self, job: str, program: Program) -> Queue:
        owner = self._jobs.get(job)
        if owner is None:
            owner = self._jobs[job] = JobQueue()
        queue = owner.queues.get(program.number)
        if queue is None:
            queue = owner.queues[program.number] = Queue(owner, program)
        return queue

    def push(self, entry: Entry, *, front: bool = False) -> None:
        queue, job = entry.queue, entry.queue.job
        if not job.length:
            job.used_s = max(job.used_s, self._clock_s)
        if not queue.waiting:
            queue.used_s = max(queue.used_s, job.clock_s)
        if front:
            queue.waiting.appendleft(entry)
        else:
            queue.waiting.append(entry)
        job.length += 1
        self.length += 1

    def next(self) -> Queue | None:
        """The queue whose turn it is; none when nothing waits."""
        if not self.length:
            return None
        job = _least(job for job in self._jobs.values() if job.length)
        queue = _least(queue for queue in job.queues.values() if queue.waiting)
        self._clock_s = max(self._clock_s, job.used_s)
        job.clock_s = max(job.clock_s, queue.used_s)
        return queue

    def pop(self, queue: Queue) -> Entry:
        entry = queue.waiting.popleft()
        queue.job.length -= 1
        self.length -= 1
        if queue.job.length < MAX_QUEUED:
            queue.job.room.set()
        return entry

    def drain(self, program: Program | None = None) -> list[Entry]:
        """Take out everything, or everything of one program, and let those who wait for room go on."""
        taken = []
        for job in self._jobs.values():
            for queue in job.queues.values():
                if program is None or queue.program is program:
                    taken += [self.pop(queue) for _ in range(len(queue.waiting))]
            job.room.set()
        return taken

    def forget(self, job: str, program: Program) -> list[Entry]:
        """The job does not use the program any more; what waited of it."""
        owner = self._jobs.get(job)
        queue = None if owner is None else owner.queues.pop(program.number, None)
        if owner is None or queue is None:
            return []
        queue.gone = True
        waiting = [self.pop(queue) for _ in range(len(queue.waiting))]
        if not owner.queues:
            del self._jobs[job]
        return waiting


def _least(turns: Iterable[T]) -> T:
    return min(turns, key=lambda turn: turn.used_s)
