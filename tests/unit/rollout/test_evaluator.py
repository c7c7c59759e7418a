"""The evaluator on a real engine, with scripted snapshots and a scorer of the test's."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from transformers import AutoTokenizer

from areal_async.base.errors import RpcTimeout, SnapshotError
from areal_async.base.mistakes import ConfigError
from areal_async.base.records import Task
from areal_async.base.verdicts import Abstain, Score, Verdict
from areal_async.cli.tools import AnswersRequest, EvaluateRequest
from areal_async.config.job import JobConfig, merged
from areal_async.data.images import digest_of, preview_of
from areal_async.data.tasks import read_tasks
from areal_async.models.answers import Detokenizer
from areal_async.rpc.weights_messages import NoNews
from areal_async.service.record import RunLog
from areal_async.service.samples import read_samples, sample_files
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, EngineLost, EngineStats
from rollout_service.engines.http.adapter import attached_url
from rollout_service.evaluator import EvaluationError, Evaluator, engine_job, follow, is_done
from rollout_service.replicas import ReplicaGone, ReplicaSet
from rollout_service.tools.generate import answers
from rollout_service.tools.serving import lone_evaluator, target_of
from rollout_service.workflows import PolicyEngine, Renderer, load_workflow
from tests.contexts import context_for_test
from tests.unit.rollout.fakes import ScriptedSource, notice
from tests.vision import picture
from tests.waiting import LIMIT_S


class Exact:
    """1 for the ground truth, 0 otherwise; abstains where there is none."""

    def __init__(self) -> None:
        self.responses: list[list[str]] = []

    async def score(self, inputs: Sequence[Any], groups: Any = None) -> list[Verdict]:
        self.responses.append([given.response for given in inputs])
        for given in inputs:
            assert given.episode.header.response_text == given.response
        scores = [Score(float(given.response == given.ground_truth)) for given in inputs]
        truths = [given.ground_truth for given in inputs]
        return [score if truth else Abstain("no truth") for score, truth in zip(scores, truths, strict=True)]


def job(made: Any, *, rollout: Any = (), **evaluation: Any) -> JobConfig:
    tasks = {"train": "t.jsonl", "evaluation": "e.jsonl"}
    section = {"sampling": {"temperature": 0.0, "max_new_tokens": 5}, "max_concurrent": 4} | evaluation
    content = {"job": "test", "model": str(made.directory), "tasks": tasks, "evaluation": section}
    return JobConfig.model_validate(content | {"rollout": dict(rollout)})


async def run(
    made: Any,
    tmp_path: Path,
    source: Any,
    tasks: list[Task],
    scorer: Any = None,
    workflow: Any = None,
    *,
    engine: Any = None,
    give_up_s: float = 600.0,
    whole: Any = lambda task: task,
    **config: Any,
) -> Any:
    scorer, config_of = scorer or Exact(), job(made, **config)
    engine = engine or made.engine(slots=4)
    replicas = ReplicaSet(lambda _: engine, stuck_s=config_of.rollout.stuck_s)
    render = Renderer(AutoTokenizer.from_pretrained(made.directory))
    workflow = workflow or load_workflow("single_turn")
    evaluator = Evaluator(replicas, scorer, workflow, render, job=config_of, whole=whole)
    path = tmp_path / "metrics.jsonl"
    try:
        async with asyncio.timeout(LIMIT_S):
            await follow(source, evaluator, tasks, RunLog(path), retry_pause_s=0.005, give_up_s=give_up_s)
    finally:
        await replicas.stop()
    return [json.loads(line) for line in path.read_text().splitlines()], scorer


def greedy(made: Any, version: int, prompts: Sequence[str]) -> list[str]:
    """Answers by full forward passes."""
    tokenizer = AutoTokenizer.from_pretrained(made.directory)
    logits = made.reference(version)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        answer: list[int] = []
        for _ in range(5):
            answer.append(int(logits([*ids, *answer])[-1].argmax()))
        answers.append(Detokenizer(tokenizer).text(answer))
    return answers


PROMPTS = [f"{a}+{b}=" for a in range(5) for b in range(4)]


async def test_every_pinned_snapshot_is_evaluated_with_its_own_weights(endless: Any, tmp_path: Path) -> None:
    weights = {v: endless.weights(v) for v in (0, 5, 9)}
    truth = greedy(endless, 5, PROMPTS)
    tasks = [
        Task(f"t{n}", prompt, data_source="even" if n % 2 == 0 else "odd", ground_truth=answer)
        for n, (prompt, answer) in enumerate(zip(PROMPTS, truth, strict=True))
    ]
    source = ScriptedSource(notice(0), NoNews(), notice(5), notice(9, final=True), opens=weights)
    records, scorer = await run(endless, tmp_path, source, tasks)
    assert [(r["kind"], r["version"], r["n"]) for r in records] == [("evaluation", v, 20) for v in weights]
    assert sorted(scorer.responses[1]) == sorted(truth)
    assert records[1]["accuracy"] == 1.0
    assert records[1]["by_source"] == {"even": 1.0, "odd": 1.0}
    files = sample_files(tmp_path)
    assert [entry[:2] for entry in files] == [("evaluation", version) for version in weights]
    told = read_samples(files[1][2])
    assert [sample["task"] for sample in told] == ["t0", "t5", "t10", "t15"]
    assert all(sample["version"] == 5 and sample["reward"] == 1.0 for sample in told)
    for sample, number in zip(told, range(0, 20, 5), strict=True):
        prompt, answer = sample["segments"]
        assert (prompt["text"], sample["ground_truth"]) == (PROMPTS[number], truth[number])
        assert answer["text"].startswith(truth[number])
        assert {*answer["version"]} == {5}
    assert records[0]["accuracy"] < 1.0 > records[2]["accuracy"]
    assert records[1]["tokens"] == 100
    assert source.acks == [(0, ""), (5, ""), (9, "")]


async def test_an_evaluation_without_a_single_score_is_an_error(endless: Any, tmp_path: Path) -> None:
    source = ScriptedSource(notice(0), opens={0: endless.weights(0)})
    with pytest.raises(EvaluationError, match="no truth"):
        await run(endless, tmp_path, source, [Task("a", "1+1=")])
    assert [(version, bool(error)) for version, error in source.acks] == [(0, True)]


async def test_a_torn_snapshot_is_passed_over_but_not_the_final_one(endless: Any, tmp_path: Path) -> None:
    tasks = [Task("a", "1+1=", ground_truth="2")]
    torn = SnapshotError("torn")
    weights = {0: endless.weights(0), 1: torn, 2: torn}
    source = ScriptedSource(notice(0), notice(1), NoNews(finished=True), opens=weights)
    records, _ = await run(endless, tmp_path, source, tasks)
    assert [r["version"] for r in records] == [0]
    assert source.acks == [(0, ""), (1, "torn")]
    with pytest.raises(SnapshotError):
        await run(endless, tmp_path, ScriptedSource(notice(2, final=True), opens=weights), tasks)


async def test_a_trainer_that_is_gone_ends_the_evaluator(endless: Any, tmp_path: Path) -> None:
    gone = ScriptedSource(*[RpcTimeout("nobody")] * 999)
    with pytest.raises(EvaluationError, match="not heard of"):
        await run(endless, tmp_path, gone, [Task("a", "1+1=")], give_up_s=0.02)


async def test_several_samples_give_mean_best_and_majority_by_source_with_intervals(endless, tmp_path):
    """The workflow answers by a script; scores come from the answers, figures from the scores."""
    answers = {"t0": "aab", "t1": "bbb", "t2": "abb", "t3": "axy"}

    async def workflow(ctx: Any, task: Task) -> None:
        if (given := answers[task.task_id][ctx.sample % 3]) == "x":
            raise ValueError("cannot")
        await ctx.generate(task.prompt)
        ctx.builder.text(response=f" {given}\n")

    class Stripped(Exact):
        async def score(self, inputs: Sequence[Any], groups: Any = None) -> list[Verdict]:
            said = [given.response.strip() for given in inputs]
            return [
                Score(float(text == "a"), {f"is_{text}": 1.0, "right": float(text == "a")})
                if text != "y"
                else Abstain("no idea")
                for text in said
            ]

    tasks = [Task(name, "1+1=", data_source="even" if name in ("t0", "t2") else "odd") for name in answers]
    source = ScriptedSource(notice(3, final=True), opens={3: endless.weights(3)})
    several = {"samples": 3, "sampling": {"temperature": 1.0, "max_new_tokens": 2}}
    records, _ = await run(endless, tmp_path, source, tasks, Stripped(), workflow, **several)
    (found,) = records
    assert (found["n"], found["samples"], found["unscored"]) == (4, 3, 2)
    means, bests, majors = [2 / 3, 0, 1 / 3, 1], [1, 0, 1, 1], [1, 0, 0, 1]
    assert found["accuracy"] == pytest.approx(sum(means) / 4)
    assert found["mean"][0] == found["accuracy"]
    assert found["best"][0] == pytest.approx(sum(bests) / 4)
    assert found["maj"][0] == pytest.approx(sum(majors) / 4)
    assert found["mean"][1] <= found["accuracy"] <= found["mean"][2]
    assert found["rewards"] == pytest.approx({"right": sum(means) / 4, "is_a": 1.0, "is_b": 1.0})
    assert found["sources"]["odd"]["unscored"] == 2
    assert found["sources"]["even"]["maj"][0] == 0.5
    assert found["by_source"] == pytest.approx({"even": 0.5, "odd": 0.5})
    assert REGISTRY.get_sample_value(
        "areal_evaluation_score", {"policy": "policy", "data_source": "even", "statistic": "maj"}
    ) == pytest.approx(0.5)
    odd = {"policy": "policy", "data_source": "odd"}
    assert REGISTRY.get_sample_value("areal_evaluation_unscored_samples", odd) == 2


async def test_samples_of_a_task_are_drawn_with_seeds_of_their_own(endless: Any, tmp_path: Path) -> None:
    async def answers(folder: str) -> list[str]:
        (tmp_path / folder).mkdir()
        source = ScriptedSource(notice(0, final=True), opens={0: endless.weights(0)})
        several = {"samples": 6, "sampling": {"temperature": 1.0, "max_new_tokens": 5}}
        tasks = [Task("a", "1+1=", ground_truth="2")]
        _, scorer = await run(endless, tmp_path / folder, source, tasks, **several)
        return sorted(scorer.responses[0])

    first = await answers("first")
    assert len(set(first)) > 3
    assert await answers("second") == first


class Failing:
    """An engine that samples nothing: it stands still, is lost, or does not even start."""

    def __init__(self, engine: Any, how: str) -> None:
        self._engine = engine
        self._how = how
        self._taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def alive(self) -> bool:
        return not (self._how == "lost" and self._taken)

    async def start(self, snapshot: Any) -> None:
        if self._how == "no start":
            raise EngineError("the server ended before it served")
        await self._engine.start(snapshot)

    async def generate(self, request: Any) -> Any:
        self._taken += 1
        if self._how == "lost":
            raise EngineLost("the server is gone")
        await asyncio.Event().wait()

    def stats(self) -> EngineStats:
        return dataclasses.replace(self._engine.stats(), running=self._taken)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("lost", ReplicaGone, "the server is gone"),
        ("still", ReplicaGone, r"no token .* 1 requests .*rollout\.stuck_s"),
        ("no start", EngineError, "ended before it served"),
    ],
)
async def test_an_engine_that_fails_leaves_no_record_and_keeps_its_snapshot(
    how, error, says, endless, tmp_path
):
    source = ScriptedSource(notice(0, final=True), opens={0: endless.weights(0)})
    engine, tasks = Failing(endless.engine(slots=4), how), [Task("a", "1+1=")]
    with pytest.raises(error, match=says):
        await run(endless, tmp_path, source, tasks, engine=engine, rollout={"stuck_s": 0.6})
    assert source.acks == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""


async def test_a_held_out_sample_that_takes_too_long_is_counted_and_holds_nothing_up(endless, tmp_path):
    workflow = load_workflow("single_turn")

    async def stuck(ctx: Any, task: Task) -> None:
        if task.task_id == "t1":
            await asyncio.Event().wait()
        await workflow(ctx, task)

    source = ScriptedSource(notice(0, final=True), opens={0: endless.weights(0)})
    tasks = [Task(f"t{n}", "1+1=", ground_truth="2") for n in range(3)]
    limit = {"episode_timeout_s": 1.5}
    records, _ = await run(endless, tmp_path, source, tasks, workflow=stuck, rollout=limit)
    assert (records[0]["n"], records[0]["unscored"]) == (2, 1)
    assert source.acks == [(0, "")]


@pytest.mark.parametrize(("steps", "done"), [(4, True), (5, False)])
def test_a_run_that_gets_more_steps_is_not_done_before_its_new_end(tmp_path: Path, steps: int, done: bool):
    with RunLog(tmp_path / "metrics.jsonl") as records:
        records.write("step", step=3, epoch=1)
        records.write("model", epoch=1)
        records.write("evaluation", version=4, epoch=1, final=True)
        assert is_done(records, steps) is done


def test_the_evaluations_engine_is_the_rollouts_kind_or_its_own(endless: Any, tmp_path: Path) -> None:
    def engine(rollout: Any, **evaluation: Any) -> tuple[Any, str | None]:
        found = engine_job(job(endless, rollout=rollout, **evaluation))
        place = context_for_test(found, tmp_path, "evaluator", "evaluator")
        return found.rollout, attached_url(found, place, 0)

    server = {"urls": ["http://127.0.0.1:1"], "arguments": {"tp": 2}}
    lent, attached = {"urls": ["http://127.0.0.1:7"]}, {"engine": "sglang", "server": server}
    same, url = engine(attached)
    assert (same.engine, same.server.arguments, url) == ("sglang", {"tp": 2}, None)
    assert engine(attached, server=lent)[1] == "http://127.0.0.1:7"
    local, url = engine(attached | {"device": "cuda"}, engine="local", device="cpu")
    assert (local.engine, local.device, url) == ("local", "cpu", None)
    assert engine({"engine": "local"}, engine="vllm", server=lent)[0].engine == "vllm"


# --- without a run ---------------------------------------------------------------------------------------


async def test_answers_to_one_prompt_are_samples_of_their_own_and_a_seed_repeats_them(endless: Any) -> None:
    replicas = ReplicaSet(lambda _: endless.engine(slots=4), stuck_s=60.0)
    render, sampling = Renderer(AutoTokenizer.from_pretrained(endless.directory)), Sampling(max_new_tokens=5)

    async def texts(seed: int) -> list[str]:
        voice, request = (
            PolicyEngine(replicas, render, sampling),
            AnswersRequest("m", raw=True, n=6, seed=seed),
        )
        return [answer["text"] for answer in await answers(voice, request, "1+1=")]

    await replicas.start(endless.weights(0))
    try:
        first, again, other = [await texts(seed) for seed in (0, 0, 1)]
    finally:
        await replicas.stop()
    assert len(set(first)) > 3
    assert again == first != other


FITTING = {"rollout": {"max_model_len": 64, "sampling": {"max_new_tokens": 8}}}


@pytest.mark.parametrize(
    ("asked", "of_run", "temperature"),
    [
        (EvaluateRequest("MODEL"), {}, 0.0),
        (EvaluateRequest("MODEL", samples=4), {}, 1.0),
        (EvaluateRequest("MODEL", samples=4, temperature=0.5), {}, 0.5),
        (EvaluateRequest("MODEL", samples=4), {"rollout": {"sampling": {"temperature": 0.7}}}, 0.7),
        (EvaluateRequest("MODEL", samples=4), {"evaluation": {"sampling": {"temperature": 0.3}}}, 0.3),
        (EvaluateRequest("MODEL"), {"rollout": {"sampling": {"temperature": 0.7}}}, 0.0),
        (AnswersRequest("MODEL", n=2), {}, 1.0),
        (AnswersRequest("MODEL", n=2), {"evaluation": {"sampling": {"temperature": 0.3}}}, 0.3),
        (AnswersRequest("MODEL", n=2, temperature=0.0), {}, 0.0),
    ],
    ids=str,
)
def test_several_answers_are_drawn_at_the_runs_temperature_unless_another_is_given(
    endless, tmp_path, asked, of_run, temperature
):
    tasks = None
    if isinstance(asked, EvaluateRequest):
        tasks = tmp_path / "e.jsonl"
        tasks.write_text('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}')
    sections = {"evaluation": {"samples": getattr(asked, "samples", None)}}
    with target_of(str(endless.directory)) as target:
        if of_run:
            target.content.update(merged(FITTING, copy.deepcopy(of_run)))
        with lone_evaluator(target, asked, sections, tasks=tasks) as ctx:
            assert ctx.job.evaluation_sampling.temperature == temperature


def test_greedy_samples_and_a_bad_field_are_refused_by_the_names_of_fields(endless, tmp_path):
    tasks = tmp_path / "e.jsonl"
    tasks.write_text('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}')
    for asked, says in (
        (
            EvaluateRequest("M", samples=4, temperature=0.0),
            "Set evaluation.sampling.temperature above 0, or samples to 1",
        ),
        (EvaluateRequest("M", fields=["reward.model=m"]), "Write reward.args.model if the part takes it"),
    ):
        sections = {"evaluation": {"samples": asked.samples}}
        with (
            target_of(str(endless.directory)) as target,
            pytest.raises(ConfigError, match=says),
            lone_evaluator(target, asked, sections, tasks=tasks),
        ):
            pass


@pytest.mark.parametrize(
    ("asked", "positions", "tokens"),
    [
        (EvaluateRequest("M"), 100_000, 512),
        (EvaluateRequest("M"), 64, 32),
        (EvaluateRequest("M", max_new_tokens=900), 100_000, 900),
        (AnswersRequest("M"), 100_000, 4096),
    ],
    ids=str,
)
def test_answers_of_a_model_have_a_length_that_ends(endless, tmp_path, asked, positions, tokens):
    model = tmp_path / "model"
    shutil.copytree(endless.directory, model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": positions}
    (model / "config.json").write_text(json.dumps(config))
    with target_of(str(model)) as target, lone_evaluator(target, asked, {"evaluation": {}}) as ctx:
        assert ctx.job.evaluation_sampling.max_new_tokens == tokens


@pytest.mark.parametrize(("reward", "gets_bytes"), [("exact_match", False), ("own.py:score", True)])
async def test_held_out_tasks_with_images_are_answered_and_scored_with_their_bytes(
    endless: Any, tmp_path: Path, reward: str, gets_bytes: bool
) -> None:
    picture(8, 8).save(tmp_path / "a.png")
    row = {"prompt": "1+1=", "images": ["a.png"], "reward_model": {"style": "rule", "ground_truth": "2"}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    table, data, seen = read_tasks(tmp_path / "tasks.jsonl"), (tmp_path / "a.png").read_bytes(), []

    async def workflow(ctx: Any, task: Task) -> None:
        await ctx.generate("1+1=")
        ((facts, found),) = task.images
        seen.append(found)
        ctx.builder.media(0, facts.digest, facts.media_type, facts.size_bytes, 0, 1)

    class Looking(Exact):
        routing = SimpleNamespace(of=lambda task: SimpleNamespace(name=reward, args={}))

        async def score(self, inputs: Sequence[Any], groups: Any = None) -> list[Verdict]:
            seen.extend(each.data for given in inputs for each in given.media)
            return [Score(1.0) for _ in inputs]

    source = ScriptedSource(notice(0, final=True), opens={0: endless.weights(0)})
    await run(endless, tmp_path, source, list(table), Looking(), workflow, whole=table.whole)
    assert seen == [data, data if gets_bytes else b""]
    ((_, _, path),) = sample_files(tmp_path)
    (sample,) = read_samples(path)
    ((name, preview),) = sample["images"].items()
    assert name == digest_of(data)
    assert preview == preview_of(data)
