"""The order in which a server begins requests. Requests wait in lanes (bounded queues), and the lanes take
weighted turns. The module is pure.

Promises:
- A lane with waiting requests gets at least the share that its weight gives it, whatever the load of the
  other lanes.
- Requests of one lane begin in the order of arrival.
- A lane holds at most `most_waiting` requests and `most_bytes` of attachments. Further requests are refused.
- At most `most_running` requests of a lane run at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Lane:
    """The limits of one lane. `weight` is its number of turns, relative to other lanes."""

    weight: int = 1
    most_waiting: int = 1 << 16
    most_bytes: int = 1 << 40
    """One request may exceed this limit if no other request of its lane waits."""
    most_running: int = 1 << 16


class Lanes(Generic[T]):
    """The waiting requests, by the name of their lane.

    Of the lanes that may begin a request, the one that is furthest behind its share is next. Among equals,
    the lane with the greater weight is first (smooth weighted round robin).
    """

    def __init__(self, lanes: Mapping[str, Lane], lane_of: Callable[[Any], str] = lambda _: "all") -> None:
        """Create the lanes. `lane_of` returns the name of a request's lane."""
        self.lane_of = lane_of
        self._lanes = dict(sorted(lanes.items(), key=lambda item: -item[1].weight))
        self._waiting: dict[str, deque[tuple[T, int]]] = {name: deque() for name in self._lanes}
        self._bytes = dict.fromkeys(self._lanes, 0)
        self._running = dict.fromkeys(self._lanes, 0)
        self._credit = dict.fromkeys(self._lanes, 0)

    def push(self, lane: str, item: T, size_bytes: int = 0) -> bool:
        """Queue `item`; return False if its lane is full."""
        limits, waiting = self._lanes[lane], self._waiting[lane]
        over = waiting and self._bytes[lane] + size_bytes > limits.most_bytes
        if over or len(waiting) >= limits.most_waiting:
            return False
        waiting.append((item, size_bytes))
        self._bytes[lane] += size_bytes
        return True

    def pop(self) -> tuple[str, T] | None:
        """Return the next request and its lane, or None if no request may begin. The request counts as
        running until `done`."""
        able = [
            name
            for name, limits in self._lanes.items()
            if self._waiting[name] and self._running[name] < limits.most_running
        ]
        if not able:
            return None
        for name in able:
            self._credit[name] += self._lanes[name].weight
        chosen = max(able, key=self._credit.__getitem__)
        self._credit[chosen] -= sum(self._lanes[name].weight for name in able)
        item, size_bytes = self._waiting[chosen].popleft()
        self._bytes[chosen] -= size_bytes
        self._running[chosen] += 1
        if not self._waiting[chosen]:
            self._credit[chosen] = 0  # an idle lane saves up no turns
        return chosen, item

    def done(self, lane: str) -> None:
        """Count the end of a request of `lane`."""
        self._running[lane] -= 1

    def drain(self) -> list[T]:
        """Remove and return all waiting requests."""
        taken = [item for waiting in self._waiting.values() for item, _ in waiting]
        for name, waiting in self._waiting.items():
            waiting.clear()
            self._bytes[name] = 0
        return taken

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))
