"""One replica of a set: its engine, the exchange of its weights, its restarts, and the requests that it gets.

Promises: an engine that was lost is ended before another takes its place; the next one starts after the pause
of the restart policy, with the newest snapshot, and serves only once it has the one that the set serves; more
deaths than the policy allows are the end, with the last error's words (a server's last log lines among them).

A request follows its prefix (its session's last replica, else its group's) unless that replica is overloaded:
above `BUSY` and above `OVERLOAD` times the least loaded one. What has no prefix anywhere goes to the least
loaded replica. A replica without room gets nothing; nobody gets anything while none has room. Of what waits
the oldest lease's goes first; what is given up while it waits takes no place.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import asdict

from areal_async.base.errors import RpcTimeout, SnapshotError, WireError
from areal_async.base.events import record
from areal_async.base.log import get_logger
from areal_async.base.processes import RestartPolicy, Restarts
from areal_async.base.versions import VersionTag
from rollout_service import metrics
from rollout_service.engines.base import Engine, EngineError, GenerateRequest, Weights

OVERLOAD = 1.5
"""A request leaves the replica that holds its prefix where that is so many times as loaded as another."""
BUSY = 0.5  # Below this load a replica is not overloaded, however idle the others are
FRONT_SHARE = 0.25
"""Requests given to a replica beyond its capacity, as a share of it: the next one is at hand when one ends,
and all others wait here, where the oldest goes first."""
MAX_REMEMBERED = 65_536  # Sessions and groups whose replica is remembered


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What is known of a replica that serves."""

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


class AdmissionQueue:
    """Requests for which no replica has room. `admit` gives a request the replica that it then counts for,
    None while there is no room; `give_back` undoes that."""

    def __init__(
        self,
        admit: Callable[[GenerateRequest], EngineReplica | None],
        give_back: Callable[[EngineReplica], None],
    ) -> None:
        self._admit = admit
        self._give_back = give_back
        self._waiting: list[tuple[int, int, asyncio.Future[EngineReplica], GenerateRequest]] = []
        """A heap, oldest lease first."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request: GenerateRequest) -> EngineReplica:
        """Raises `Aborted`, and what `refuse` was given."""
        place: asyncio.Future[EngineReplica] = asyncio.get_running_loop().create_future()
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


log = get_logger("replicas")

END_LIMIT_S = 15.0  # Time for the end of an engine that was lost; what is left of it ends with this process
FETCH_PAUSE_S = 0.5
WATCH_S = 0.5  # Time between two looks at an engine
LONGEST_GAP_S = 5.0
"""Longest time between two looks that counts as such: the whole process may have been stopped."""

Fetch = Callable[[], AbstractAsyncContextManager[Weights]]
"""The newest snapshot, whose files stay as they are inside the block."""


class ReplicaGone(EngineError):
    """An engine died more often than its restart policy allows."""

    restart_helps = True


# --- the exchange of weights -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdateStall:
    """Seconds of one update in which an engine sampled nothing."""

    pause_s: float = 0.0
    load_s: float = 0.0
    resume_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.pause_s + self.load_s + self.resume_s


async def exchange(
    engine: Engine, snapshot: Weights, loaded: Callable[[], None] = lambda: None
) -> UpdateStall:
    """Have `engine` serve `snapshot`; `loaded` is called before any unit of the new weights is sampled.

    Raises `EngineError`; then the old weights are in place, or the engine is lost. It is resumed also when
    the load fails: an error of that is most often the consequence of the first one, and only logged."""
    began_s = paused_s = time.monotonic()
    try:
        await engine.pause()
        paused_s = time.monotonic()
        await engine.load(snapshot)
        loaded()
    except BaseException as first:
        try:
            await engine.resume()
        except Exception as error:  # the first one is the one to act on
            log.warning("engine did not resume", error=str(error), after=f"{type(first).__name__}: {first}")
        raise
    loaded_s = time.monotonic()
    await engine.resume()
    return UpdateStall(paused_s - began_s, loaded_s - paused_s, time.monotonic() - loaded_s)


# --- whether an engine works -------------------------------------------------------------------------


class StallDetector:
    """Notices an engine that has requests but makes no progress: one that has had requests for `limit_s`
    without a pause, and has neither sampled a token nor finished a request in that time. Time in which nobody
    looked does not count. Times are seconds of `clock`; the engine is to be looked at every `WATCH_S`."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._done: tuple[int, int] | None = None
        self._stuck_s = 0.0
        self._looked_s = 0.0

    def look(self, *, tokens: int, requests: int, running: int, paused: bool) -> float | None:
        """Seconds without progress once they are too many, else None. `tokens` and `requests` are what the
        engine has done so far; any change of them is progress."""
        now_s = self._clock()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        done = (tokens, requests)
        if done != self._done or not running or paused:
            self._done, self._stuck_s = done, 0.0
        else:
            self._stuck_s += min(gap_s, LONGEST_GAP_S)
        return self._stuck_s if self._stuck_s >= self._limit_s else None

    def trouble(self, engine: Engine, *, given: int, paused: bool = False) -> str:
        """Why the engine must be taken for dead; empty while it need not. `given` counts the requests that
        it has, `paused` says that it need not work on them."""
        if not engine.alive():
            return "the engine has ended"
        stats = engine.stats()
        tokens = stats.tokens_total + stats.decoded
        stuck_s = self.look(tokens=tokens, requests=stats.requests_total, running=given, paused=paused)
        if stuck_s is None:
            return ""
        return f"no token for {stuck_s:.0f} s with {given} requests running (rollout.stuck_s)"


# --- one replica -------------------------------------------------------------------------------------


class EngineReplica:
    """`make(index)` gives its engines, one after the other."""

    def __init__(
        self,
        index: int,
        make: Callable[[int], Engine],
        policy: RestartPolicy,
        stuck_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.engine = make(index)
        self.serves = False
        self.given = 0  # Requests that it was given and that have not ended
        self.updating = False
        self.error: EngineError | None = None  # Why it was lost last
        self._before = (0, 0)  # Tokens and requests of the engines before this one
        self._make = make
        self._restarts = Restarts(policy)
        self._stuck_s = stuck_s
        self._detector = StallDetector(stuck_s, clock)
        self._clock = clock
        self._served_s: float | None = None
        self._recorded: VersionTag | None = None
        self._most_requests = 1

    @property
    def has_room(self) -> bool:
        return self.given < self._most_requests

    def serve(self) -> None:
        """Note that its engine has started, and has been given nothing."""
        self.serves, self._served_s = True, self._clock()
        self._detector = StallDetector(self._stuck_s, self._clock)
        self._most_requests = most_requests(self.engine.stats().capacity)
        self.given, self.updating = 0, False
        self.record_version()

    def record_version(self) -> None:
        """Write down which weights it serves from now on, before any unit of theirs is sampled."""
        tag = self.engine.version
        if self._recorded is None or self._recorded < tag:
            self._recorded = tag
            record("served", replica=self.index, **asdict(tag))

    async def exchange(self, snapshot: Weights) -> UpdateStall:
        """Serve `snapshot`; it gets no requests meanwhile where others can take them."""
        self.updating = True
        try:
            return await exchange(self.engine, snapshot, self.record_version)
        finally:
            self.updating = False

    def give_back(self) -> None:
        """A request that it was given has ended."""
        self.given = max(0, self.given - 1)

    def load(self) -> ReplicaLoad:
        stats = self.engine.stats()
        return ReplicaLoad(
            self.index, self.given, stats.capacity, stats.running + stats.waiting, stats.kv_used
        )

    def totals(self) -> tuple[int, int]:
        """Tokens and requests of all its engines."""
        tokens, requests = self._before
        if self.serves:
            stats = self.engine.stats()
            tokens, requests = tokens + stats.tokens_total, requests + stats.requests_total
        return tokens, requests

    def trouble(self) -> str:
        """Why its engine must be taken for dead; empty while it need not."""
        if not self.serves:
            return ""
        return self._detector.trouble(self.engine, given=self.given, paused=self.updating)

    def lose(self, error: EngineError) -> None:
        """Note that its engine is dead. To be followed by `revive`."""
        stats = self.engine.stats()
        self._before = self._before[0] + stats.tokens_total, self._before[1] + stats.requests_total
        self.serves, self.error = False, error
        metrics.ENGINE_DEATHS.inc()

    async def revive(self, fetch: Fetch) -> None:
        """Return when another engine has started. Raises `ReplicaGone`."""
        while True:
            await end_engine(self.engine, replica=self.index)
            pause_s = self._restarts.died(self._clock(), served_s=self._served_s)
            deaths = len(self._restarts.deaths_s)
            if pause_s is None:
                raise ReplicaGone(
                    f"replica {self.index} died {deaths} times within "
                    f"{self._restarts.policy.window_s:.0f} s (supervisor.restarts), the last time with: "
                    f"{self.error}"
                ) from self.error
            log.warning(
                "engine is started again",
                replica=self.index,
                deaths=deaths,
                pause_s=round(pause_s, 2),
                error=str(self.error),
            )
            await asyncio.sleep(pause_s)
            try:
                async with fetch() as snapshot:
                    self.engine = self._make(self.index)
                    await self.engine.start(snapshot)
                return
            except EngineError as error:
                self.error, self._served_s = error, None
                metrics.ENGINE_DEATHS.inc()


async def end_engine(engine: Engine, **named: object) -> None:
    """End an engine that may be lost, as far as it lets itself be ended; `named` says in the log which."""
    try:
        async with asyncio.timeout(END_LIMIT_S):
            await engine.stop()
    except (TimeoutError, EngineError) as error:
        log.warning("an engine did not end", error=str(error), **named)


@asynccontextmanager
async def retried(source: Fetch, pause_s: float = FETCH_PAUSE_S) -> AsyncIterator[Weights]:
    """The snapshot of `source`, however long the trainer takes to answer."""
    while True:
        block = source()
        try:
            snapshot = await block.__aenter__()
        except (RpcTimeout, WireError, SnapshotError) as error:
            log.warning("no snapshot to start with", error=str(error))
            await asyncio.sleep(pause_s)
            continue
        try:
            yield snapshot
        finally:
            await block.__aexit__(None, None, None)
        return
