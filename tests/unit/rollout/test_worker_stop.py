"""Planned stops of a worker: draining, and the grace of a SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import Leases
from rollout_service.engines.base import EngineError, GenerateRequest
from rollout_service.worker import WorkerTiming
from rollout_service.worker.failures import MAX_FAILURES
from rollout_service.workflows import WorkflowError
from tests.unit.rollout.fakes import FakeBuffer, FakeEngine, eventually, group, working


@asynccontextmanager
async def draining() -> AsyncIterator[tuple[Any, FakeBuffer, asyncio.Event]]:
    """A worker with one group under way that is told to drain, and what lets its engine go on."""
    async with working() as (worker, buffer, engine):
        release = engine.hold()
        await buffer.add(group(0, life_ms=90))
        await eventually(lambda: worker.running == 4)
        await buffer.drain("rollout-0", "it is to be moved")
        await eventually(lambda: worker.draining)
        yield worker, buffer, release


async def test_a_worker_that_need_not_drain_any_more_does_not_say_so() -> None:
    async with draining() as (_, buffer, _):
        assert REGISTRY.get_sample_value("areal_rollout_draining") == 1
        buffer.draining = False  # another buffer has taken over, and knows of no drain
        await eventually(lambda: REGISTRY.get_sample_value("areal_rollout_draining") == 0)


async def test_a_stop_sends_what_is_finished_and_hands_the_rest_over() -> None:
    async with working(timing=WorkerTiming(drain_s=0.05)) as (worker, buffer, engine):
        engine.hold(".3/")
        await buffer.add(group(0), group(1))
        await eventually(lambda: worker.running == 2)
    assert {k: sorted(v) for k, v in buffer.stored.items()} == {"t0#0": [0, 1, 2], "t1#0": [0, 1, 2]}
    assert buffer.released == {"L0": "drained", "L1": "drained"}
    assert engine.running == {}
    assert not worker.drained, "it was told to stop"


async def test_a_stop_waits_for_what_finishes_within_the_grace_and_leases_no_more() -> None:
    """`SIGTERM` sets `stop`; the episodes that run then are not lost."""
    stop, engine = asyncio.Event(), FakeEngine()
    release = engine.hold()
    async with working(FakeBuffer([group(0)]), engine=engine, stop=stop) as (worker, buffer, _):
        await eventually(lambda: worker.running == 4)
        stop.set()
        await buffer.until(lambda: buffer.draining)
        await buffer.add(group(1))
        release.set()
    assert buffer.whole(0)
    assert buffer.released == {}
    assert len(buffer.groups) == 1, "nothing was leased after the stop"


async def test_what_is_granted_to_a_worker_that_stops_goes_back_at_once() -> None:
    """The answer to a lease request may be on its way when the stop comes."""

    class Late(FakeBuffer):
        async def lease(self, *_: Any, **__: Any) -> Leases:
            self.asked.append((1, VersionTag("policy", 0, 0)))
            await self.tell()
            await self.until(lambda: self.draining)
            return Leases([group(0)] if len(self.asked) == 1 else [])

    async with working(Late()) as (_worker, buffer, engine):
        await buffer.until(lambda: buffer.asked)
    assert buffer.released == {"L0": "drained"}
    assert engine.seen == []


async def test_a_worker_that_fails_does_not_say_that_it_drained() -> None:
    timing = WorkerTiming(longest_failure_pause_s=0.0)
    with pytest.raises(WorkflowError):  # noqa: PT012
        async with working(timing=timing, max_concurrent=64) as (worker, buffer, engine):

            async def broken(request: GenerateRequest) -> None:
                raise EngineError("broken")

            engine.hold()
            await buffer.add(group(0))
            await eventually(lambda: worker.running == 4)
            engine.gate = broken
            for number in range(1, 1 + MAX_FAILURES):
                await buffer.add(group(number, missing=[0]))
                await buffer.until(lambda n=number: f"L{n}" in buffer.released or n == MAX_FAILURES)
            await buffer.until(lambda: "L0" in buffer.released)
            assert buffer.released["L0"] == "the worker failed"


async def test_a_stop_does_not_wait_for_a_buffer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with working(timing=WorkerTiming(drain_s=0.05, flush_s=0.05)) as (worker, buffer, _engine):

        async def gone(*_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

        buffer.on_put = gone
        monkeypatch.setattr(buffer, "release", gone)
        await buffer.add(group(0))
        await eventually(lambda: worker.uploader.queue.episodes == 4)


async def test_a_draining_worker_leases_no_more_and_ends_once_it_has_finished_what_it_has() -> None:
    async with draining() as (worker, buffer, release):
        assert worker.wanted_groups() == 0
        release.set()
        await asyncio.Event().wait()  # the block ends with the worker
    assert worker.drained
    assert buffer.whole(0)
    assert buffer.released == {}


async def test_a_drained_worker_whose_time_is_over_hands_back_the_rest_and_counts_as_drained() -> None:
    async with draining() as (worker, buffer, _):
        pass
    assert buffer.released == {"L0": "drained"}
    assert worker.drained
