"""The exchange of an engine's weights, and the detection of an engine that makes no progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from areal_async.base.log import get_logger
from rollout_service.engines.base import Engine, Weights

log = get_logger("replicas")

WATCH_S = 0.5  # Seconds between two looks at an engine
LONGEST_GAP_S = 5.0
"""Longest time between two checks that counts as lack of progress. A longer gap usually means that the whole
process was suspended."""


@dataclass(frozen=True, slots=True)
class UpdateStall:
    """Seconds of one update during which an engine sampled nothing."""

    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.pause_s + self.load_s + self.resume_s


async def exchange(
    engine: Engine, snapshot: Weights, loaded: Callable[[], None] = lambda: None
) -> UpdateStall:
    """Make `engine` serve `snapshot`. `loaded` is called before any unit of the new weights is sampled.

    If `EngineError` is raised, the engine either still has the old weights or is lost. The engine is resumed
    even if the load fails. An error during that resume is only logged, because it is usually a consequence of
    the first error.
    """
    began_s = paused_s = time.monotonic()
    try:
        await engine.pause()
        paused_s = time.monotonic()
        await engine.load(snapshot)
        loaded()
    except BaseException as first:
        try:
            await engine.resume()
        except Exception as error:  # the first error matters
            log.warning("engine did not resume", error=str(error), after=f"{type(first).__name__}: {first}")
        raise
    loaded_s = time.monotonic()
    await engine.resume()
    return UpdateStall(paused_s - began_s, loaded_s - paused_s, time.monotonic() - loaded_s)


@dataclass
class StallDetector:
    """Detector of an engine that makes no progress. It reports an engine that has had requests for `limit_s`
    without a break, and has neither sampled a token nor finished a request in that time. If two looks are
    more than `LONGEST_GAP_S` apart, the excess does not count. Times are seconds of `clock`. Call `look`
    every `WATCH_S`."""

    limit_s: float
    clock: Callable[[], float] = time.monotonic
    _done: tuple[int, int] | None = None
    _stuck_s: float = 0.0
    _looked_s: float = 0.0

    def look(self, *, tokens: int, requests: int, running: int, paused: bool) -> float | None:
        """Return the seconds without progress once they reach the limit, and None before. `tokens` and
        `requests` count the engine's work so far. Any change of these is progress."""
        now_s, done = self.clock(), (tokens, requests)
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if done != self._done or not running or paused:
            self._done, self._stuck_s = done, 0.0
        else:
            self._stuck_s += min(gap_s, LONGEST_GAP_S)
        return self._stuck_s if self._stuck_s >= self.limit_s else None
