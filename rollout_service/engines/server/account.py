"""What goes through a server engine, counted on this side of the wire: calls in flight, units, busy time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from areal_async.runtime.metrics import busy


class Account:
    """Counters never fall. `activity` names the busy time in the metrics."""

    def __init__(self, activity: str) -> None:
        self.in_flight = 0
        self.tokens_total = 0
        self.requests_total = 0
        self._activity = activity
        self._paused = False
        self._computing = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one request. Units are added with `sampled`."""
        self.in_flight += 1
        self._keep_time()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.requests_total += 1
            self._keep_time()

    def sampled(self, n_units: int) -> None:
        self.tokens_total += n_units

    def paused(self, paused: bool) -> None:
        """A paused engine computes nothing, whatever it holds."""
        self._paused = paused
        self._keep_time()

    @property
    def busy_s(self) -> float:
        return busy.seconds(self._activity)

    def close(self) -> None:
        """Nothing is computed any more."""
        if self._computing:
            busy.end(self._activity)
            self._computing = False

    def _keep_time(self) -> None:
        computing = self.in_flight > 0 and not self._paused
        if computing != self._computing:
            (busy.begin if computing else busy.end)(self._activity)
            self._computing = computing
