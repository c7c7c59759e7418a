"""Redis TIME between two looks at it."""

from __future__ import annotations

import time
from collections.abc import Callable


class RedisClock:
    """Milliseconds of Redis TIME, carried on by the local monotonic clock; never runs backwards.

    Every reply that names Redis's time bounds the difference between the two clocks: the reading was taken
    after the request was sent and before its reply came. A difference within the bounds is kept, so the clock
    does not jitter with the delay of replies."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset_ms: float | None = None
        self._last_ms = 0

    def local_ms(self) -> float:
        return self._monotonic() * 1000

    def observe(self, redis_ms: int, sent_ms: float, received_ms: float) -> None:
        """Redis said `redis_ms` to a request sent and answered at these local times."""
        low, high = redis_ms - received_ms, redis_ms + 1 - sent_ms
        if self._offset_ms is None:
            self._offset_ms = (low + high) / 2
        else:
            self._offset_ms = min(max(self._offset_ms, low), high)

    def now_ms(self) -> int:
        if self._offset_ms is None:
            raise RuntimeError("Redis has not been asked for its time yet")
        self._last_ms = max(self._last_ms, int(self.local_ms() + self._offset_ms))
        return self._last_ms
