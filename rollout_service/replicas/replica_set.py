"""Several engines of one worker that act as one: their requests, weights, deaths and restarts.

Promises:

- A request goes to the replica with its prefix, or to another with room (`placement.py`). If no replica has
  room, requests wait in the set. Requests of the oldest lease are placed first, and the engine gets their
  priority with them. A request that is cancelled while it waits takes no place.
- If an engine dies, or samples nothing for `stuck_s`, it is stopped. Another engine starts after the pause of
  the restart policy, with the newest snapshot. It serves only after it has the version that the set serves.
  If engines die more often than the policy allows, the set ends with the last error. For a server, the error
  includes its last log lines.
- Requests of a lost engine run again from their first token, on another replica or on the new engine. The
  caller notices only the delay. But if units of the answer were already delivered as a stream, the request
  ends with an error, because a new answer would contradict these units.
- `version` is the oldest version that any replica serves. The buffer grants leases by this version, so it
  never grants too many groups. The version of a unit is set by the engine that sampled it.
- The deadline of a request applies both while it waits and while it runs.

If an engine cannot be restarted, `watch` and every request raise the reason.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from areal_async.base.errors import ArealError, SnapshotError, WireError
from areal_async.base.log import get_logger
from areal_async.base.processes import NO_RESTARTS, RestartPolicy
from areal_async.base.versions import VersionTag
from rollout_service import metrics
from rollout_service.engines.base import (
    DeadlinePassed,
    Engine,
    EngineError,
    EngineLost,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Piece,
    Tell,
    Weights,
)
from rollout_service.replicas.exchange import WATCH_S, UpdateStall, exchange
from rollout_service.replicas.placement import PrefixAffinity, choose
from rollout_service.replicas.replica import EngineReplica, Fetch

log = get_logger("replicas")

MAX_SENT_AGAIN = 3
"""If a live engine loses the same request more often than this, the engine counts as dead."""
FETCH_PAUSE_S = 0.5


def _pass_on(call: asyncio.Future[GenerateResult], ended: asyncio.Future[GenerateResult]) -> None:
    """Give the outcome of one future to another, unless that is done."""
    if call.done():
        return
    if ended.cancelled():
        call.cancel()
    elif (error := ended.exception()) is not None:
        call.set_exception(error)
    else:
        call.set_result(ended.result())


@dataclass(eq=False)
class ReplicaSet:
    """Set of `count` engines from `make(index)`. It generates with them and exchanges their weights."""

    make: Callable[[int], Engine]
    count: int = 1
    _: KW_ONLY
    restarts: RestartPolicy = NO_RESTARTS
    stuck_s: float = 300.0
    newest: Fetch | None = None
    """Source of the snapshot for a restarted engine."""
    on_serving: Callable[[float], None] = lambda share: None
    """Function that is called with the share of serving replicas whenever it changes."""
    clock: Callable[[], float] = time.monotonic
    watch_s: float = WATCH_S
    fetch_pause_s: float = FETCH_PAUSE_S
    _affinity: PrefixAffinity = field(init=False, default_factory=PrefixAffinity)
    _updating: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    """Held during an exchange of weights, and while a restarted engine catches up."""
    _awake: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _wake: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.replicas = [
            EngineReplica(index, self.make, self.restarts, self.stuck_s, self.clock)
            for index in range(self.count)
        ]
        self._waiting: list[tuple[int, int, asyncio.Future[EngineReplica], GenerateRequest]] = []
        """Requests that wait because no replica has room: a heap, oldest lease first."""
        self._numbers = itertools.count()
        self._newest: Weights | None = None
        self._offered: Weights | None = None  # Snapshot to load when the set wakes
        self.pinned: Weights | None = None
        """Snapshot that a restarted engine gets while an evaluation needs it, instead of the newest one."""
        self._awake.set()
        self._revivals: set[asyncio.Task[None]] = set()
        self._failed: EngineError | None = None
        self._stopping = False

    @property
    def version(self) -> VersionTag:
        """Return the oldest version that any replica serves."""
        serving = [replica.engine.version for replica in self.replicas if replica.serves]
        return min(serving, default=self._served().tag)

    def alive(self) -> bool:
        """Return whether the set is expected to serve."""
        return self._failed is None and not self._stopping

    async def start(self, snapshot: Weights) -> None:
        """Start all engines. If one fails at this first start, it is not restarted."""
        self._newest = snapshot
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self.replicas:
                    group.create_task(replica.engine.start(snapshot))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for replica in self.replicas:
            replica.serve()
        self._serving_changed()

    async def generate(self, request: GenerateRequest, tell: Tell | None = None) -> GenerateResult:
        """Sample on one of the replicas, as an `Engine` does. Raises `EngineError` if the engine was lost
        after pieces were delivered."""
        limit_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._generate(request, tell)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlinePassed(f"request {request.request_id} was not done by its deadline") from None

    def begin(self, request: GenerateRequest) -> asyncio.Future[GenerateResult]:
        """Begin a request as `generate` does, if possible without a task. Cancelling the future aborts the
        request. The caller keeps the request's deadline, by setting an error."""
        free = not (self._waiting or self._stopping or self._failed is not None)
        replica = self._admit(request) if free else None
        begin = getattr(replica.engine, "begin", None) if replica is not None else None
        if replica is None or begin is None:
            if replica is not None:
                replica.given = max(0, replica.given - 1)
            return asyncio.ensure_future(self.generate(request))
        call: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        engine = replica.engine
        try:
            inner: asyncio.Future[GenerateResult] = begin(request)
        except ArealError as error:
            self._given_back(replica, engine)
            call.set_exception(error)
            return call

        def ended(inner: asyncio.Future[GenerateResult]) -> None:
            error = None if inner.cancelled() else inner.exception()
            lost = isinstance(error, EngineError) and self._was_lost(replica, engine, error)
            self._given_back(replica, engine)
            if call.done():
                return
            if lost:
                metrics.RERUN.inc()
                again = asyncio.ensure_future(self.generate(request))
                again.add_done_callback(partial(_pass_on, call))
                call.add_done_callback(lambda _: again.cancel())
            else:
                _pass_on(call, inner)

        inner.add_done_callback(ended)
        call.add_done_callback(lambda _: inner.cancel())
        return call

    def _given_back(self, replica: EngineReplica, engine: Engine) -> None:
        """Record that a replica has one request less."""
        if replica.engine is engine:  # a new engine has no requests yet
            replica.given = max(0, replica.given - 1)
        self._admit_waiting()

    def stats(self) -> EngineStats:
        each = [replica.engine.stats() for replica in self.replicas if replica.serves]
        tokens, requests = zip(*(replica.totals() for replica in self.replicas), strict=True)
        return EngineStats(
            running=sum(stats.running for stats in each),
            waiting=sum(stats.waiting for stats in each) + len(self._waiting),
            capacity=sum(stats.capacity for stats in each),
            kv_used=max((stats.kv_used for stats in each), default=0.0),
            tokens_total=sum(tokens),
            requests_total=sum(requests),
            busy_s=max((stats.busy_s for stats in each), default=0.0),
            passes=tuple(map(sum, zip(*(stats.passes for stats in each), strict=False))),
        )

    async def stop(self) -> None:
        self._stopping = True
        for task in self._revivals:
            task.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)
        await asyncio.gather(*(replica.engine.stop() for replica in self.replicas))
        self._refuse(EngineError("the engine has stopped"))

    # --- updates -------------------------------------------------------------------------------------

    async def exchange(self, snapshot: Weights) -> UpdateStall:
        """Make every live replica serve `snapshot`. Return the stall of the slowest replica. If a replica is
        lost during this, the others are not affected. Any other error is raised after all replicas have
        finished. A sleeping set takes the snapshot when it wakes."""
        async with self._updating:
            if not self._awake.is_set():
                self._offered = snapshot
                await self._awake.wait()
            # A replica restarted with the newest snapshot already has it.
            behind = [r for r in self.replicas if r.serves and r.engine.version < snapshot.tag]
            updates = [self._exchange_one(replica, snapshot) for replica in behind]
            results = await asyncio.gather(*updates, return_exceptions=True)
            if errors := [result for result in results if isinstance(result, BaseException)]:
                raise errors[0]
            stalls = [result for result in results if isinstance(result, UpdateStall)]
            self._newest = snapshot
        return max(stalls, key=lambda stall: stall.total_s, default=UpdateStall())

    async def _exchange_one(self, replica: EngineReplica, snapshot: Weights) -> UpdateStall:
        engine = replica.engine
        if not replica.serves:
            return UpdateStall()  # lost while others were updated
        try:
            return await replica.exchange(snapshot)
        except EngineError as error:
            if not self._was_lost(replica, engine, error):
                raise
            return UpdateStall()
        finally:
            self._admit_waiting()

    # --- sleep ---------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Release the memory of all replicas on their device. Requests wait until `wake`, with the units
        sampled so far. A replica that cannot sleep is lost. Lost replicas start again only after `wake`, also
        if they were starting: a start may wait for the trainer, which waits for the device."""
        async with self._updating:
            self._awake.clear()
            revivals = [*self._revivals]
            for task in revivals:
                task.cancel()
            await asyncio.gather(*revivals, return_exceptions=True)
            for replica in (each for each in self.replicas if not each.serves):
                await replica.engine.stop()
                self._begin_revival(replica)
            await asyncio.gather(*(self._sleep_one(each) for each in self.replicas if each.serves))

    async def woken(self, offered: Weights, limit_s: float) -> bool:
        """Return whether the set is awake, after waiting at most `limit_s` for it. A set that wakes in this
        time loads `offered` first, if it is newer."""
        self._offered = offered
        with suppress(TimeoutError):
            await asyncio.wait_for(self._awake.wait(), limit_s)
        return self._awake.is_set()

    async def _sleep_one(self, replica: EngineReplica) -> None:
        engine, replica.updating = replica.engine, True
        try:
            await engine.pause()
            await engine.sleep()
        except EngineError as error:
            if not self._was_lost(replica, engine, error):
                self._lose(replica, error)
            await engine.stop()  # returns once the memory is free

    async def wake(self) -> None:
        """Restore the memory of the replicas after `sleep`. If a newer snapshot waits in `exchange`, load it
        before the requests continue."""
        await asyncio.gather(*(self._wake_one(each) for each in self.replicas if each.serves))
        self._offered = None
        self._awake.set()

    async def _wake_one(self, replica: EngineReplica) -> None:
        engine, offered = replica.engine, self._offered
        try:
            await engine.wake()
            if offered is not None and engine.version < offered.tag:
                await replica.exchange(offered)
            else:
                await engine.resume()
        except EngineError as error:
            # If the engine lives, it has refused the snapshot. `exchange` tries again and raises the reason.
            self._was_lost(replica, engine, error)
        finally:
            replica.updating = False
            self._admit_waiting()

    async def device_bytes(self) -> int | None:
        """Return the memory that the replicas use on their device, or None if one of them cannot tell."""
        each = await asyncio.gather(*(one.engine.device_bytes() for one in self.replicas if one.serves))
        return None if None in each else sum(filter(None, each))

    # --- requests ------------------------------------------------------------------------------------

    async def _generate(self, request: GenerateRequest, tell: Tell | None) -> GenerateResult:
        sent_again = told = 0

        def counted(piece: Piece) -> None:
            nonlocal told
            told += len(piece)
            if tell is not None:
                tell(piece)

        while True:
            replica = await self._replica_for(request)
            engine = replica.engine
            try:
                return await engine.generate(request, *(() if tell is None else (counted,)))
            except EngineError as error:
                serves = replica.engine is engine and replica.serves and engine.alive()
                if isinstance(error, EngineLost) and serves and sent_again < MAX_SENT_AGAIN:
                    # Its connection broke, or the server ended it. This is no reason to end all other
                    # requests.
                    sent_again += 1
                elif not self._was_lost(replica, engine, error):
                    raise
                if told:
                    streamed = f"{told} units of the answer had been streamed"
                    raise EngineError(f"the engine was lost when {streamed}: {error}") from error
                metrics.RERUN.inc()
            finally:
                self._given_back(replica, engine)

    async def _replica_for(self, request: GenerateRequest) -> EngineReplica:
        """Wait for a replica that can take the request, and return it. From then on, the request counts
        towards that replica's load."""
        if self._stopping or self._failed is not None:
            raise self._failed or EngineError("the engine has stopped")
        if not self._waiting and (replica := self._admit(request)) is not None:
            return replica
        place: asyncio.Future[EngineReplica] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (request.priority, next(self._numbers), place, request))
        self._admit_waiting()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                replica = place.result()
                replica.given = max(0, replica.given - 1)
                self._admit_waiting()
            raise

    def _admit(self, request: GenerateRequest) -> EngineReplica | None:
        """Return the replica that takes a request now, or None if it must wait."""
        if len(self.replicas) == 1:
            replica = self.replicas[0]
            if not (replica.serves and replica.has_room):
                return None
        else:
            serving = [replica for replica in self.replicas if replica.serves]
            going_on = [replica for replica in serving if not replica.updating] or serving
            loads = [replica.load() for replica in going_on]
            index = choose(loads, self._affinity.find(request.session))
            if index is None:
                return None
            replica = self.replicas[index]
            self._affinity.assign(request.session, replica.index)
        replica.given += 1
        return replica

    def _admit_waiting(self) -> None:
        """Give free places to the waiting requests, oldest lease first."""
        while self._waiting:
            _, _, place, request = self._waiting[0]
            if not place.done():
                replica = self._admit(request)
                if replica is None:
                    return
                place.set_result(replica)
            heapq.heappop(self._waiting)

    def _refuse(self, error: EngineError) -> None:
        """End the wait of all requests with `error`."""
        waiting, self._waiting = self._waiting, []
        for _, _, place, _ in waiting:
            if not place.done():
                place.set_exception(error)

    # --- deaths --------------------------------------------------------------------------------------

    def _was_lost(self, replica: EngineReplica, engine: Engine, error: EngineError) -> bool:
        """Return whether `error` means that `engine` is lost, so that its requests may be repeated."""
        if self._stopping or self._failed is not None:
            return False
        if replica.engine is not engine or not replica.serves:
            return True
        if not isinstance(error, EngineLost) and engine.alive():
            return False
        self._lose(replica, error)
        return True

    def _lose(self, replica: EngineReplica, error: EngineError) -> None:
        log.warning("engine lost", replica=replica.index, running=replica.given, error=str(error))
        replica.lose(error)
        self._affinity.forget(replica.index)
        self._serving_changed()
        self._begin_revival(replica)

    def _begin_revival(self, replica: EngineReplica) -> None:
        task = asyncio.get_running_loop().create_task(self._revive(replica))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, replica: EngineReplica) -> None:
        try:
            while not replica.serves:
                await self._awake.wait()
                await replica.revive(self._snapshot)
                try:
                    await self._catch_up(replica)
                except EngineError as error:
                    replica.lose(error)
        except Exception as error:  # nobody awaits this task, and its requests would wait forever
            if not isinstance(error, EngineError):
                log.error("engine not started again", replica=replica.index, error=repr(error))
                error = EngineError(f"replica {replica.index} cannot be started again: {error!r}")
            self._failed = error
            self._refuse(error)
            self._wake.set()
            return
        log.info("engine is back", replica=replica.index, version=replica.engine.version.version)
        self._serving_changed()
        self._admit_waiting()

    async def _catch_up(self, replica: EngineReplica) -> None:
        """Let a restarted engine serve once its weights are at least as new as the set's version."""
        async with self._updating:
            while replica.engine.version < self._served().tag:
                # Fetched again: the served version was acknowledged, so its files may be overwritten.
                async with self._snapshot() as snapshot:
                    await exchange(replica.engine, snapshot)
            replica.serve()

    async def watch(self) -> None:
        """Watch the engines until cancelled. Raises `EngineError` if one cannot be restarted."""
        while self._failed is None:
            for replica in self.replicas:
                if trouble := replica.trouble():
                    self._lose(replica, EngineLost(trouble))
            with suppress(TimeoutError):
                async with asyncio.timeout(self.watch_s):
                    await self._wake.wait()
        raise self._failed

    def _serving_changed(self) -> None:
        serving = sum(replica.serves for replica in self.replicas)
        metrics.REPLICAS.set(serving)
        self.on_serving(serving / len(self.replicas))

    def _served(self) -> Weights:
        if self._newest is None:
            raise EngineError("the engine has not started")
        return self._newest

    @asynccontextmanager
    async def _snapshot(self) -> AsyncIterator[Weights]:
        """Yield the snapshot for an engine that starts. This is the newest snapshot, and the call waits for
        the trainer's answer however long that takes. Without a source (`newest`), it is the snapshot that the
        set serves."""
        if self.newest is None or self.pinned is not None:
            yield self.pinned or self._served()
            return
        stack, snapshot = AsyncExitStack(), None
        try:
            while snapshot is None:
                try:
                    snapshot = await stack.enter_async_context(self.newest())
                except (WireError, SnapshotError) as error:
                    log.warning("no snapshot to start with", error=str(error))
                    await asyncio.sleep(self.fetch_pause_s)
            yield snapshot
        finally:
            await (
                stack.aclose()
            )  # An engine that failed to start must not keep the snapshot from its release.
