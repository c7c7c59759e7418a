"""Groups whose samples make one call each, without a task per sample: as with tasks, in every outcome."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from areal_async.trajectory import Sampling
from areal_async.trajectory.layout import InvariantError
from rollout_service.engines.base import (
    EngineError,
    GenerateRequest,
    GenerateResult,
    RequestError,
)
from rollout_service.workflows import Workflow, load_workflow
from tests.unit.rollout.fakes import (
    BeginningEngine,
    FakeBuffer,
    FakeEngine,
    eventually,
    group,
    without_a_task,
    working,
)
from tests.unit.rollout.fleet import FakeServer, driven


def counted(begun: list[int]) -> Workflow:
    """`single_turn`, which counts the samples that it is called for."""
    built_in = load_workflow("single_turn")

    async def workflow(ctx: Any, task: Any) -> None:
        begun.append(ctx.sample)
        await built_in(ctx, task)

    workflow.only_call = built_in.only_call  # type: ignore[attr-defined]
    return workflow


async def test_a_group_without_tasks_has_the_requests_and_the_bytes_of_one_with_tasks() -> None:
    made, begun = [], []
    for engine in (FakeEngine(), BeginningEngine()):
        groups = FakeBuffer([group(0), group(1, missing=[1, 3], prompt="xyz")])
        how: Any = {"greedy_baseline": True, "episode_timeout_s": 60}
        async with working(groups, workflow=counted(begun), engine=engine, **how) as (_, buffer, _):
            await buffer.until(lambda: [*map(len, buffer.stored.values())] == [4, 2])
        seen = [replace(request, deadline_s=None) for request in engine.seen]
        made.append((sorted(seen, key=lambda each: each.request_id), buffer.stored))
    with_tasks, without = made
    assert [str(request) for request in with_tasks[0]] == [str(request) for request in without[0]]
    assert with_tasks[1] == without[1]
    assert sorted(begun) == [0, 0, 1, 1, 2, 3, 3], "without tasks only the greedy sample runs the workflow"


async def test_a_sample_that_fails_costs_no_other() -> None:
    async def gate(request: GenerateRequest) -> None:
        await asyncio.sleep(0)
        if ".1/" in request.request_id:
            raise RequestError("too long")

    engine = BeginningEngine()
    engine.gate = gate
    async with working(FakeBuffer([group(0), group(1)]), engine=engine) as (_, buffer, _):
        await buffer.until(lambda: len(buffer.released) == 2)
    assert {name: sorted(samples) for name, samples in buffer.stored.items()} == {
        "t0#0": [0, 2, 3],
        "t1#0": [0, 2, 3],
    }
    assert buffer.released == dict.fromkeys(("L0", "L1"), "RequestError: too long")
    assert buffer.failed == {"L0", "L1"}


@pytest.mark.parametrize("engine", [FakeEngine, BeginningEngine])
async def test_an_answer_that_is_invalid_or_aborted_is_handed_back_as_with_tasks(engine: type[FakeEngine]):
    class Odd(engine):  # type: ignore[valid-type, misc]
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            result = await super().generate(request)
            if ".1/" in request.request_id:
                return replace(result, finish_reason="abort")
            return replace(result, logprobs=result.logprobs + 1) if ".2/" in request.request_id else result

    async with working(FakeBuffer([group(0)]), engine=Odd()) as (_, buffer, _):
        await buffer.until(lambda: buffer.released)
    assert sorted(buffer.stored["t0#0"]) == [0, 3]
    assert buffer.released["L0"].startswith((InvariantError.__name__, "EpisodeAborted"))


async def test_a_lost_lease_ends_its_calls_and_no_other() -> None:
    engine = BeginningEngine()
    async with working(engine=engine) as (worker, buffer, _):
        released = engine.hold()
        await buffer.add(group(0, life_ms=30), group(1, life_ms=30))
        await eventually(lambda: len(engine.running) == 8)
        buffer.lost.add("L0")
        await eventually(lambda: worker.running == 4)
        await eventually(lambda: len(engine.cancelled) == 4)
        assert sorted(engine.cancelled) == [f"t0#0.{n}/L0/0" for n in range(4)]
        released.set()
        await buffer.until(lambda: buffer.whole(1))
    assert "t0#0" not in buffer.stored


async def test_a_call_that_is_late_is_aborted_and_its_sample_handed_back() -> None:
    engine = BeginningEngine()
    async with working(engine=engine, episode_timeout_s=0.2) as (worker, buffer, _):
        engine.hold(".2/")
        await buffer.add(group(0))
        await buffer.until(lambda: buffer.released)
        assert worker.running == 0
    assert sorted(buffer.stored["t0#0"]) == [0, 1, 3]
    assert buffer.released["L0"].startswith("DeadlinePassed")
    assert engine.cancelled == ["t0#0.2/L0/0"]


async def test_a_worker_that_stops_gives_its_calls_up_and_hands_the_lease_back() -> None:
    engine = BeginningEngine()
    async with working(engine=engine) as (_, buffer, _):
        engine.hold(".2/")
        await buffer.add(group(0))
        await buffer.until(lambda: len(buffer.stored.get("t0#0", {})) == 3)
    assert engine.cancelled == ["t0#0.2/L0/0"]
    assert buffer.released == {"L0": "drained"}


# --- the set of replicas -----------------------------------------------------------------------------


class TasklessServer(FakeServer):
    def begin(self, request: GenerateRequest) -> asyncio.Future[GenerateResult]:
        return without_a_task(self.generate(request))


def asked(name: str) -> GenerateRequest:
    return GenerateRequest(name, [1], Sampling(max_new_tokens=1))


async def test_calls_of_a_dead_replica_run_again_and_those_given_up_leave_their_place() -> None:
    async with driven(kind=TasklessServer) as fleet:
        calls = {name: fleet.set.begin(asked(name)) for name in ("a", "b", "c", "d", "e", "f", "g")}
        await eventually(lambda: len(fleet.seen) == 5)
        calls.pop("a").cancel()
        await eventually(lambda: len(fleet.seen) == 6)
        fleet.held = False
        fleet.server(0).kill()
        results = await asyncio.gather(*calls.values())
        assert [len(result.token_ids) for result in results] == [1] * 6
        assert len(fleet.made) == 2
        assert len(fleet.where("b")) == 2
        await fleet.set.stop()
        with pytest.raises(EngineError, match="has stopped"):
            await fleet.set.begin(asked("late"))
