"""So much a minute: sliding windows, exact and without a clock of their own. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

MINUTE_S = 60.0
CANDIDATES = 64
ROUNDING = 1e-6
"""Amounts are counts: a difference below this is that of floating-point sums."""


@dataclass
class RateEntry:
    amount: float
    until_s: float
    counted: bool = True
    """Until it is older than the window."""


class Window:
    """No `window_s` seconds hold more than `limit`, whatever the pattern of requests.

    An amount above the limit goes alone, and takes as many windows as it would fill."""

    def __init__(self, limit: float, window_s: float = MINUTE_S) -> None:
        self.limit = limit
        self.window_s = window_s
        self._entries: deque[RateEntry] = deque()
        self._sum = 0.0

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """How long until `amount` fits; 0 when it fits now."""
        self._forget(now_s)
        over = self._sum + min(amount, self.limit) - self.limit
        wait_s = 0.0
        for entry in self._entries:
            if over <= ROUNDING:
                break
            over -= entry.amount
            wait_s = entry.until_s - now_s
        return wait_s

    def add(self, now_s: float, amount: float = 1.0) -> RateEntry:
        """Count `amount`, which fits; the entry is for `settle`."""
        entry = RateEntry(amount, now_s + self.window_s * max(1, math.ceil(amount / self.limit)))
        self._entries.append(entry)
        self._sum += amount
        return entry

    def settle(self, entry: RateEntry, amount: float) -> None:
        """Replace an estimate by what it turned out to be. What is above the estimate delays the next."""
        if entry.counted:
            self._sum += amount - entry.amount
            entry.amount = amount

    def _forget(self, now_s: float) -> None:
        while self._entries and self._entries[0].until_s <= now_s:
            oldest = self._entries.popleft()
            oldest.counted = False
            self._sum -= oldest.amount
        if not self._entries:
            self._sum = 0.0  # and with it what rounding left


def spread(per_minute: int, smallest: int, patience_s: float) -> Window:
    """A window that keeps `per_minute` and lets nobody wait for more than `patience_s` behind a burst.

    A k-th of the limit in each k-th of a minute: k windows make a minute, so a minute holds no more than the
    limit. Of the k that `patience_s` allows and that leave room for `smallest` in a window, the one that
    loses least by rounding down."""
    least, most = math.ceil(MINUTE_S / patience_s), per_minute // max(1, smallest)
    candidates = range(least, min(most, least + CANDIDATES) + 1) or [max(1, most)]
    k = max(candidates, key=lambda k: (per_minute // k * k, -k))
    return Window(per_minute // k, MINUTE_S / k)


class Budget:
    """Requests and tokens together; None: without limit."""

    def __init__(self, requests: Window | None, tokens: Window | None) -> None:
        self.requests = requests
        self.tokens = tokens

    def wait_s(self, now_s: float, tokens: float) -> float:
        """How long until one more request of about `tokens` fits."""
        wait_s = self.requests.wait_s(now_s) if self.requests else 0.0
        return max(wait_s, self.tokens.wait_s(now_s, tokens) if self.tokens else 0.0)

    def add(self, now_s: float, tokens: float) -> RateEntry | None:
        if self.requests:
            self.requests.add(now_s)
        return self.tokens.add(now_s, tokens) if self.tokens else None

    def settle(self, entry: RateEntry | None, tokens: float) -> None:
        if self.tokens and entry is not None:
            self.tokens.settle(entry, tokens)

    def requests_per_s(self, tokens: float) -> float:
        """How many requests of `tokens` each begin in a second in the long run."""
        by_requests = self.requests.limit / self.requests.window_s if self.requests else math.inf
        by_tokens = self.tokens.limit / self.tokens.window_s / max(tokens, 1.0) if self.tokens else math.inf
        return min(by_requests, by_tokens)
