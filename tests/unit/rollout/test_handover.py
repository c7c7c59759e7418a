"""Real workers on the real ledger: one is stopped as planned, another goes on where it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from areal_async.config.job import JobConfig
from areal_async.rpc.messages import Lease, PutEpisodes
from areal_async.rpc.schema import VersionTag
from replay_buffer.ledger.leasing import StoreEpisodes
from replay_buffer.server import read_arrival
from rollout_service.engines.base import GenerateRequest
from rollout_service.worker import Worker, WorkerTiming
from rollout_service.workflows import Renderer, load_workflow
from tests.unit.buffer.conftest import Driver
from tests.unit.rollout.fakes import FakeEngine, LetterTokenizer, eventually

DEADLINE_S = 20.0


class LedgerBuffer:
    """A driven ledger as a worker sees it. `changed` is notified after each message."""

    def __init__(self, ledger: Any) -> None:
        self.ledger = ledger
        self.changed = asyncio.Condition()

    async def _send(self, command: Any) -> Any:
        reply = self.ledger.send(command)
        async with self.changed:
            self.changed.notify_all()
        return reply

    async def call(self, request: Any, *, timeout_s: float = 0, attachments: Any = ()) -> Any:
        if isinstance(request, PutEpisodes):
            put = zip(request.samples, map(memoryview, attachments), strict=True)
            arrivals = tuple(read_arrival("test", request.group_id, sample, blob) for sample, blob in put)
            request = StoreEpisodes(request.lease_id, request.group_id, arrivals)
        reply = await self._send(request)
        if isinstance(request, Lease) and not reply.groups and not reply.drain:
            async with self.changed:
                await self.changed.wait()
            reply = await self._send(request)
        return reply

    async def until(self, condition: Callable[[], object]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)


def opened(**rules: Any) -> Driver:
    """A ledger with these rules, its trainer opened at step 0."""
    ledger = Driver(**rules)
    ledger.open()
    return ledger


def gated() -> tuple[FakeEngine, dict[int, asyncio.Event]]:
    """An engine of version 0 that answers once the gate of the sample is open."""
    engine, gates = FakeEngine(), {sample: asyncio.Event() for sample in range(4)}

    async def gate(request: GenerateRequest) -> None:
        await gates[int(episode_of(request)[-1])].wait()

    engine.gate, engine.version = gate, VersionTag("policy", 1, 0)
    return engine, gates


def episode_of(request: GenerateRequest) -> str:
    return request.request_id.partition("/")[0]


def a_worker(buffer: LedgerBuffer, engine: FakeEngine, name: str) -> Worker:
    rollout = {"group_size": 4, "max_concurrent": 8}
    job = JobConfig.model_validate(
        {"job": "test", "model": "m", "tasks": {"train": "t.jsonl"}, "rollout": rollout}
    )
    workflow, render = load_workflow("single_turn"), Renderer(LetterTokenizer())
    return Worker(buffer, engine, workflow, render, job=job, name=name, timing=WorkerTiming(drain_s=0.3))


async def test_trained_effectively_once_what_a_stopped_worker_stored_is_not_generated_again() -> None:
    """`SIGTERM` sets the stop signal. Samples 0 and 1 are stored by then, 2 finishes within the grace, 3 does
    not."""
    ledger = opened(group_size=4, batch_groups=2, max_staleness=0)
    buffer = LedgerBuffer(ledger)
    (first, first_gates), (second, second_gates) = gated(), gated()
    for sample in (0, 1):
        first_gates[sample].set()
    stops = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.ensure_future(a_worker(buffer, first, "rollout-0").run(stops[0]))
        await buffer.until(lambda: ledger.count("stored") == 4)
        other = asyncio.ensure_future(a_worker(buffer, second, "rollout-1").run(stops[1]))
        stops[0].set()
        await buffer.until(lambda: ledger.count("worker_drains"))
        first_gates[2].set()
        await running
        assert ledger.count("stored") == 6
        assert ledger.count("queued:drained") == 2
        for gate in second_gates.values():
            gate.set()
        await buffer.until(lambda: ledger.count("generated") == 2)
        stops[1].set()
        await other
    assert sorted(map(episode_of, second.seen)) == [f"cafe0123:{row}:0#0.3" for row in (0, 1)]
    assert len(first.seen) == 8
    assert ledger.count("stored") == 8
    assert not [reason for reason in ledger.index.meta.counts if reason.startswith("refused")]
    ledger.judge(ledger.claim())
    assert len(ledger.batch().groups) == 2


async def test_groups_are_whole_a_worker_aborts_what_its_groups_deadline_gave_up() -> None:
    ledger = opened(
        group_size=4,
        batch_groups=1,
        max_staleness=0,
        lease_ms=100,
        group_policy="deadline_partial",
        group_deadline_ms=50,
        min_samples=1,
    )
    buffer, (engine, gates) = LedgerBuffer(ledger), gated()
    gates[0].set()
    stop = asyncio.Event()
    worker = a_worker(buffer, engine, "rollout-0")
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.ensure_future(worker.run(stop))
        await buffer.until(lambda: ledger.count("stored") == 1)
        ledger.now_ms += 50
        await buffer.until(lambda: ledger.count("absent") == 3)
        await eventually(lambda: not worker.running)
        stop.set()
        await running
    assert ledger.count("queued:drained") == 0
    assert ledger.count("generated:deadline") == 1
