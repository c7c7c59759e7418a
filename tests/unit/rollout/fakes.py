"""A buffer and an engine that a test of the worker holds in its hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from areal_async.base.records import Task
from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from areal_async.rpc.messages import (
    FetchedMedia,
    GroupSamples,
    HeartbeatAck,
    LeasedGroup,
    Leases,
    PutAck,
    StoredGroup,
)
from areal_async.rpc.weights_messages import SnapshotNotice
from rollout_service.engines.base import EngineStats, GenerateRequest, GenerateResult
from rollout_service.process import sampling_of
from rollout_service.worker import Worker, WorkerTiming
from rollout_service.workflows import PolicyEngine, Renderer, load_workflow
from tests.callers import FakeCaller
from tests.waiting import deadline_s

DEADLINE_S = deadline_s(120)
TIMING = WorkerTiming()


async def eventually(condition: Callable[[], object]) -> None:
    """For states that raise no event; the deadline is that of the whole drive."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def said(
    ids: Any, version: VersionTag, text: str = "", reason: Any = "stop", logprobs: Any = 0.0
) -> GenerateResult:
    """An answer of these ids, all under one version."""
    ids = np.array(ids, np.int32)
    versions, epochs = np.full_like(ids, version.version), np.full_like(ids, version.epoch)
    return GenerateResult(ids, np.zeros(len(ids), np.float32) + logprobs, versions, epochs, reason, text)


class LetterTokenizer:
    """One id per character."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


class FakeEngine:
    """Answers every request with its prompt backwards, when `gate` lets it."""

    def __init__(self) -> None:
        self.version = VersionTag("policy", 0, 0)
        self.gate: Callable[[GenerateRequest], Coroutine[Any, Any, None]] | None = None
        self.running: dict[str, GenerateRequest] = {}
        self.seen: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.most = 0

    def hold(self, part: str = "") -> asyncio.Event:
        """Requests with this in their ids wait until the event is set."""
        released = asyncio.Event()

        async def gate(request: GenerateRequest) -> None:
            if part in request.request_id:
                await released.wait()

        self.gate = gate
        return released

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        assert request.request_id not in self.running
        self.running[request.request_id] = request
        self.seen.append(request)
        self.most = max(self.most, len(self.running))
        try:
            if self.gate is not None:
                await self.gate(request)
            else:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            del self.running[request.request_id]
        ids = list(request.prompt_ids)[::-1]
        logprobs = -np.arange(len(ids), dtype=np.float32)
        return said(ids, self.version, "".join(map(chr, ids)), logprobs=logprobs)

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), 0, 8, 0.0, 0, 0, 0.0)


def without_a_task(work: Coroutine[Any, Any, GenerateResult]) -> asyncio.Future[GenerateResult]:
    """A future as an engine's `begin` returns it: who cancels it, or sets an error, ends the work."""
    call: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(work)

    def ended(task: asyncio.Task[GenerateResult]) -> None:
        if task.cancelled() or call.done():
            return
        if (error := task.exception()) is not None:
            call.set_exception(error)
        else:
            call.set_result(task.result())

    task.add_done_callback(ended)
    call.add_done_callback(lambda _: task.cancel())
    return call


class BeginningEngine(FakeEngine):
    """Its requests need no task of the worker."""

    def begin(self, request: GenerateRequest) -> asyncio.Future[GenerateResult]:
        return without_a_task(self.generate(request))


class FakeBuffer(FakeCaller):
    """Hands out the groups it was given, and keeps what it is sent."""

    def __init__(self, groups: Iterable[LeasedGroup] = ()) -> None:
        self.groups = list(groups)
        self.stored: dict[str, dict[int, bytes]] = {}
        self.puts: list[tuple[str, list[int]]] = []
        self.asked: list[tuple[int, VersionTag]] = []
        self.beats: list[list[str]] = []
        self.released: dict[str, str] = {}
        self.failed: set[str] = set()
        """Of those released, what failed by what its episodes do."""
        self.changed = asyncio.Condition()
        self.on_put: Callable[[str, str, Any], Coroutine[Any, Any, StoredGroup | None]] | None = None
        self.lost: set[str] = set()
        self.draining = False
        self.media: dict[str, bytes] = {}
        self.media_asked: list[dict[str, list[str]]] = []
        self.media_put: list[tuple[list[int], dict[str, bytes]]] = []

    async def fetch_media(self, groups: dict[str, list[str]]) -> Any:
        self.media_asked.append(groups)
        wanted = [digest for some in groups.values() for digest in some]
        found = [digest for digest in wanted if digest in self.media]
        lost = [digest for digest in wanted if digest not in self.media]
        return FetchedMedia(found, lost), [memoryview(self.media[digest]) for digest in found]

    async def lease(
        self, worker: str, capacity: int, serving: list[VersionTag], *, wait_ms: int = 0
    ) -> Leases:
        self.asked.append((capacity, *serving))
        await self.tell()
        async with self.changed:
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self.changed.wait_for(lambda: self.groups or self.draining)
            except TimeoutError:
                return Leases([], "there is nothing")
            if self.draining:
                return Leases([], "this worker drains", drain=True)
            granted, self.groups = self.groups[:capacity], self.groups[capacity:]
            return Leases(granted)

    async def heartbeat(self, worker: str, lease_ids: Any) -> HeartbeatAck:
        self.beats.append(list(lease_ids))
        await self.tell()
        return HeartbeatAck(sorted(self.lost & set(lease_ids)), self.draining)

    async def drain(self, worker: str, reason: str) -> None:
        self.draining = True
        await self.tell()

    async def release(self, worker: str, lease_id: str, reason: str, *, failed: bool = False) -> None:
        self.released[lease_id] = reason
        if failed:
            self.failed.add(lease_id)
        await self.tell()

    async def put_episodes(self, puts: list[tuple[GroupSamples, Any, Any, Any]]) -> PutAck:
        self.media_put += [
            (put.samples, {digest: bytes(data) for digest, data in media.items()})
            for put, _, _, media in puts
        ]
        return PutAck(
            [await self._store(put.lease_id, put.group_id, given) for put, given, *_ in puts], "memory"
        )

    async def _store(self, lease_id: str, group_id: str, episodes: Any) -> StoredGroup:
        if self.on_put is not None and (answer := await self.on_put(lease_id, group_id, episodes)):
            return answer
        self.puts.append((lease_id, list(episodes)))
        self.stored.setdefault(group_id, {}).update({s: bytes(b) for s, b in episodes.items()})
        await self.tell()
        return StoredGroup(list(episodes))

    async def add(self, *groups: LeasedGroup) -> None:
        self.groups += groups
        await self.tell()

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], object]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    def whole(self, *numbers: int) -> bool:
        return all(len(self.stored.get(f"t{n}#0", {})) == 4 for n in numbers)


class Over(Exception):
    """The script has ended."""


class ScriptedSource:
    """`news` are answered one by one. A version opens as what `opens` has for it, else as its notice. Errors
    in both are raised."""

    def __init__(self, *news: Any, opens: dict[int, Any] | None = None) -> None:
        self._news = iter(news)
        self._opens = opens or {}
        self.asked: list[VersionTag | None] = []
        self.acks: list[tuple[int, str]] = []
        self.journal: list[str] = []

    async def next(self, after: VersionTag | None, wait_ms: int = 0) -> Any:
        self.asked.append(after)
        assert wait_ms > 0
        answer = next(self._news, Over())
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def open(self, notice: SnapshotNotice) -> Any:
        self.journal.append(f"verify {notice.tag.version}")
        found = self._opens.get(notice.tag.version, notice)
        if isinstance(found, Exception):
            raise found
        return found

    async def ack(self, tag: VersionTag, stall_ms: float = 0.0, error: str = "") -> None:
        self.journal.append(f"ack {tag.version}")
        self.acks.append((tag.version, error))


def notice(version: int, *, final: bool = False) -> SnapshotNotice:
    return SnapshotNotice(VersionTag("policy", 0, version), "", "", final)


def group(
    number: int, *, prompt: str = "abc", life_ms: int = 30_000, missing: Any = (0, 1, 2, 3)
) -> LeasedGroup:
    task = Task(f"t{number}", prompt, ground_truth="cba")
    return LeasedGroup(f"t{number}#0", f"L{number}", 0, task, 4, list(missing), 1000 + number, life_ms)


def job(**rollout: Any) -> JobConfig:
    section = {"group_size": 4, "max_concurrent": 8} | rollout
    return JobConfig.model_validate(
        {"job": "test", "model": "m", "tasks": {"train": "t.jsonl"}, "rollout": section}
    )


@asynccontextmanager
async def working(
    buffer: FakeBuffer | None = None,
    *,
    workflow: Any = None,
    engine: Any = None,
    timing: WorkerTiming = TIMING,
    stop: asyncio.Event | None = None,
    **rollout: Any,
) -> AsyncIterator[tuple[Worker, FakeBuffer, FakeEngine]]:
    """A worker that runs, and is stopped at the end of the block, within a deadline. Should it end before, so
    does the block. Raises what the worker raises."""
    held, fake, stop = buffer or FakeBuffer(), engine or FakeEngine(), stop or asyncio.Event()
    config = job(**rollout)
    voice = PolicyEngine(fake, Renderer(LetterTokenizer()), sampling_of(config.rollout.sampling))
    worker = Worker(
        held,
        {config.policy: voice},
        workflow or load_workflow("single_turn"),
        job=config,
        name="rollout-0",
        timing=timing,
    )
    running, block = asyncio.ensure_future(worker.run(stop)), asyncio.current_task()
    assert block is not None
    running.add_done_callback(lambda _: stop.is_set() or block.cancel())
    try:
        async with asyncio.timeout(DEADLINE_S):
            try:
                yield worker, held, fake
            except asyncio.CancelledError:
                if not running.done():
                    raise
                block.uncancel()
            stop.set()
            await running
    finally:
        stop.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
