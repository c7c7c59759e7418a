"""What one service has done, by its figures over time: rates over the last seconds, busy shares. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Figures = Mapping[str, Mapping[str, float]]
"""A service's series: name → the values of its labels, joined by commas → value."""
BUSY = "areal_busy_seconds_total"
RATE_WINDOW_S = 10.0
"""Rates and shares are over the last so many seconds."""
IDLE_ACTIVITIES = frozenset({"wait", "idle"})


def total(figures: Figures, name: str) -> float:
    """The sum of a series over its labels; 0 for one that is not there."""
    return sum(figures.get(name, {}).values())


@dataclass
class RateTracker:
    """Figures of one service over the rate window, and what it did from the first to the last finished step.

    The counters of a process that was started again begin at 0: what the dead one had is in `earlier`."""

    recent: deque[tuple[float, Figures]] = field(default_factory=lambda: deque(maxlen=64))
    steps_done: int = 0
    first_step: tuple[float, Figures] | None = None
    last_step: tuple[float, Figures] | None = None
    earlier: list[Spent] = field(default_factory=list)

    def add(self, now_s: float, figures: Figures, steps_done: int) -> None:
        self.recent.append((now_s, figures))
        while len(self.recent) > 2 and now_s - self.recent[1][0] >= RATE_WINDOW_S:
            self.recent.popleft()
        if steps_done > self.steps_done:
            self.steps_done, self.last_step = steps_done, (now_s, figures)
            self.first_step = self.first_step or self.last_step

    def start_again(self) -> None:
        """The process is a new one."""
        self.recent.clear()
        if self.first_step and self.last_step:
            self.earlier = [Spent.sum([*self.earlier, Spent.between(self.first_step, self.last_step)])]
        self.first_step = self.last_step = None

    @property
    def last(self) -> Figures:
        return self.recent[-1][1] if self.recent else {}

    def rate(self, name: str) -> float | None:
        """Growth of a counter per second over the window."""
        if len(self.recent) < 2:
            return None
        (first_s, first), (last_s, last) = self.recent[0], self.recent[-1]
        if name not in last or last_s <= first_s:
            return None
        return max(0.0, total(last, name) - total(first, name)) / (last_s - first_s)

    def busy(self) -> float | None:
        """Share of the window in the busiest activity."""
        return Spent.between(self.recent[0], self.recent[-1]).share if self.recent else None

    def busy_while_training(self) -> float | None:
        """The same from the first to the last finished step, without the times in which it did not live."""
        lives = self.earlier[:]
        if self.first_step and self.last_step:
            lives.append(Spent.between(self.first_step, self.last_step))
        return Spent.sum(lives).share


@dataclass(frozen=True)
class Spent:
    """Seconds by activity, of `elapsed_s`."""

    elapsed_s: float
    seconds: Mapping[str, float]

    @classmethod
    def between(cls, first: tuple[float, Figures], last: tuple[float, Figures]) -> Spent:
        before, after = first[1].get(BUSY, {}), last[1].get(BUSY, {})
        return cls(last[0] - first[0], {what: sum_s - before.get(what, 0.0) for what, sum_s in after.items()})

    @classmethod
    def sum(cls, parts: Sequence[Spent]) -> Spent:
        whats = {what for part in parts for what in part.seconds}
        seconds = {what: sum(part.seconds.get(what, 0.0) for part in parts) for what in whats}
        return cls(sum(part.elapsed_s for part in parts), seconds)

    @property
    def share(self) -> float | None:
        """Of the activity that took most of it; None where there was none, or no time."""
        spent = [seconds for what, seconds in self.seconds.items() if what not in IDLE_ACTIVITIES]
        return min(1.0, max(0.0, max(spent)) / self.elapsed_s) if spent and self.elapsed_s > 0 else None
