"""The place of one worker process in a pool, and what the pool knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from reward_service.dispatch import Progress
from reward_service.imports import Import
from reward_service.process import WorkerProcess
from reward_service.programs import Program, Version
from reward_service.queues import Entry, Queue


@dataclass(slots=True)
class Running:
    """One invocation that a worker has: of one call, or of several of a reward that takes many at a time."""

    queue: Queue
    entries: list[Entry]
    size_bytes: int
    charged_s: float
    """What its queue was charged for it beforehand."""

    @property
    def timeout_s(self) -> float:
        return self.queue.program.spec.timeout_s

    @property
    def suspect(self) -> bool:
        return self.entries[0].suspect


@dataclass(slots=True, eq=False)
class Slot:
    """After a death another process takes the place."""

    process: WorkerProcess | None = None
    loaded: bool = False
    """The process has loaded every program that it was started with."""
    loading: set[int] = field(default_factory=set)
    """Programs that it was told to load and has said nothing about yet."""
    programs: set[int] = field(default_factory=set)
    """Those that it has loaded."""
    doomed: bool = False
    """The process is being killed."""
    leaving: Literal["", "restart", "end"] = ""
    """It gets nothing more; once it has nothing left, another process takes its place (`restart`), or the
    place goes (`end`)."""
    replaces: Slot | None = None
    """The slot that leaves for this one once this one has loaded."""
    trial: tuple[Program, Version] | None = None
    """The version of a program that this slot tries."""
    imports: list[Import] = field(default_factory=list)
    """What that version was found to import."""
    inflight: dict[int, Running] = field(default_factory=dict)
    inflight_bytes: int = 0
    expected_s: float = 0.0
    """How long what it has is expected to take."""
    last_number: int = 0
    progress: Progress = field(default_factory=Progress)
    overdue: int | None = None
    """The unit that the process was killed for; -1 when it began none."""
    over_memory: bool = False
    """It was killed for its memory."""
    load_again: bool = False
    """It was killed because a program that was loaded before was not, which may pass."""
    failed_loads: int = 0
    """Such failures in a row, the first at `failing_since_s`."""
    failing_since_s: float = 0.0
    failed_starts: int = 0
    started_s: float = 0.0
    loaded_bytes: int = 0
    """Its memory when it had loaded."""
    units_done: int = 0

    @property
    def ready(self) -> bool:
        return self.loaded and not (
            self.doomed or self.leaving or self.loading or self.replaces or self.trial
        )

    @property
    def taken(self) -> bool:
        """It runs something that must have the worker for itself; it has nothing else then."""
        return len(self.inflight) == 1 and next(iter(self.inflight.values())).suspect

    def add(self, number: int, running: Running) -> None:
        self.inflight[number] = running
        self.inflight_bytes += running.size_bytes
        self.expected_s += running.charged_s
        self.last_number = number

    def remove(self, number: int) -> Running | None:
        running = self.inflight.pop(number, None)
        if running is not None:
            self.inflight_bytes -= running.size_bytes
            self.expected_s = self.expected_s - running.charged_s if self.inflight else 0.0
        return running

    def kill(self) -> None:
        self.doomed = True
        if self.process is not None:
            self.process.kill()
