"""Several engines of one worker behind the face of one.

Promises:
- A request goes where its prefix is, or where there is room (`replica.py`). What finds no room waits here,
  and of what waits the oldest lease's goes first; the priority goes on to the engine.
- An engine that dies, or samples nothing for `stuck_s`, is started again (`replica.py`); its requests run
  again, from their first token, on another replica or on the new engine. Callers do not notice. Only a
  stream that has told units of the answer ends in an error: another answer would take them back.
- `version` is the oldest that a replica serves, so that admission allows no more than it may; every unit is
  tagged by the engine that sampled it.
- A request's deadline holds wherever it is.

A set whose engine is dead for good ends `watch` with the reason, and every request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

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
    nothing_sampled,
)
from rollout_service.replicas.replica import (
    FETCH_PAUSE_S,
    WATCH_S,
    Aborted,
    AdmissionQueue,
    EngineReplica,
    Fetch,
    PrefixAffinity,
    UpdateStall,
    choose,
    exchange,
    retried,
)

log = get_logger("replicas")

MAX_SENT_AGAIN = 3
"""Times that one request is lost in an engine that lives, before that engine is taken for dead."""


class _Counted:
    """Tells a stream its pieces, and counts their units."""

    def __init__(self, tell: Tell) -> None:
        self.units = 0
        self._tell = tell

    def __call__(self, piece: Piece) -> None:
        self.units += len(piece)
        self._tell(piece)


class ReplicaSet:
    """Generates with `count` engines that `make(index)` gives, and exchanges their weights."""

    def __init__(
        self,
        make: Callable[[int], Engine],
        count: int = 1,
        *,
        restarts: RestartPolicy = NO_RESTARTS,
        stuck_s: float = 300.0,
        newest: Fetch | None = None,
        on_serving: Callable[[float], None] = lambda share: None,
        on_exchange: Callable[[bool], None] = lambda going_on: None,
        clock: Callable[[], float] = time.monotonic,
        watch_s: float = WATCH_S,
        fetch_pause_s: float = FETCH_PAUSE_S,
    ) -> None:
        """`newest` gives the snapshot that a restarted engine starts with. `on_serving(share)` is called with
        the share of the replicas that serves whenever that changes, `on_exchange(going_on)` when an exchange
        of weights begins and when it ends."""
        self.replicas = [EngineReplica(index, make, restarts, stuck_s, clock) for index in range(count)]
        self._on_serving = on_serving
        self._on_exchange = on_exchange
        self._fetch: Fetch | None = None
        if newest is not None:
            self._fetch = lambda: retried(newest, fetch_pause_s)
        self._watch_s = watch_s
        self._affinity = PrefixAffinity()
        self._queue = AdmissionQueue(self._admit, EngineReplica.give_back)
        self._updating = asyncio.Lock()
        """Held while weights are exchanged, and while a restarted engine catches up."""
        self._newest: Weights | None = None
        self._revivals: set[asyncio.Task[None]] = set()
        self._failed: EngineError | None = None
        self._wake = asyncio.Event()
        self._stopping = False

    @property
    def version(self) -> VersionTag:
        """The oldest version that a replica serves."""
        serving = [replica.engine.version for replica in self.replicas if replica.serves]
        return min(serving, default=self._served().tag)

    def alive(self) -> bool:
        """Whether it can be expected to serve."""
        return self._failed is None and not self._stopping

    async def start(self, snapshot: Weights) -> None:
        """Start all engines. What fails before it has ever served fails again: no second try is made."""
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
        """Sample on one of the replicas, as an `Engine` does. Raises `EngineError` when the engine was lost
        and pieces had been told."""
        if request.deadline_s is None:
            return await self._generate(request, tell)
        limit = asyncio.timeout(request.deadline_s - time.monotonic())
        try:
            async with limit:
                return await self._generate(request, tell)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlinePassed(f"request {request.request_id} was not done by its deadline") from None

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now: they return what they have, with finish reason `abort`."""
        wanted = set(request_ids)
        self._queue.abort(wanted)
        serving = [replica for replica in self.replicas if replica.serves]
        await asyncio.gather(*(replica.engine.abort(wanted) for replica in serving))

    def stats(self) -> EngineStats:
        each = [replica.engine.stats() for replica in self.replicas if replica.serves]
        tokens, requests = zip(*(replica.totals() for replica in self.replicas), strict=True)
        return EngineStats(
            running=sum(stats.running for stats in each),
            waiting=sum(stats.waiting for stats in each) + len(self._queue),
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
        self._queue.refuse(EngineError("the engine has stopped"))

    # --- updates -------------------------------------------------------------------------------------

    async def exchange(self, snapshot: Weights) -> UpdateStall:
        """Serve `snapshot` on every replica that lives; returns the stall of the slowest. An engine that is
        lost in it is none of the others' business; any other error is raised when all are done."""
        self._on_exchange(True)
        try:
            async with self._updating:
                # One that was restarted with the newest has it.
                behind = [r for r in self.replicas if r.serves and r.engine.version < snapshot.tag]
                updates = [self._exchange_one(replica, snapshot) for replica in behind]
                results = await asyncio.gather(*updates, return_exceptions=True)
                if errors := [result for result in results if isinstance(result, BaseException)]:
                    raise errors[0]
                stalls = [result for result in results if isinstance(result, UpdateStall)]
                self._newest = snapshot
            return max(stalls, key=lambda stall: stall.total_s, default=UpdateStall())
        finally:
            self._on_exchange(False)

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
            self._queue.admit_waiting()

    # --- requests ------------------------------------------------------------------------------------

    async def _generate(self, request: GenerateRequest, tell: Tell | None) -> GenerateResult:
        sent_again = 0
        told = None if tell is None else _Counted(tell)
        while True:
            try:
                replica = await self._replica_for(request)
            except Aborted:
                return nothing_sampled()
            engine = replica.engine
            try:
                if told is None:
                    return await engine.generate(request)
                return await engine.generate(request, told)
            except EngineError as error:
                serves = replica.engine is engine and replica.serves and engine.alive()
                if isinstance(error, EngineLost) and serves and sent_again < MAX_SENT_AGAIN:
                    # Its connection broke, or the server ended it: no reason to end all the others too.
                    sent_again += 1
                elif not self._was_lost(replica, engine, error):
                    raise
                if told is not None and told.units:
                    streamed = f"{told.units} units of the answer had been streamed"
                    raise EngineError(f"the engine was lost when {streamed}: {error}") from error
                metrics.RERUN.inc()
            finally:
                if replica.engine is engine:  # a new one has been given nothing
                    replica.give_back()
                if self._queue:
                    self._queue.admit_waiting()

    async def _replica_for(self, request: GenerateRequest) -> EngineReplica:
        """The replica of a request, which then counts as given to it."""
        if self._stopping or self._failed is not None:
            raise self._failed or EngineError("the engine has stopped")
        replica = None if self._queue else self._admit(request)
        return await self._queue.wait(request) if replica is None else replica

    def _admit(self, request: GenerateRequest) -> EngineReplica | None:
        """The replica that takes a request now, None where it must wait."""
        if len(self.replicas) == 1:  # reading its load for each request would cost more than it says
            replica = self.replicas[0]
            if not replica.serves or not replica.has_room:
                return None
        else:
            serving = [replica for replica in self.replicas if replica.serves]
            going_on = [replica for replica in serving if not replica.updating] or serving
            index = choose([replica.load() for replica in going_on], self._affinity.find(request.session))
            if index is None:
                return None
            self._affinity.assign(request.session, index)
            replica = self.replicas[index]
        replica.given += 1
        return replica

    # --- deaths --------------------------------------------------------------------------------------

    def _was_lost(self, replica: EngineReplica, engine: Engine, error: EngineError) -> bool:
        """Whether `error` means that `engine` is gone, so that what it was doing may be done again."""
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
        task = asyncio.get_running_loop().create_task(self._revive(replica))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, replica: EngineReplica) -> None:
        try:
            while True:
                await replica.revive(self._snapshot)
                try:
                    await self._catch_up(replica)
                except EngineError as error:
                    replica.lose(error)
                else:
                    break
        except EngineError as error:
            self._give_up(error)
            return
        except Exception as error:  # nobody awaits this task, and its requests would wait for ever
            log.error("engine not started again", replica=replica.index, error=repr(error))
            self._give_up(EngineError(f"replica {replica.index} cannot be started again: {error!r}"))
            return
        log.info("engine is back", replica=replica.index, version=replica.engine.version.version)
        self._serving_changed()
        self._queue.admit_waiting()

    async def _catch_up(self, replica: EngineReplica) -> None:
        """Have a restarted engine serve, once it has what the set serves or newer weights."""
        async with self._updating:
            while replica.engine.version < self._served().tag:
                # Fetched: what the set serves was acknowledged, so its files may be filled again.
                async with self._snapshot() as snapshot:
                    await exchange(replica.engine, snapshot)
            replica.serve()

    def _give_up(self, error: EngineError) -> None:
        self._failed = error
        self._queue.refuse(error)
        self._wake.set()

    async def watch(self) -> None:
        """Look after the engines until cancelled. Raises `EngineError` when one is dead for good."""
        while self._failed is None:
            for replica in self.replicas:
                if trouble := replica.trouble():
                    self._lose(replica, EngineLost(trouble))
            try:
                async with asyncio.timeout(self._watch_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
        raise self._failed

    def _serving_changed(self) -> None:
        serving = sum(replica.serves for replica in self.replicas)
        metrics.REPLICAS.set(serving)
        self._on_serving(serving / len(self.replicas))

    def _served(self) -> Weights:
        if self._newest is None:
            raise EngineError("the engine has not started")
        return self._newest

    def _snapshot(self) -> AbstractAsyncContextManager[Weights]:
        """What an engine starts with: the newest snapshot, or, where nothing gives that, the one served."""
        return nullcontext(self._served()) if self._fetch is None else self._fetch()
