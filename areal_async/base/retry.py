"""Pauses between tries, and a loop of tries within a deadline.

The pause doubles after each try. It is shortened at random by up to half, so that the clients of one server
do not all retry at the same time. The caller supplies clock, sleep and random numbers.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

FIRST_REST_S = 0.5
LONGEST_REST_S = 30.0

T = TypeVar("T")


def doubled_s(tries: int, first_s: float = FIRST_REST_S, longest_s: float = LONGEST_REST_S) -> float:
    """Return the longest pause after `tries` failures. It starts at `first_s` and doubles with each
    failure."""
    return min(longest_s, first_s * 2.0 ** min(tries - 1, 30))


def pause_s(
    tries: int, rng: random.Random, *, first_s: float = FIRST_REST_S, longest_s: float = LONGEST_REST_S
) -> float:
    """Return the seconds before the next try after `tries` failed tries (at least 1).

    The pause is random. Its upper bound doubles with each failed try, and its lower bound is half of the
    upper bound.
    """
    return doubled_s(tries, first_s, longest_s) * rng.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Tries:
    """A rule for retrying an unavailable server: the time limit, and the callbacks between attempts.

    `away` is called after each failed try that will be repeated, with its error. `back` is called once if a
    retry succeeds. Any thread may call both.
    """

    limit_s: float
    away: Callable[[Exception], None] = lambda error: None
    back: Callable[[], None] = lambda: None
    longest_pause_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = field(default_factory=random.Random)

    def run(self, work: Callable[[], T], is_passing: Callable[[Exception], bool]) -> T:
        """Return the result of `work`. If `work` fails, repeat it while `is_passing(error)` is true and time
        is left.

        Raises the last error.
        """
        deadline_s = self.clock() + self.limit_s
        for tries in itertools.count(1):
            try:
                done = work()
            except Exception as error:
                pause = pause_s(tries, self.rng, longest_s=self.longest_pause_s)
                if not is_passing(error) or self.clock() + pause > deadline_s:
                    raise
                self.away(error)
                self.sleep(pause)
            else:
                if tries > 1:
                    self.back()
                return done
        raise AssertionError("unreachable")
