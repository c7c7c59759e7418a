"""Which of several servers gets the next request. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """One server as the choice sees it."""

    room: bool
    """Whether it may get a request now."""
    in_flight: int
    """Requests of ours that it works on."""
    slots: int
    """Requests of ours that it may have."""
    busy: float = 0.0
    """Share of it that others keep busy, as it last said; 0 where it says nothing."""
    seconds: float = 0.0
    """What an input has taken there of late."""

    @property
    def share(self) -> float:
        """How full it would be with one request more: what the least is wanted of."""
        return (self.in_flight + 1) / max(1, self.slots) + self.busy


def choose(loads: Sequence[Load], rng: random.Random) -> int | None:
    """Index of the least loaded server with room; of equally loaded ones the quicker, then by chance. None
    where none has room."""
    free = [at for at, load in enumerate(loads) if load.room and load.in_flight < load.slots]
    return min(free, key=lambda at: (loads[at].share, loads[at].seconds, rng.random()), default=None)
