"""Placement of requests on the replicas of a set.

A request follows its prefix (its session's last replica, else its group's) unless that replica is overloaded:
above `BUSY` and above `OVERLOAD` times the least loaded one. A request without a prefix goes to the least
loaded replica. A replica without room gets nothing; nobody gets anything while none has room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

OVERLOAD = 1.5
"""A request leaves the replica that holds its prefix if that is so many times as loaded as another."""
BUSY = 0.5  # Below this load a replica is not overloaded, however idle the others are
FRONT_SHARE = 0.25
"""Requests given to a replica beyond its capacity, as a share of it: the next one is at hand when one ends,
and all others wait in the set, where the oldest goes first."""
MAX_REMEMBERED = 65_536  # Sessions and groups whose replica is remembered


def most_requests(capacity: int) -> int:
    """Return the most requests that a replica of `capacity` is given."""
    return capacity + max(1, int(capacity * FRONT_SHARE))


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of a replica that serves."""

    index: int
    given: int  # Requests that we gave it and that have not ended
    capacity: int
    queued: int = 0  # Requests that the engine itself says it has, running and waiting; others may use it too
    kv_used: float = 0.0

    @property
    def load(self) -> float:
        """1.0: every place is taken, or the KV room is full."""
        return max(max(self.given, self.queued) / max(1, self.capacity), self.kv_used)

    @property
    def has_room(self) -> bool:
        return self.given < most_requests(self.capacity)


def choose(replicas: Sequence[ReplicaLoad], home: int | None) -> int | None:
    """Return the index of the replica for a request whose prefix is at `home` (None: nowhere); None: the
    request waits."""
    loads = {replica.index: replica.load for replica in replicas if replica.has_room}
    if not loads:
        return None
    least = min(loads, key=lambda index: (loads[index], index))
    held = None if home is None else loads.get(home)
    if home is None or held is None or (held > BUSY and held > OVERLOAD * loads[least]):
        return least
    return home


class PrefixAffinity:
    """A map from each session and group to the replica that holds its prefix. It is bounded: the least
    recently used entry is forgotten."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._of: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def find(self, session: str) -> int | None:
        """Return the replica of the session, else of its group."""
        for key in keys_of(session):
            if (index := self._of.get(key)) is not None:
                self._of.move_to_end(key)
                return index
        return None

    def assign(self, session: str, index: int) -> None:
        """Note that the session's prefix is now at replica `index`. Its group stays at its first replica,
        because most of its sessions are there."""
        for number, key in enumerate(keys_of(session)):
            if number == 0 or key not in self._of:
                self._of[key] = index
                self._of.move_to_end(key)
        while len(self._of) > self._limit:
            self._of.popitem(last=False)

    def forget(self, index: int) -> None:
        """Forget replica `index`, which has lost its prefixes."""
        for key in [key for key, at in self._of.items() if at == index]:
            del self._of[key]


def keys_of(session: str) -> tuple[str, ...]:
    """Return a session, and the group of an episode id `<group id>.<sample>`."""
    if not session:
        return ()
    group, _, sample = session.rpartition(".")
    return (session, group) if group and sample.isdecimal() else (session,)
