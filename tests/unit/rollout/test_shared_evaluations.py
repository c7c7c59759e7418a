"""Evaluations on the engine of a worker, which also sleeps for the trainer and gets newer weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areal_async.base.records import Task
from areal_async.base.versions import VersionTag
from areal_async.rpc.weights_messages import NoNews
from areal_async.service.record import RunLog
from rollout_service.evaluator import EvaluationError, Evaluator, SharedEvaluations
from rollout_service.replicas import ReplicaSet
from rollout_service.worker.weight_updates import WeightUpdates
from rollout_service.workflows import Renderer, load_workflow
from tests.unit.rollout.fakes import Over, eventually, notice
from tests.unit.rollout.test_evaluator import PROMPTS, Exact, greedy, job
from tests.waiting import LIMIT_S


class Publisher:
    """The versions that a trainer offers to one receiver: the newest, or the pinned ones in order."""

    def __init__(self, made: Any, *pinned: int, newest: list[int]) -> None:
        self.made, self.pinned, self.newest = made, list(pinned), newest
        self.acks: list[tuple[int, str]] = []

    async def connect(self, timeout_s: float = 0.0) -> None:
        pass

    def evaluating(self) -> Any:
        return _Evaluating(self)

    async def next(self, after: VersionTag | None, wait_ms: int = 0) -> Any:
        served = -1 if after is None else after.version
        while self.newest and self.newest[0] <= served:
            self.newest.pop(0)
        if not self.newest:
            raise Over
        return notice(self.newest[0])

    async def open(self, news: Any) -> Any:
        return self.made.weights(news.tag.version)

    async def ack(self, tag: VersionTag, stall_ms: float = 0.0, error: str = "") -> None:
        self.acks.append((tag.version, error))


class _Evaluating:
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.connect, self.open = publisher.connect, publisher.open
        self.acks: list[tuple[int, str]] = []

    async def next(self, after: VersionTag | None, wait_ms: int = 0) -> Any:
        left = [pin for pin in self._publisher.pinned if after is None or pin > after.version]
        return notice(left[0]) if left else NoNews()

    async def ack(self, tag: VersionTag, stall_ms: float = 0.0, error: str = "") -> None:
        self.acks.append((tag.version, error))
        self._publisher.pinned.remove(tag.version)


class Shared:
    """A worker's engine with its updates and evaluations; `versions` are those that it served, in order,
    and one twice if the engine began with it before the worker heard of it."""

    def __init__(
        self, made: Any, tmp_path: Path, publisher: Publisher, workflow: Any = None, **how: Any
    ) -> None:
        self.engine = ReplicaSet(lambda _: made.engine(slots=4))
        self.scorer, self.publisher = Exact(), publisher
        render, self.path = Renderer(AutoTokenizer.from_pretrained(made.directory)), tmp_path / "log.jsonl"
        workflow = workflow or load_workflow("single_turn")
        how = {"job": job(made), "shares": True} | how
        evaluator = Evaluator(self.engine, self.scorer, workflow, render, **how)
        self.tasks = [Task(f"t{n}", prompt, ground_truth="1") for n, prompt in enumerate(PROMPTS)]
        source = publisher.evaluating()
        self.evaluations = SharedEvaluations(source, evaluator, self.tasks, RunLog(self.path))
        self.versions: list[int] = []
        self.updates = WeightUpdates(
            publisher,  # type: ignore[arg-type]
            self.engine,
            lambda: self.versions.append(self.engine.version.version),
            evaluations=self.evaluations,
        )

    async def run(self) -> list[dict[str, Any]]:
        async with asyncio.timeout(LIMIT_S):
            try:
                first = await self.updates.start()
                self.versions.append(first.version)
                await self.updates.run()
            except Over:
                pass
        await self.engine.stop()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


async def test_each_pinned_version_is_evaluated_before_newer_weights_are_loaded(endless, tmp_path):
    """The worker is started while version 2 waits for its evaluation, and version 5 and 7 are newest."""
    shared = Shared(endless, tmp_path, Publisher(endless, 2, 5, newest=[3, 7]))
    records = await shared.run()
    assert [record["version"] for record in records] == [2, 5]
    assert shared.versions == [2, 3, 7]
    for version, responses in zip((2, 5), shared.scorer.responses, strict=True):
        assert sorted(responses) == sorted(greedy(endless, version, PROMPTS))
    assert shared.evaluations.source.acks == [(2, ""), (5, "")]


@pytest.mark.parametrize("turns", [1, 3])
async def test_a_turn_of_the_trainer_interrupts_an_evaluation_which_goes_on_with_the_same_weights(
    endless, tmp_path, turns
):
    shared = Shared(endless, tmp_path, Publisher(endless, 2, newest=[2, 7]))
    running = asyncio.ensure_future(shared.run())
    evaluator = shared.evaluations.evaluator
    for turn in range(turns):
        await eventually(lambda turn=turn: running.done() or evaluator._answered > 2 * turn)
        await shared.engine.sleep()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not running.done()
        assert shared.engine.version.version == 2
        await shared.engine.wake()
    (record,) = await running
    assert (record["version"], record["unscored"]) == (2, 0)
    assert sorted(shared.scorer.responses[0]) == sorted(greedy(endless, 2, PROMPTS))


async def test_a_killed_worker_repeats_its_evaluation_on_the_pinned_weights(endless, tmp_path):
    publisher = Publisher(endless, 2, newest=[2, 7])
    first = Shared(endless, tmp_path, publisher)
    running = asyncio.ensure_future(first.run())
    await eventually(lambda: first.evaluations.evaluator._answered > 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await first.engine.stop()
    assert publisher.pinned == [2]
    second = Shared(endless, tmp_path, publisher)
    assert [record["version"] for record in await second.run()] == [2]
    assert second.versions == [2, 2, 7]


async def test_an_evaluation_that_takes_too_long_is_given_up_and_the_weights_go_on(
    endless, tmp_path, monkeypatch
):
    async def endless_talk(ctx: Any, task: Task) -> None:
        await asyncio.Event().wait()

    shared = Shared(endless, tmp_path, Publisher(endless, 2, newest=[2, 7]), endless_talk, limit_s=0.2)
    exchange, at_load = shared.engine.exchange, []

    async def slow_exchange(snapshot: Any) -> Any:
        await asyncio.sleep(0.3)
        at_load.append(list(shared.evaluations.source.acks))
        return await exchange(snapshot)

    monkeypatch.setattr(shared.engine, "exchange", slow_exchange)
    assert await shared.run() == []
    assert at_load[0] == [], "the limit includes the load"
    assert shared.versions == [2, 2, 7]
    ((version, error),) = shared.evaluations.source.acks
    assert version == 2
    assert "more than 0.2 s" in error


async def test_a_version_that_the_engine_has_passed_is_not_evaluated_with_other_weights(endless, tmp_path):
    shared = Shared(endless, tmp_path, Publisher(endless, 2, newest=[7]))
    await shared.engine.start(endless.weights(7))
    with pytest.raises(EvaluationError, match="the engine serves"):
        await shared.evaluations.evaluator.evaluate(endless.weights(2), shared.tasks)
    await shared.engine.stop()
