"""Which replica a request goes to, and which waits.

Promises: a request follows its prefix (its session's last replica, else its group's) unless that replica is
overloaded: above `BUSY` and above `OVERLOAD` times the least loaded one. Whatever has no prefix anywhere goes
to the least loaded replica. A replica without room gets nothing; nobody gets anything while none has room. Of
what waits the oldest lease's goes first; what is given up while it waits takes no place.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rollout_service.engines.base import EngineError, GenerateRequest

T = TypeVar("T")

OVERLOAD = 1.5
"""A request leaves the replica that holds its prefix where that is so many times as loaded as another."""
BUSY = 0.5
"""Below this load a replica is not overloaded, however idle the others are."""
FRONT_SHARE = 0.25
"""Requests given to a replica beyond its capacity, as a share of it: the next one is at hand when one ends,
and all others wait here, where the oldest goes first."""
MAX_REMEMBERED = 65_536
"""Sessions and groups whose replica is remembered."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What is known of a replica that serves."""

    index: int
    given: int
    """Requests that we gave it and that have not ended."""
    capacity: int
    queued: int = 0
    """Requests that the engine itself says it has, running and waiting; others may use it too."""
    kv_used: float = 0.0

    @property
    def load(self) -> float:
        """1.0: every place is taken, or the KV room is full."""
        return max(max(self.given, self.queued) / max(1, self.capacity), self.kv_used)

    @property
    def has_room(self) -> bool:
        return self.given < most_requests(self.capacity)


def most_requests(capacity: int) -> int:
    """Most requests that a replica of `capacity` is given."""
    return capacity + max(1, int(capacity * FRONT_SHARE))


def choose(loads: Sequence[ReplicaLoad], home: int | None) -> int | None:
    """The index of the replica for a request whose prefix is at `home` (None: nowhere); None: it waits."""
    open_ = [replica for replica in loads if replica.has_room]
    if not open_:
        return None
    least = min(open_, key=lambda replica: (replica.load, replica.index))
    held = next((replica for replica in open_ if replica.index == home), None)
    if held is None or (held.load > BUSY and held.load > OVERLOAD * least.load):
        return least.index
    return held.index


class PrefixAffinity:
    """Remembers where the prefix of each session and group is. Bounded: the one unused for longest is
    forgotten."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._of: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def find(self, session: str) -> int | None:
        """The replica of the session, else of its group."""
        for key in keys_of(session):
            if (index := self._of.get(key)) is not None:
                self._of.move_to_end(key)
                return index
        return None

    def assign(self, session: str, index: int) -> None:
        """The session's prefix is at replica `index` now. Its group's stays where it was first: that is
        where most of its sessions are."""
        session_key, *group_keys = keys_of(session) or ("",)
        if session_key:
            self._put(session_key, index)
        for key in group_keys:
            if key not in self._of:
                self._put(key, index)

    def forget(self, index: int) -> None:
        """What replica `index` held is lost."""
        for key in [key for key, at in self._of.items() if at == index]:
            del self._of[key]

    def _put(self, key: str, index: int) -> None:
        self._of[key] = index
        self._of.move_to_end(key)
        while len(self._of) > self._limit:
            self._of.popitem(last=False)


def keys_of(session: str) -> tuple[str, ...]:
    """A session, and the group of an episode id `<group id>.<sample>`."""
    if not session:
        return ()
    group, _, sample = session.rpartition(".")
    return (session, group) if group and sample.isdecimal() else (session,)


class Aborted(Exception):
    """A request was ended before it had begun."""


class AdmissionQueue(Generic[T]):
    """Requests for which no replica has room. `admit` gives a request the replica that it then counts for,
    None while there is no room; `give_back` undoes that."""

    def __init__(self, admit: Callable[[GenerateRequest], T | None], give_back: Callable[[T], None]) -> None:
        self._admit = admit
        self._give_back = give_back
        self._waiting: list[tuple[int, int, asyncio.Future[T], GenerateRequest]] = []
        """A heap, oldest lease first."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request: GenerateRequest) -> T:
        """Raises `Aborted`, and what `refuse` was given."""
        place: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (request.priority, next(self._numbers), place, request))
        self.admit_waiting()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give_back(place.result())
                self.admit_waiting()
            raise

    def admit_waiting(self) -> None:
        """Give what waits the room that there is, oldest first."""
        while self._waiting:
            _, _, place, request = self._waiting[0]
            if not place.done():
                replica = self._admit(request)
                if replica is None:
                    return
                place.set_result(replica)
            heapq.heappop(self._waiting)

    def abort(self, request_ids: set[str]) -> None:
        for _, _, place, request in self._waiting:
            if request.request_id in request_ids and not place.done():
                place.set_exception(Aborted())
        self._waiting = [entry for entry in self._waiting if not entry[2].done()]
        heapq.heapify(self._waiting)

    def refuse(self, error: EngineError) -> None:
        """End the wait of all with `error`."""
        waiting, self._waiting = self._waiting, []
        for _, _, place, _ in waiting:
            if not place.done():
                place.set_exception(error)
