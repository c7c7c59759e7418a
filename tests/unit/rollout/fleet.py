"""Engines that die, hang or do not start as a test says: a server behind the protocol, without the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from areal_async.base.processes import RestartPolicy
from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import (
    EngineError,
    EngineLost,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    Tell,
)
from rollout_service.replicas import ReplicaSet
from tests.unit.rollout.fakes import eventually, said
from tests.waiting import LIMIT_S

AT_ONCE = RestartPolicy(limit=3, first_pause_s=0.0)


class Snapshot:
    """Of one version."""

    def __init__(self, version: int, epoch: int = 0) -> None:
        self.tag = VersionTag("policy", epoch, version)
        self.tensors: dict[str, Any] = {}
        self.path = Path("nowhere")


class FakeServer:
    """Answers with its own number, as often as `max_new_tokens` says, once it may."""

    def __init__(self, index: int, fleet: Fleet) -> None:
        self.index = index
        self.fleet = fleet
        self.version = VersionTag("policy", 0, -1)
        self.up = self.asleep = False
        self.dead = False
        self.tokens = self.requests = self.decoded = 0
        self.running: dict[str, asyncio.Future[None]] = {}
        self.seen: list[GenerateRequest] = []
        self.journal: list[str] = []
        self.looks = 0

    def alive(self) -> bool:
        return not self.dead

    async def start(self, snapshot: Any) -> None:
        if self.fleet.start_errors:
            raise self.fleet.start_errors.pop(0)
        self.version, self.up = snapshot.tag, True
        self.journal.append(f"start {snapshot.tag.version}")

    async def generate(self, request: GenerateRequest, tell: Tell | None = None) -> GenerateResult:
        if self.dead or not self.up:
            raise EngineLost("the server is gone")
        for number in range(self.fleet.pieces if tell else 0):
            tell(np.array([number], np.int32))  # type: ignore[misc]
        self.seen.append(request)
        self.fleet.seen.append((self.index, request.request_id))
        ended = self.running[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            if not self.fleet.held:
                await asyncio.sleep(0)
            else:
                await ended
        finally:
            self.running.pop(request.request_id, None)
        self.tokens += 1
        self.requests += 1
        return said([self.index] * request.sampling.max_new_tokens, self.version, reason="length")

    def answer(self, request_id: str) -> None:
        self.running[request_id].set_result(None)

    def kill(self, words: str = "the server was killed") -> None:
        """As by SIGKILL: what is under way fails, and nothing works any more."""
        self.dead = True
        self._fail(EngineLost(words))

    async def pause(self) -> None:
        self.journal.append("pause")

    async def load(self, snapshot: Any) -> None:
        self.journal.append(f"load {snapshot.tag.version}")
        if self.dead:
            raise EngineLost("the server is gone")
        if snapshot.tag.version in self.fleet.misfits:
            raise EngineError("it does not fit")
        self.version = snapshot.tag

    async def resume(self) -> None:
        self.journal.append("resume")
        if self.dead:
            raise EngineLost("the server is gone")

    async def sleep(self) -> None:
        self.journal.append("sleep")
        if self.dead or self.index in self.fleet.sleepless:
            raise EngineLost("the server is gone") if self.dead else EngineError("it cannot sleep")
        self.asleep = True

    async def wake(self) -> None:
        self.journal.append("wake")
        if self.dead:
            raise EngineLost("the server is gone")
        self.asleep = False

    async def device_bytes(self) -> int | None:
        return 0 if self.asleep or self.dead or not self.up else 7

    async def abort(self, request_ids: Iterable[str]) -> None:
        self.journal.append(f"abort {' '.join(request_ids)}")

    def stats(self) -> EngineStats:
        self.looks += 1
        running = min(len(self.running), self.fleet.capacity)
        waiting = len(self.running) - running
        capacity = self.fleet.capacity
        counts = (running, waiting, capacity, 0.0, self.tokens, self.requests, 0.0)
        return EngineStats(*counts, decoded=self.decoded)

    async def stop(self) -> None:
        self.dead = True
        self._fail(EngineError("the engine has stopped"))

    def _fail(self, error: EngineError) -> None:
        for ended in self.running.values():
            if not ended.done():
                ended.set_exception(error)


class Fleet:
    """All servers that were ever made, and the set over them."""

    def __init__(
        self, count: int = 1, *, capacity: int = 4, kind: type[FakeServer] = FakeServer, **how: Any
    ) -> None:
        self.capacity, self.kind = capacity, kind
        self.pieces = 0
        """Units that a server tells before it answers."""
        self.held = True
        """Whether requests end only when the test says so."""
        self.made: list[FakeServer] = []
        self.seen: list[tuple[int, str]] = []
        """Every request as it began: replica and id."""
        self.start_errors: list[EngineError] = []
        self.misfits: set[int] = set()
        self.sleepless: set[int] = set()
        """Replicas whose server refuses to sleep."""
        self.set = ReplicaSet(self._make, count, **({"restarts": AT_ONCE} | how))

    def _make(self, index: int) -> Any:
        self.made.append(self.kind(index, self))
        return self.made[-1]

    def server(self, index: int) -> FakeServer:
        """The one that is there now."""
        return next(server for server in reversed(self.made) if server.index == index)

    def ask(self, name: str, tell: Tell | None = None, **marks: Any) -> asyncio.Task[GenerateResult]:
        request = GenerateRequest(name, [1], Sampling(max_new_tokens=1), **marks)
        return asyncio.ensure_future(self.set.generate(request, tell))

    async def begin(self, *names: str) -> list[asyncio.Task[GenerateResult]]:
        """Ask these, and wait until all have begun."""
        asked = [self.ask(name) for name in names]
        await eventually(lambda: all(map(self.where, names)))
        return asked

    def where(self, name: str) -> list[int]:
        """The replicas on which a request began, in order."""
        return [index for index, request_id in self.seen if request_id == name]

    def let_go(self) -> None:
        """Requests end by themselves from now on, those under way at once."""
        self.held = False
        for server in self.made:
            for name in list(server.running):
                server.answer(name)

    async def looked(self) -> None:
        """Until each server that is there was looked at once more, and thought over."""
        seen = [(server, server.looks) for server in self.made if server.alive()]
        await eventually(lambda: all(server.looks > looks + 1 or server.dead for server, looks in seen))


@asynccontextmanager
async def driven(count: int = 1, *, started: bool = True, **how: Any) -> AsyncIterator[Fleet]:
    """A fleet that serves version 0, within a deadline."""
    fleet = Fleet(count, **how)
    watching: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(LIMIT_S):
            if started:
                await fleet.set.start(Snapshot(0))
                watching = asyncio.ensure_future(fleet.set.watch())
            yield fleet
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await fleet.set.stop()
