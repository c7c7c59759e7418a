"""Placement of requests on the replicas of a set.

A request goes to the replica that has its prefix in the cache: the replica of its session, or else of its
group. It goes to another replica if the load of the one with the prefix is above `BUSY` and above `OVERLOAD`
times the least load. A request without a cached prefix goes to the replica with the least load. A replica
without room gets no requests. While no replica has room, requests wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

OVERLOAD = 1.5
"""A request does not go to the replica with its prefix if that replica's load is more than this many times
the least load."""
BUSY = 0.5  # Below this load, a replica is not overloaded, however idle the others are
FRONT_SHARE = 0.25
"""Number of requests that a replica may get beyond its capacity, as a share of the capacity. With these, a
replica has the next request ready when one ends. All other requests wait in the set, and the oldest is placed
first."""
MAX_REMEMBERED = 65_536  # Sessions and groups whose replica is remembered


def most_requests(capacity: int) -> int:
    """Return the largest number of requests that a replica of `capacity` may get."""
    return capacity + max(1, int(capacity * FRONT_SHARE))


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of a serving replica."""

    index: int
    given: int  # Unfinished requests from this set
    capacity: int
    queued: int = 0  # Requests in the engine, running and waiting, also from other clients
    kv_used: float = 0.0

    @property
    def load(self) -> float:
        """Load of the replica. At 1.0, every place is taken or the KV cache is full."""
        return max(max(self.given, self.queued) / max(1, self.capacity), self.kv_used)

    @property
    def has_room(self) -> bool:
        return self.given < most_requests(self.capacity)


def choose(replicas: Sequence[ReplicaLoad], home: int | None) -> int | None:
    """Return the index of the replica for a request, or None if the request must wait. `home` is the index of
    the replica with its prefix, or None."""
    loads = {replica.index: replica.load for replica in replicas if replica.has_room}
    if not loads:
        return None
    least = min(loads, key=lambda index: (loads[index], index))
    held = None if home is None else loads.get(home)
    if home is None or held is None or (held > BUSY and held > OVERLOAD * loads[least]):
        return least
    return home


class PrefixAffinity:
    """Memory of which replica has the prefix of each session and group. Its size is limited: the least
    recently used entry is removed."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._of: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def find(self, session: str) -> int | None:
        """Return the replica of the session if it has one, else the replica of its group."""
        for key in keys_of(session):
            if (index := self._of.get(key)) is not None:
                self._of.move_to_end(key)
                return index
        return None

    def assign(self, session: str, index: int) -> None:
        """Record that replica `index` now has the session's prefix. The entry of the session's group stays at
        the group's first replica, because most of its sessions are there."""
        for number, key in enumerate(keys_of(session)):
            if number == 0 or key not in self._of:
                self._of[key] = index
                self._of.move_to_end(key)
        while len(self._of) > self._limit:
            self._of.popitem(last=False)

    def forget(self, index: int) -> None:
        """Forget the prefixes of replica `index`, which has lost them."""
        for key in [key for key, at in self._of.items() if at == index]:
            del self._of[key]


def keys_of(session: str) -> tuple[str, ...]:
    """Return the keys of a session: the session itself, and also its group if the session is an episode id
    `<group id>.<sample>`."""
    if not session:
        return ()
    group, _, sample = session.rpartition(".")
    return (session, group) if group and sample.isdecimal() else (session,)
