"""How many episodes to claim: a pure function of what is held and how fast calls go."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
class ClaimLoad:
    """What the service holds of one reward, and what it has learnt of it so far."""

    workers: int
    """Episodes that are worked on at once: under scope `group` a worker has a whole group."""
    call_s: float
    """Recent mean duration of a call."""
    calls_done: int
    """Episodes of the calls that ended."""
    pending: int
    """Episodes of this reward."""
    pending_bytes: int
    """Of all rewards together."""
    deadline_s: float
    """Of the last claim; infinite before the first."""


def episodes_to_claim(loads: Sequence[ClaimLoad]) -> int:
    """At most `MAX_CLAIM`, 0 when enough is held.

    Which reward an episode is for is known only once it is claimed. So as much is claimed as the reward wants
    that has least to do, until one has all that it can be given: a slow reward does not starve a quick one,
    unless nearly all episodes are for the slow one.

    It starts small and grows with the calls done, since nothing is known of a reward's speed before: an
    episode claimed too early is one that another scorer cannot take, and whose claim may run out."""
    if any(load.pending >= _most(load) for load in loads):
        return 0
    room = max(_wanted(load) - load.pending for load in loads)
    pending, pending_bytes = sum(load.pending for load in loads), max(load.pending_bytes for load in loads)
    room = min(room, max(MAX_PENDING, 2 * max(load.workers for load in loads)) - pending)
    if pending:
        mean_bytes = max(1, pending_bytes // pending)
        room = min(room, (MAX_PENDING_BYTES - pending_bytes) // mean_bytes)
    return max(0, min(room, MAX_CLAIM))


def _wanted(load: ClaimLoad) -> int:
    """Episodes that keep the workers of a reward busy."""
    hold_s = min(HOLD_S, load.deadline_s * DEADLINE_SHARE)
    by_experience = 4 * load.workers + 2 * load.calls_done
    return max(2 * load.workers, min(_within(load, hold_s), by_experience, MAX_PENDING))


def _most(load: ClaimLoad) -> int:
    """Episodes of a reward that end well before their claims do, and those it may always be given."""
    if math.isinf(load.deadline_s):
        return max(_wanted(load), MAX_PENDING)
    return max(_wanted(load), 4 * load.workers, _within(load, load.deadline_s * 2 * DEADLINE_SHARE))


def _within(load: ClaimLoad, seconds: float) -> int:
    """Episodes that its workers score in that time."""
    return int(min(load.workers * seconds / max(load.call_s, 1e-6), 1e9))
