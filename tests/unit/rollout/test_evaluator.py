"""The evaluator on a real engine, with scripted snapshots and a scorer of the test's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areal_async.config.job import JobConfig
from areal_async.errors import RpcTimeout, SnapshotError
from areal_async.observe.record import RunLog
from areal_async.wire.messages import Abstain, NoNews, Score, SnapshotNotice, Task, Verdict, VersionTag
from rollout_service import evaluator as evaluator_module
from rollout_service.evaluator import EvaluationError, Evaluator, follow
from rollout_service.workflows import Renderer, load_workflow


class Source:
    """Snapshots in order; what is missing from `weights` is torn."""

    def __init__(self, *news: Any, weights: dict[int, Any]) -> None:
        self._news = iter(news)
        self._weights = weights
        self.acks: list[tuple[int, bool]] = []

    async def next(self, after: VersionTag | None, wait_ms: int = 0) -> Any:
        return next(self._news)

    async def open(self, notice: SnapshotNotice) -> Any:
        if notice.tag.version not in self._weights:
            raise SnapshotError("torn")
        return self._weights[notice.tag.version]

    async def ack(self, tag: VersionTag, stall_ms: float = 0.0, error: str = "") -> None:
        self.acks.append((tag.version, not error))


class Exact:
    """1 for the ground truth, 0 otherwise; abstains where there is none."""

    def __init__(self) -> None:
        self.responses: list[list[str]] = []

    async def score(self, inputs: Sequence[Any]) -> list[Verdict]:
        self.responses.append([given.response for given in inputs])
        for given in inputs:
            assert given.episode.header.response_text == given.response
        return [
            Abstain("no truth")
            if given.ground_truth is None
            else Score(float(given.response == given.ground_truth))
            for given in inputs
        ]


def job(made: Any, **evaluation: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "job": "test",
            "model": str(made.directory),
            "tasks": {"train": "t.jsonl", "evaluation": "e.jsonl"},
            "evaluation": {"sampling": {"temperature": 0.0, "max_new_tokens": 5}, "max_concurrent": 4}
            | evaluation,
        }
    )


def run(
    made: Any, tmp_path: Path, source: Any, tasks: list[Task], scorer: Any = None, workflow: Any = None
) -> Any:
    scorer = scorer or Exact()

    async def main() -> None:
        engine = made.engine(slots=4)
        render = Renderer(AutoTokenizer.from_pretrained(made.directory))
        evaluator = Evaluator(engine, scorer, workflow or load_workflow("single_turn"), render, job=job(made))
        try:
            async with asyncio.timeout(60):
                await follow(source, evaluator, tasks, RunLog(tmp_path / "metrics.jsonl"))
        finally:
            await engine.stop()

    asyncio.run(main())
    path = tmp_path / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()], scorer


def notice(version: int, *, final: bool = False) -> SnapshotNotice:
    return SnapshotNotice(VersionTag(0, version), "", "", final)


def greedy(made: Any, weights: Any, prompts: Sequence[str]) -> list[str]:
    """Answers by full forward passes."""
    tokenizer = AutoTokenizer.from_pretrained(made.directory)
    logits = made.reference(weights)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        answer: list[int] = []
        for _ in range(5):
            answer.append(int(logits([*ids, *answer])[-1].argmax()))
        answers.append(tokenizer.decode(answer, skip_special_tokens=True))
    return answers


PROMPTS = [f"{a}+{b}=" for a in range(5) for b in range(4)]


def test_every_pinned_snapshot_is_evaluated_with_its_own_weights(endless: Any, tmp_path: Path) -> None:
    weights = {v: endless.weights(v) for v in (0, 5, 9)}
    truth = greedy(endless, weights[5], PROMPTS)
    tasks = [
        Task(f"t{n}", prompt, data_source="even" if n % 2 == 0 else "odd", ground_truth=answer)
        for n, (prompt, answer) in enumerate(zip(PROMPTS, truth, strict=True))
    ]
    source = Source(notice(0), NoNews(), notice(5), notice(9, final=True), weights=weights)
    records, scorer = run(endless, tmp_path, source, tasks)
    assert [(r["kind"], r["version"], r["n"]) for r in records] == [
        ("evaluation", 0, 20),
        ("evaluation", 5, 20),
        ("evaluation", 9, 20),
    ]
    assert sorted(scorer.responses[1]) == sorted(truth)
    assert records[1]["accuracy"] == 1.0
    assert records[1]["by_source"] == {"even": 1.0, "odd": 1.0}
    assert records[0]["accuracy"] < 1.0 > records[2]["accuracy"]
    assert records[1]["tokens"] == 100
    assert source.acks == [(0, True), (5, True), (9, True)]


def test_what_is_no_score_is_counted_and_never_a_zero(endless: Any, tmp_path: Path) -> None:
    async def workflow(ctx: Any, task: Task) -> None:
        if task.data_source == "broken":
            raise ValueError("cannot")
        await ctx.generate(task.prompt)

    weights = {0: endless.weights(0)}
    truth = greedy(endless, weights[0], PROMPTS[:4])
    tasks = [
        Task(f"t{n}", p, ground_truth=t) for n, (p, t) in enumerate(zip(PROMPTS[:4], truth, strict=True))
    ]
    tasks += [Task("a", "1+1="), Task("b", "1+1=", data_source="broken", ground_truth="2")]
    records, _ = run(
        endless, tmp_path, Source(notice(0, final=True), weights=weights), tasks, workflow=workflow
    )
    assert (records[0]["accuracy"], records[0]["n"], records[0]["unscored"]) == (1.0, 4, 2)


def test_an_evaluation_without_a_single_score_is_an_error(endless: Any, tmp_path: Path) -> None:
    source = Source(notice(0), weights={0: endless.weights(0)})
    with pytest.raises(EvaluationError, match="no truth"):
        run(endless, tmp_path, source, [Task("a", "1+1=")])
    assert source.acks == [(0, False)]


def test_a_torn_snapshot_is_passed_over_but_not_the_final_one(endless: Any, tmp_path: Path) -> None:
    tasks = [Task("a", "1+1=", ground_truth="2")]
    weights = {0: endless.weights(0)}
    source = Source(notice(0), notice(1), NoNews(finished=True), weights=weights)
    records, _ = run(endless, tmp_path, source, tasks)
    assert [r["version"] for r in records] == [0]
    assert source.acks == [(0, True), (1, False)]
    with pytest.raises(SnapshotError):
        run(endless, tmp_path, Source(notice(2, final=True), weights={}), tasks)


def test_a_trainer_that_is_gone_ends_the_evaluator_with_the_reason(
    endless: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator_module, "GIVE_UP_S", 0.02)
    monkeypatch.setattr(evaluator_module, "RETRY_PAUSE_S", 0.005)

    class Gone(Source):
        async def next(self, after: VersionTag | None, wait_ms: int = 0) -> Any:
            raise RpcTimeout("nobody")

    with pytest.raises(EvaluationError, match="not heard of"):
        run(endless, tmp_path, Gone(weights={}), [Task("a", "1+1=")])
