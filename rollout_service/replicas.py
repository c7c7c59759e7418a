"""Several engines of one worker behind the face of one.

Promises:
- A request goes where its prefix is, or where there is room (`placement.py`). What finds no room waits here,
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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Literal

from areal_async.rpc.messages import VersionTag
from areal_async.runtime.log import get_logger
from areal_async.runtime.restart import NO_RESTARTS, RestartPolicy
from rollout_service import metrics
from rollout_service.engines.base import (
    Capabilities,
    DeadlinePassed,
    Engine,
    EngineError,
    EngineLost,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Weights,
    nothing_sampled,
)
from rollout_service.engines.streaming import Piece, Telling, generate_telling, stream_of
from rollout_service.exchange import Stall, exchange, pause_load_resume
from rollout_service.placement import Homes, choose
from rollout_service.progress import WATCH_S
from rollout_service.replica import Fetch, Replica, fetching
from rollout_service.waitingroom import Aborted, WaitingRoom

log = get_logger("replicas")

MAX_SENT_AGAIN = 3
"""Times that one request is lost in an engine that lives, before that engine is taken for dead."""


class ReplicaSet:
    """Implements `engines.base.Engine` over `count` engines that `make(index)` gives."""

    def __init__(
        self,
        make: Callable[[int], Engine],
        count: int = 1,
        *,
        order: Literal["together", "in_turn"] = "together",
        restarts: RestartPolicy = NO_RESTARTS,
        stuck_s: float = 300.0,
        newest: Fetch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`order`: whether an update stops all engines at once or one after the other. `newest` gives the
        snapshot that a restarted engine starts with; None: the last one loaded."""
        self.replicas = [Replica(index, make, restarts, stuck_s, clock) for index in range(count)]
        self.on_serving: Callable[[float], None] = lambda share: None
        """Told which share of the replicas serves, whenever that changes."""
        self.on_exchange: Callable[[bool], None] = lambda going_on: None
        """Told of the beginning and of the end of each exchange of weights."""
        self._order = order
        self._fetch = fetching(self._served, newest)
        self._homes = Homes()
        self._waiting = WaitingRoom(self._place)
        self._updating = asyncio.Lock()
        """Held while weights are exchanged, and while a restarted engine catches up."""
        self._paused = False
        """It is held by `pause`."""
        self._newest: Weights | None = None
        self._revivals: set[asyncio.Task[None]] = set()
        self._failed: EngineError | None = None
        self._wake = asyncio.Event()
        self._stopping = False

    # --- the protocol --------------------------------------------------------------------------------

    @property
    def version(self) -> VersionTag:
        serving = [replica.engine.version for replica in self.replicas if replica.serves]
        return min(serving, default=self._served().tag)

    @property
    def capabilities(self) -> Capabilities:
        return next((r for r in self.replicas if r.serves), self.replicas[0]).engine.capabilities

    def alive(self) -> bool:
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
        self._tell_serving()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._in_time(request, None)

    def stream(self, request: GenerateRequest) -> AsyncIterator[Piece | GenerateResult]:
        """As `engines/streaming.py` has it; one result and no pieces from an engine that tells none. Raises
        `EngineError` when the engine was lost and pieces had been told."""
        return stream_of(lambda tell: self._in_time(request, Telling(tell)))

    async def _in_time(self, request: GenerateRequest, tell: Telling | None) -> GenerateResult:
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

    async def pause(self) -> None:
        await self._updating.acquire()
        self._paused = True
        if self._order == "together":
            await self._all(lambda replica: replica.engine.pause(), begin=True)

    async def load(self, snapshot: Weights) -> None:
        if self._order == "in_turn":
            await self._in_turn(snapshot)
        else:
            await self._all(lambda replica: self._load_one(replica, snapshot))
        self._newest = snapshot

    async def resume(self) -> None:
        try:
            if self._order == "together":
                await self._all(lambda replica: replica.engine.resume(), end=True)
        finally:
            if self._paused:
                # Not so when the pause was cancelled before its turn.
                self._paused = False
                self._updating.release()
            self._waiting.hand_out()

    async def abort(self, request_ids: Iterable[str]) -> None:
        wanted = set(request_ids)
        self._waiting.abort(wanted)
        await self._all(lambda replica: replica.engine.abort(wanted))

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
        )

    async def stop(self) -> None:
        self._stopping = True
        for task in self._revivals:
            task.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)
        await asyncio.gather(*(replica.engine.stop() for replica in self.replicas))
        self._waiting.refuse(EngineError("the engine has stopped"))

    # --- updates -------------------------------------------------------------------------------------

    async def exchange(self, snapshot: Weights) -> Stall:
        """Serve `snapshot` on every replica that lives; returns the stall of the slowest."""
        self.on_exchange(True)
        try:
            if self._order == "together":
                return await pause_load_resume(self, snapshot)
            async with self._updating:
                stalls = await self._in_turn(snapshot)
                self._newest = snapshot
            return max(stalls, key=lambda stall: stall.total_s, default=Stall())
        finally:
            self.on_exchange(False)

    async def _in_turn(self, snapshot: Weights) -> list[Stall]:
        stalls: list[Stall] = []
        for replica in self.replicas:
            if replica.serves and replica.engine.version < snapshot.tag:
                await self._attempt(replica, self._swap(replica, snapshot, stalls))
        return stalls

    async def _swap(self, replica: Replica, snapshot: Weights, stalls: list[Stall]) -> None:
        replica.updating = True
        try:
            stalls.append(await pause_load_resume(replica.engine, snapshot, replica.tell_version))
        finally:
            replica.updating = False
            self._waiting.hand_out()

    async def _load_one(self, replica: Replica, snapshot: Weights) -> None:
        # One that was restarted with the newest has it.
        if replica.engine.version < snapshot.tag:
            await replica.engine.load(snapshot)
            replica.tell_version()

    async def _all(
        self,
        work: Callable[[Replica], Coroutine[Any, Any, None]],
        *,
        begin: bool = False,
        end: bool = False,
    ) -> None:
        """On every replica that serves. An engine that is lost meanwhile is none of the others' business;
        any other error is raised when all are done."""
        serving = [replica for replica in self.replicas if replica.serves]
        for replica in serving:
            replica.updating = replica.updating or begin
        results = await asyncio.gather(
            *(self._attempt(replica, work(replica)) for replica in serving), return_exceptions=True
        )
        for replica in self.replicas:
            replica.updating = replica.updating and not end
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _attempt(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        engine = replica.engine
        try:
            await work
        except EngineError as error:
            if not self._was_lost(replica, engine, error):
                raise

    # --- requests ------------------------------------------------------------------------------------

    async def _generate(self, request: GenerateRequest, tell: Telling | None) -> GenerateResult:
        sent_again = 0
        while True:
            try:
                replica = self._find(request) or await self._waiting.wait(request)
            except Aborted:
                return nothing_sampled()
            engine = replica.engine
            try:
                if tell is None:
                    return await engine.generate(request)
                return await generate_telling(engine, request, tell)
            except EngineError as error:
                if isinstance(error, DeadlinePassed):
                    raise
                serves = replica.engine is engine and replica.serves and engine.alive()
                if isinstance(error, EngineLost) and serves and sent_again < MAX_SENT_AGAIN:
                    # Its connection broke, or the server ended it: no reason to end all the others too.
                    sent_again += 1
                elif not self._was_lost(replica, engine, error):
                    raise
                if tell is not None and tell.units:
                    told = f"{tell.units} units of the answer had been streamed"
                    raise EngineError(f"the engine was lost when {told}: {error}") from error
                metrics.RERUN.inc()
            finally:
                if replica.engine is engine:  # a new one has been given nothing
                    replica.give_back()
                if self._waiting:
                    self._waiting.hand_out()

    def _find(self, request: GenerateRequest) -> Replica | None:
        """The replica for a request, which then counts as given to it; None when it must wait."""
        if self._stopping or self._failed is not None:
            raise self._failed or EngineError("the engine has stopped")
        if self._waiting:
            return None
        return self._place(request)

    def _place(self, request: GenerateRequest) -> Replica | None:
        if len(self.replicas) == 1:
            (replica,) = self.replicas
            if not replica.serves or not replica.has_room:
                return None
        else:
            serving = [replica for replica in self.replicas if replica.serves]
            going_on = [replica for replica in serving if not replica.updating] or serving
            index = choose([replica.load() for replica in going_on], self._homes.find(request.session))
            if index is None:
                return None
            self._homes.settle(request.session, index)
            replica = self.replicas[index]
        replica.given += 1
        return replica

    # --- deaths --------------------------------------------------------------------------------------

    def _was_lost(self, replica: Replica, engine: Engine, error: EngineError) -> bool:
        """Whether `error` means that `engine` is gone, so that what it was doing may be done again."""
        if self._stopping or self._failed is not None:
            return False
        if replica.engine is not engine or not replica.serves:
            return True
        if not isinstance(error, EngineLost) and engine.alive():
            return False
        self._lose(replica, error)
        return True

    def _lose(self, replica: Replica, error: EngineError) -> None:
        log.warning("engine lost", replica=replica.index, running=replica.given, error=str(error))
        replica.lose(error)
        self._homes.leave(replica.index)
        self._tell_serving()
        task = asyncio.get_running_loop().create_task(self._revive(replica))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, replica: Replica) -> None:
        try:
            while True:
                await replica.revive(self._fetch)
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
        self._tell_serving()
        self._waiting.hand_out()

    async def _catch_up(self, replica: Replica) -> None:
        """Have a restarted engine serve, once it has what the set serves or newer weights."""
        async with self._updating:
            while replica.engine.version < self._served().tag:
                # Fetched: what the set serves was acknowledged, so its files may be filled again.
                async with self._fetch() as snapshot:
                    await exchange(replica.engine, snapshot)
            replica.serve()

    def _give_up(self, error: EngineError) -> None:
        self._failed = error
        self._waiting.refuse(error)
        self._wake.set()

    async def watch(self) -> None:
        """Look after the engines, for ever. Raises `EngineError` when one is dead for good."""
        while self._failed is None:
            for replica in self.replicas:
                if trouble := replica.trouble():
                    self._lose(replica, EngineLost(trouble))
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
        raise self._failed

    def _tell_serving(self) -> None:
        serving = sum(replica.serves for replica in self.replicas)
        metrics.REPLICAS.set(serving)
        self.on_serving(serving / len(self.replicas))

    def _served(self) -> Weights:
        if self._newest is None:
            raise EngineError("the engine has not started")
        return self._newest
