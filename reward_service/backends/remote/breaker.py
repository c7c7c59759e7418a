"""When a server that fails is left alone, and when it is tried again. Pure: the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half_open"]


@dataclass
class Breaker:
    """A circuit breaker. Closed: requests go through. After `threshold` failures in a row it opens: none do,
    for `open_s`. Then it is half open: one request at a time. A success closes it; a failure opens it for
    twice as long as before, at most `longest_s`."""

    threshold: int = 3
    open_s: float = 1.0
    longest_s: float = 30.0
    failures: int = 0
    """In a row."""
    opened: int = 0
    """Times in a row that it opened."""
    open_until_s: float = 0.0

    def state(self, now_s: float) -> State:
        if not self.opened:
            return "closed"
        return "open" if now_s < self.open_until_s else "half_open"

    def room(self, now_s: float, in_flight: int) -> bool:
        """Whether a request may begin while `in_flight` others are under way."""
        state = self.state(now_s)
        return state == "closed" or (state == "half_open" and in_flight == 0)

    def succeeded(self) -> None:
        self.failures = self.opened = 0

    def failed(self, now_s: float) -> bool:
        """Note a failure; whether the breaker opened by it.

        While it is open further failures are those of requests that had begun before: they tell nothing new.
        """
        self.failures += 1
        state = self.state(now_s)
        if state == "open" or (state == "closed" and self.failures < self.threshold):
            return False
        self.open_until_s = now_s + min(self.longest_s, self.open_s * 2**self.opened)
        self.opened += 1
        return True
