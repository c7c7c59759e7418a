"""A simulated clock, and the cores that computing parts share."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

Event = Callable[[], object]


class Clock:
    """A simulated clock: a queue of future events, in order. Up to `cores` pieces of work can run at full
    speed at once. More pieces slow each other down evenly, as under an operating system's scheduler. Times
    are milliseconds."""

    def __init__(self, cores: float = math.inf) -> None:
        self.now_ms = 0.0
        self.events = 0  # Number of past events
        self._cores = cores
        self._order = itertools.count()
        self._waits: list[tuple[float, int, Event]] = []  # Sorted by their time
        self._works: list[tuple[float, int, Event]] = []  # Sorted by the work that a core has done by then
        self._demand = 0  # Number of running pieces of work
        self._rate = 1.0
        self._at_ms = 0.0  # Time of the last change of the rate
        self._at_work_ms = 0.0  # Work until then

    @property
    def work_ms(self) -> float:
        """Work that one piece of work would have done by now if it had run since time 0 without a break."""
        return self._at_work_ms + (self.now_ms - self._at_ms) * self._rate

    def after(self, delay_ms: float, event: Event) -> None:
        """Schedule `event` after `delay_ms`, independent of all computation."""
        heapq.heappush(self._waits, (self.now_ms + delay_ms, next(self._order), event))

    def compute(self, ms: float, event: Event) -> None:
        """Schedule `event` after `ms` of work on one core."""

        def done() -> None:
            self.demand(-1)
            event()

        self.demand(1)
        self.when_worked(self.work_ms + ms, done)

    def when_worked(self, work_ms: float, event: Event) -> None:
        """Schedule `event` for the moment when `work_ms` reaches this value."""
        heapq.heappush(self._works, (work_ms, next(self._order), event))

    def demand(self, change: int) -> None:
        """Change the number of running pieces of work, from now on."""
        self._at_ms, self._at_work_ms = self.now_ms, self.work_ms
        self._demand += change
        self._rate = min(1.0, self._cores / self._demand) if self._demand else 1.0

    def tick(self) -> bool:
        """Run the next event. Return False if there is none."""
        if self._works:
            due_ms = self._at_ms + (self._works[0][0] - self._at_work_ms) / self._rate
            if not self._waits or due_ms <= self._waits[0][0]:
                _, _, event = heapq.heappop(self._works)
                self._happen(due_ms, event)
                return True
        if not self._waits:
            return False
        due_ms, _, event = heapq.heappop(self._waits)
        self._happen(due_ms, event)
        return True

    def _happen(self, due_ms: float, event: Event) -> None:
        self.now_ms = max(self.now_ms, due_ms)
        self.events += 1
        event()
