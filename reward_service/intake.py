"""How many episodes to claim: a pure function of what is held and how fast calls go."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PENDING = 1024
"""Episodes held at once, whatever their speed."""
MAX_PENDING_BYTES = 64 << 20
MAX_CLAIM = 256
"""Episodes in one claim."""
HOLD_S = 1.0
"""Work held at once, in seconds of all workers: enough that none waits for a claim."""
DEADLINE_SHARE = 0.25
"""Work held is at most this share of a claim's deadline, so that claims do not expire in our queue."""


@dataclass(frozen=True)
class Load:
    """What the service holds, and what it has learnt so far."""

    workers: int
    call_s: float
    """Recent mean duration of a call."""
    calls_done: int
    pending: int
    pending_bytes: int
    deadline_s: float
    """Of the last claim; infinite before the first."""


def episodes_to_claim(load: Load) -> int:
    """At most `MAX_CLAIM`, 0 when enough is held.

    It starts small and grows with the calls done, since nothing is known of a reward's speed before: an
    episode claimed too early is one that another scorer cannot take, and whose claim may run out."""
    hold_s = min(HOLD_S, load.deadline_s * DEADLINE_SHARE)
    by_speed = int(load.workers * hold_s / max(load.call_s, 1e-6))
    by_experience = 4 * load.workers + 2 * load.calls_done
    wanted = max(2 * load.workers, min(by_speed, by_experience, MAX_PENDING))
    room = wanted - load.pending
    if load.pending:
        mean_bytes = max(1, load.pending_bytes // load.pending)
        room = min(room, (MAX_PENDING_BYTES - load.pending_bytes) // mean_bytes)
    return max(0, min(room, MAX_CLAIM))
