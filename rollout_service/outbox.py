"""Finished episodes on their way to the buffer: what goes into one message, and when. Pure.

An episode waits at most `linger_s`, and not at all when it is the last of its lease: a group of short
episodes travels as one message, and a long one does not hold back those that are done. A lease has one
message under way at a time; what finishes meanwhile goes with the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_EPISODES = 256
"""Episodes in one message."""
MAX_BYTES = 8 << 20
"""Bytes in one message; a single larger episode travels alone."""


@dataclass(frozen=True)
class Parcel:
    """One message: codec blobs of a lease, by sample."""

    lease_id: str
    group_id: str
    episodes: dict[int, bytes]


@dataclass
class _Pile:
    group_id: str
    finished: dict[int, bytes] = field(default_factory=dict)
    size_bytes: int = 0
    since_s: float = math.inf
    complete: bool = False
    """Nothing more will come for this lease."""
    under_way: Parcel | None = None


class Outbox:
    """All times are seconds of one monotonic clock."""

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._piles: dict[str, _Pile] = {}

    @property
    def episodes(self) -> int:
        """Finished and not yet acknowledged."""
        return sum(
            len(p.finished) + (len(p.under_way.episodes) if p.under_way else 0) for p in self._piles.values()
        )

    def add(self, lease_id: str, group_id: str, sample: int, blob: bytes, now_s: float) -> None:
        pile = self._piles.setdefault(lease_id, _Pile(group_id))
        if not pile.finished:
            pile.since_s = now_s
        pile.finished[sample] = blob
        pile.size_bytes += len(blob)

    def complete(self, lease_id: str) -> None:
        """Nothing more will come for this lease: what there is goes at once."""
        if lease_id in self._piles:
            self._piles[lease_id].complete = True

    def holds(self, lease_id: str) -> bool:
        return lease_id in self._piles

    def take(self, now_s: float) -> Parcel | None:
        """The next message that is due, if any; it is under way until `settled`."""
        for lease_id, pile in self._piles.items():
            if (due_s := self._due_s(pile)) <= now_s and due_s < math.inf:
                pile.under_way = _parcel(lease_id, pile)
                pile.since_s = now_s
                return pile.under_way
        return None

    def next_due_s(self) -> float:
        """When `take` will next have something; inf when nothing is waiting."""
        return min((self._due_s(pile) for pile in self._piles.values()), default=math.inf)

    def settled(self, parcel: Parcel) -> None:
        """A message was answered, or given up."""
        pile = self._piles.get(parcel.lease_id)
        if pile is None or pile.under_way is not parcel:
            return
        pile.under_way = None
        if not pile.finished:
            del self._piles[parcel.lease_id]

    def drop(self, lease_id: str) -> int:
        """Forget what is waiting for a lease that is lost; returns how many episodes that was."""
        pile = self._piles.pop(lease_id, None)
        return len(pile.finished) if pile else 0

    def _due_s(self, pile: _Pile) -> float:
        if pile.under_way is not None or not pile.finished:
            return math.inf
        full = len(pile.finished) >= MAX_EPISODES or pile.size_bytes >= MAX_BYTES
        return -math.inf if pile.complete or full else pile.since_s + self._linger_s


def _parcel(lease_id: str, pile: _Pile) -> Parcel:
    episodes: dict[int, bytes] = {}
    size_bytes = 0
    for sample, blob in list(pile.finished.items()):
        if episodes and (len(episodes) == MAX_EPISODES or size_bytes + len(blob) > MAX_BYTES):
            break
        episodes[sample] = pile.finished.pop(sample)
        size_bytes += len(blob)
    pile.size_bytes -= size_bytes
    return Parcel(lease_id, pile.group_id, episodes)
