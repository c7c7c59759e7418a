"""How long to wait before another try. Pure: the chance is the caller's."""

from __future__ import annotations

import random

FIRST_S = 0.1
LONGEST_S = 5.0


def pause_s(
    tries: int,
    rng: random.Random,
    *,
    first_s: float = FIRST_S,
    longest_s: float = LONGEST_S,
    asked_s: float = 0,
) -> float:
    """Seconds before the try that follows `tries` failed ones (at least 1).

    Full jitter: uniform between 0 and a bound that doubles, so that clients whose server came back do not
    all ask at once. A server that says after how long to come again (`asked_s`) gets at least that, and up to
    a quarter more."""
    bound_s = min(longest_s, first_s * 2 ** min(tries - 1, 30))
    drawn_s = rng.uniform(0, bound_s)
    return max(drawn_s, asked_s * rng.uniform(1.0, 1.25)) if asked_s > 0 else drawn_s
