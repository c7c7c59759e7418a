"""The evaluator, which samples held-out tasks on an engine of its own, in parallel with training.

    python -m rollout_service.evaluator --topology topology.json --name evaluator

Promises:

- Every snapshot pinned for evaluation gets one result: an "evaluation" record in the run log, or the reason
  why there is none.
- The engine's weights do not change during an evaluation, so every answer of a record comes from the record's
  version.
- An engine that samples nothing for `rollout.stuck_s` counts as dead. If no engine can be started, the
  evaluator exits, and its next process repeats the evaluation.
- Training steps never wait for the evaluator. The evaluator exits with status 0 after the final snapshot.

A record's `accuracy` is mean@n over the scored tasks (`statistics.py`). If rewards other than 0 and 1 occur,
`accuracy` is the mean reward, and the record has `partial_credit: true`. Verdicts without a score are counted
separately, never as 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, astuple, dataclass
from typing import Any, Literal

from msgspec.structs import asdict

from areal_async.base.device_turns import EVALUATION_LIMIT_S
from areal_async.base.errors import ArealError, FaultError, RpcTimeout, SnapshotError, WireError
from areal_async.base.events import record
from areal_async.base.log import clock_text, get_logger
from areal_async.base.records import Task
from areal_async.base.verdicts import Score, Verdict, kind_of, message_of
from areal_async.base.versions import VersionTag
from areal_async.config.devices import evaluation_rollout
from areal_async.config.engines import engine_part, evaluation_engine
from areal_async.config.job import JobConfig
from areal_async.data.images import previews_of
from areal_async.data.tasks import read_tasks
from areal_async.rpc.board import board
from areal_async.rpc.client import wait_out
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.rpc.weights_messages import SnapshotNotice
from areal_async.service.context import ServiceContext
from areal_async.service.record import RunRecords, open_records
from areal_async.service.samples import file_name, lines_of, sample_of, short_text
from areal_async.trajectory import EpisodeBuilder, unpack
from areal_async.weights.receiver import Receiver, make_receiver
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput, sees_images
from rollout_service import metrics
from rollout_service.engines import make_engine
from rollout_service.engines.base import EngineError, Weights
from rollout_service.gateway import Gateway
from rollout_service.process import (
    connect,
    make_gateway,
    make_renderers,
    prepare,
    sampling_of,
    speakers_of,
    unless_stopped,
)
from rollout_service.replicas import ReplicaGone, ReplicaSet
from rollout_service.statistics import ScoredSample, Statistics, component_means, statistics_of
from rollout_service.worker.failures import run_episode
from rollout_service.worker.weight_updates import acknowledge
from rollout_service.workflows import Context, PolicyEngine, Renderer, Workflow, workflow_of

log = get_logger("evaluator")

WAIT_MS = 10_000
RETRY_PAUSE_S = 0.5
GIVE_UP_S = 600.0  # Longest silence of the publisher, because a restarted trainer must load its state


class EvaluationError(ArealError):
    """No held-out task could be evaluated, or the trainer ended before it published its final snapshot."""

    restart_helps = False


@dataclass(frozen=True)
class Evaluation:
    """Results of one version on the held-out tasks."""

    overall: Statistics
    by_source: dict[str, Statistics]
    """Results of each data source with at least one score."""
    samples: list[dict[str, Any]]
    """Some of the answers, always for the same tasks. See `areal_async/service/samples.py`."""
    unscored: dict[str, int]
    """Data source → number of samples without an episode or without a score. These samples do not count as
    0."""
    rewards: dict[str, float]
    """Components of the rewards (see `component_means`)."""
    tokens: int

    def figures(self) -> dict[str, Any]:
        """Return the figures in the form of a run's records: `mean`, `best` and `maj` are [value, low,
        high]."""
        sources = {
            name: {"n": one.tasks, "unscored": self.unscored.get(name, 0), **_triples(one)}
            for name, one in self.by_source.items()
        }
        return {
            "n": self.overall.tasks,
            "unscored": sum(self.unscored.values()),
            "partial_credit": self.overall.partial_credit,
            "tokens": self.tokens,
            **_triples(self.overall),
            "rewards": self.rewards,
            "sources": sources,
        }


@dataclass(frozen=True)
class _Answer:
    """A sampled episode of a held-out task."""

    task: int
    sample: int
    text: str  # Text for the majority vote: the metadata `answer` if present, else the response
    given: RewardInput
    media: Mapping[str, bytes]  # Images by digest, of an answer that may become a sample


class Companion:
    """Another policy that samples in the episodes of an evaluation. Each evaluation uses the newest weights
    of that policy at its beginning. `ctx` is that policy's context."""

    def __init__(self, ctx: ServiceContext, render: Renderer) -> None:
        self.policy = ctx.job.policy
        sampling = sampling_of(ctx.job.evaluation_sampling)
        self.speaks = PolicyEngine(lone_engine(ctx), render, sampling, ctx.job.rollout.max_model_len)
        self.source = receiver_of(ctx, "serve")
        self._serving: VersionTag | None = None

    async def refresh(self) -> None:
        """Load newer weights, if there are any. The first call waits for weights. In later calls, the engine
        keeps its present weights if the publisher does not answer."""
        while True:
            try:
                news = await self.source.next(self._serving, 0 if self._serving else WAIT_MS)
                if isinstance(news, SnapshotNotice):
                    engine, snapshot = self.speaks.engine, await self.source.open(news)
                    await (engine.exchange if self._serving else engine.start)(snapshot)
                    self._serving = news.tag
                    await acknowledge(self.source, news.tag)
            except (RpcTimeout, FaultError, SnapshotError) as error:
                log.warning("no newer weights", policy=self.policy, error=str(error))
                if self._serving is None:
                    await asyncio.sleep(RETRY_PAUSE_S)
            if self._serving is not None:
                return

    async def close(self) -> None:
        await self.speaks.engine.stop()
        await self.source.close()


@dataclass(eq=False)
class Evaluator:
    """Runner of an evaluation: it samples all tasks on an engine with fixed weights."""

    engine: ReplicaSet
    scorer: LocalScorer
    workflow: Workflow
    render: Renderer
    _: KW_ONLY
    job: JobConfig
    gateway: Gateway | None = None
    first_failure_ends: bool = False
    shares: bool = False
    """Whether the engine belongs to a worker, which has started it and watches it."""
    limit_s: float | None = None
    """Longest time in seconds to sample the answers, from the moment at which the weights are loaded."""
    others: Sequence[Companion] = ()
    on_verdict: Callable[[Task, int, RewardInput, Verdict], None] = lambda *_: None
    """Callback with each task, sample number, answer and verdict."""
    on_answered: Callable[[], None] = lambda: None
    whole: Callable[[Task], Task] = lambda task: task
    """Function that returns a task with the bytes of its images (`TaskTable.whole`)."""
    begun_s: float = 0.0

    def __post_init__(self) -> None:
        self._started, self._asked, self._answered = self.shares, 0, 0
        self.samples = self.job.evaluation.samples  # Answers per task
        self.folder = f"policies/{self.job.policy}" if self.job.policies else ""
        """Folder of the evaluated policy, relative to the run's folder."""

    def doing(self) -> str:
        """Return the progress of the evaluation, or an empty string if none is running."""
        done, asked = self._answered, self._asked
        if not asked or done == asked:
            return f"scoring {asked} answers" if asked else ""
        left = ""
        if done:
            left = f", left {clock_text((time.monotonic() - self.begun_s) / done * (asked - done))}"
        return f"{done} of {asked} answers{left}"

    async def evaluate(self, snapshot: Weights, tasks: Sequence[Task]) -> Evaluation:
        """Load `snapshot`, sample the configured number of answers for every task, and score them. Raises
        `EvaluationError` if nothing was scored, `EngineError` if the snapshot cannot be loaded,
        `ReplicaGone` if the engine died, and `TimeoutError` after `limit_s`. No result is recorded then."""
        for other in self.others:
            await other.refresh()
        self.engine.pinned = snapshot
        try:
            await (self.engine.exchange if self._started else self.engine.start)(snapshot)
            self._started = True
            if self.engine.version != snapshot.tag:
                raise EvaluationError(f"the engine serves {self.engine.version}, not {snapshot.tag}")
            tokens = self.engine.stats().tokens_total
            async with asyncio.timeout(self.limit_s):  # a load that is cut off would cost the engine
                answers, failures = await self._answers(tasks)
        finally:
            self.engine.pinned = None
        # The answers to one task form a group, because a reward may judge them together.
        verdicts = await self.scorer.score(
            [answer.given for answer in answers], [answer.task for answer in answers]
        )
        judged = list(zip(answers, verdicts, strict=True))
        for answer, verdict in judged:
            self.on_verdict(tasks[answer.task], answer.sample, answer.given, verdict)
        scored = [(answer, verdict) for answer, verdict in judged if isinstance(verdict, Score)]
        self._asked = 0
        failures += [f"{kind_of(one)}: {message_of(one)}" for one in verdicts if not isinstance(one, Score)]
        if not scored:
            raise EvaluationError(
                f"none of {len(tasks)} held-out tasks of {self.job.tasks.evaluation} was scored; "
                f"the first failure: {failures[0] if failures else 'the file has no tasks'}"
            )
        missing = Counter(task.data_source for task in tasks for _ in range(self.samples))
        got: dict[str, list[ScoredSample]] = {}
        for answer, score in scored:
            sample = ScoredSample(answer.task, answer.sample, score.value, answer.text)
            got.setdefault(tasks[answer.task].data_source, []).append(sample)
        missing.subtract({name: len(samples) for name, samples in got.items()})
        every = [sample for samples in got.values() for sample in samples]
        return Evaluation(
            overall=statistics_of(every),
            by_source={name: statistics_of(got[name]) for name in sorted(got)},
            samples=await asyncio.to_thread(self._samples_of, tasks, judged),
            unscored={name: count for name, count in sorted(missing.items()) if count},
            rewards=component_means([(answer.task, score.components) for answer, score in scored]),
            tokens=self.engine.stats().tokens_total - tokens,
        )

    async def _answers(self, tasks: Sequence[Task]) -> tuple[list[_Answer], list[str]]:
        """Return the answers to all tasks, and the reasons for missing answers."""
        answers: list[_Answer] = []
        failures: list[str] = []
        samples, observe = range(self.samples), self.job.observe
        wanted = observe.samples if observe.samples_every_steps else 0
        self._shown = range(0, len(tasks), max(1, len(tasks) // wanted)) if wanted else range(0)
        self._asked, self._answered, self.begun_s = len(tasks) * len(samples), 0, time.monotonic()
        queue = iter([(number, sample) for number in range(len(tasks)) for sample in samples])

        async def work() -> None:
            for number, sample in queue:
                try:
                    answers.append(await self._answer(tasks[number], number, sample))
                except ReplicaGone:
                    raise
                except Exception as error:  # the workflow is the user's code, so a failure is counted
                    if self.first_failure_ends:
                        raise
                    failures.append(f"{type(error).__name__}: {error}")
                self._answered += 1
                self.on_answered()

        workers = [asyncio.ensure_future(work()) for _ in range(self.job.evaluation.max_concurrent)]
        engines = [self.engine, *(other.speaks.engine for other in self.others)]
        watching = [asyncio.ensure_future(engine.watch()) for engine in engines if not self.shares]
        ends: list[asyncio.Future[Any]] = [asyncio.gather(*workers), *watching]
        try:
            for end in (await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED))[0]:
                end.result()
        finally:
            for end in ends:  # marks each as retrieved: asyncio would report its error otherwise
                end.add_done_callback(lambda end: end.cancelled() or end.exception())
            for task in (*workers, *watching):
                task.cancel()
        return answers, failures

    def _samples_of(
        self, tasks: Sequence[Task], judged: Sequence[tuple[_Answer, Verdict]]
    ) -> list[dict[str, Any]]:
        found = {
            answer.task: (answer, verdict)
            for answer, verdict in judged
            if answer.task in self._shown and answer.sample == 0 and answer.given.blob is not None
        }
        tokenizer: Any = self.render.tokenizer
        return [
            sample_of(
                unpack(answer.given.blob),
                tokenizer.decode,
                previews=previews_of(answer.media),
                policy=self.job.policy,
                data_source=tasks[number].data_source,
                ground_truth=tasks[number].ground_truth,
                reward=verdict.value if isinstance(verdict, Score) else None,
                rewards=verdict.components if isinstance(verdict, Score) else {},
                verdict=kind_of(verdict),
            )
            for number, (answer, verdict) in sorted(found.items())[: self.job.observe.samples]
        ]

    async def _answer(self, task: Task, number: int, sample: int) -> _Answer:
        # Every sample has its own seed, so the order of the answers does not matter.
        place = number * self.samples + sample
        builder = EpisodeBuilder(
            self.job.job, task.task_id, f"{task.task_id}#evaluation", sample, **speakers_of(self.job)
        )
        lead = PolicyEngine(self.engine, self.render, sampling_of(self.job.evaluation_sampling))
        ctx = Context(
            {self.job.policy: lead} | {other.policy: other.speaks for other in self.others},
            builder,
            episode_id=f"evaluation-{place}",
            seed=self.job.seed,
            sample=place,
            agents=self.gateway,
        )
        task = await asyncio.to_thread(self.whole, task) if task.images else task
        work = self.workflow(ctx, ctx.seeing(task))
        limit_s, debug = self.job.rollout.episode_timeout_s, self.first_failure_ends
        episode, blob = await run_episode(ctx, work, limit_s, debug=debug)
        header = episode.header
        media = {each.facts.digest: each.data for each in task.images} | ctx.new_media
        seen = media and sees_images(self.scorer.routing.of(task))
        return _Answer(
            task=number,
            sample=sample,
            text=str(header.metadata.get("answer", header.response_text)).strip(),
            given=RewardInput.of_episode(task, header, episode.n_sampled, blob, media if seen else {}),
            media=media if sample == 0 and number in self._shown else {},
        )


def engine_job(job: JobConfig) -> JobConfig:
    """Return the job for the engine of an evaluation. Its section `rollout` has the values of the section
    `evaluation`."""
    return job.model_copy(update={"rollout": evaluation_rollout(job)})


def lone_engine(ctx: ServiceContext, slots: int | None = None) -> ReplicaSet:
    """Return the engine of an evaluation, not started yet, for `slots` requests at once (by default as in the
    job). `ctx` is the context of the engine's policy."""
    job, most = engine_job(ctx.job), slots or ctx.job.evaluation.max_concurrent
    return ReplicaSet(
        lambda _: make_engine(job, slots=most, activity="evaluation", place=ctx),
        stuck_s=ctx.job.rollout.stuck_s,
    )


def receiver_of(ctx: ServiceContext, purpose: Literal["serve", "evaluate"]) -> Receiver:
    """Return the receiver of the weights for `lone_engine(ctx)`."""
    part = engine_part(evaluation_engine(ctx.job))
    return make_receiver(ctx, purpose, tensors=part.needs == "tensors")


def prepare_evaluation(job: JobConfig) -> None:
    """Set up a process for the evaluation's engine."""
    prepare(job.evaluation.torch_threads, computes=not engine_part(evaluation_engine(job)).is_server)


async def follow(
    source: Receiver,
    evaluator: Evaluator,
    tasks: Sequence[Task],
    run_log: RunRecords,
    *,
    retry_pause_s: float = RETRY_PAUSE_S,
    give_up_s: float = GIVE_UP_S,
) -> None:
    """Evaluate pinned snapshots in order, until the final snapshot is evaluated or no more snapshots can
    come. Raises `EvaluationError` if the publisher does not answer for `give_up_s`, and `ReplicaGone` if the
    engine died."""
    after: VersionTag | None = None
    heard_s = time.monotonic()
    while True:
        try:
            news = await source.next(after, WAIT_MS)
        except (RpcTimeout, FaultError) as error:
            if time.monotonic() - heard_s > give_up_s:
                raise EvaluationError(
                    f"the trainer was not heard of for {give_up_s:g} s, before its final snapshot: {error}"
                ) from error
            await asyncio.sleep(retry_pause_s)
            continue
        heard_s = time.monotonic()
        if isinstance(news, SnapshotNotice):
            after = news.tag
            await _evaluate_one(source, evaluator, tasks, run_log, news)
            if news.final:
                return
        elif news.finished:
            return


async def _evaluate_one(
    source: Receiver, evaluator: Evaluator, tasks: Sequence[Task], run_log: RunRecords, notice: SnapshotNotice
) -> None:
    began_s = time.monotonic()
    try:
        result = await evaluator.evaluate(await source.open(notice), tasks)
    except EngineError:
        raise  # not acknowledged, so it stays pinned and the next process repeats the evaluation
    except (SnapshotError, EvaluationError) as error:
        await acknowledge(source, notice.tag, error=str(error))
        if isinstance(error, SnapshotError) and not notice.final:
            log.warning("snapshot not evaluated", version=notice.tag.version, error=str(error))
            return
        raise
    wall_s = time.monotonic() - began_s
    accuracy, unscored = result.overall.mean.value, sum(result.unscored.values())
    run_log.write(
        "evaluation",
        **asdict(notice.tag),
        accuracy=accuracy,
        samples=evaluator.samples,
        by_source={name: one.mean.value for name, one in result.by_source.items()},
        **result.figures(),
        wall_s=round(wall_s, 4),
        final=notice.final,
    )
    await _write_samples(run_log, notice.tag, evaluator.folder, result.samples)
    metrics.show_evaluation(notice.tag, result.overall, result.by_source, result.unscored)
    log.info("evaluated", version=notice.tag.version, accuracy=round(accuracy, 4), n=result.overall.tasks)
    if unscored:
        log.warning("held-out samples without a score", n=unscored, version=notice.tag.version)
    record("evaluated", **asdict(notice.tag), accuracy=accuracy)
    await acknowledge(source, notice.tag)


@dataclass(eq=False)
class SharedEvaluations:
    """Evaluations on the engine of a worker, if trainer and engines share a device in time.

    The worker loads no newer weights until the evaluation of a pinned snapshot has finished or failed. Other
    episodes continue meanwhile, with the same weights. A turn of the trainer only interrupts an evaluation.
    If the worker is killed, its next process repeats the evaluation."""

    source: Receiver
    evaluator: Evaluator
    tasks: Sequence[Task]
    run_log: RunRecords
    _after: VersionTag | None = None

    async def first(self) -> Weights | None:
        """See `worker.weight_updates.Evaluations`."""
        await connect(self.source)
        while (notice := await self._next()) is not None:
            try:
                return await self.source.open(notice)
            except SnapshotError as error:
                self._after = notice.tag
                await acknowledge(self.source, notice.tag, error=str(error))
        return None

    async def up_to(self, tag: VersionTag) -> None:
        """See `worker.weight_updates.Evaluations`."""
        while (notice := await self._next()) is not None and notice.tag <= tag:
            self._after = notice.tag
            try:
                await _evaluate_one(self.source, self.evaluator, self.tasks, self.run_log, notice)
            except TimeoutError:
                limit_s = self.evaluator.limit_s
                why = f"the evaluation of version {notice.tag.version} took more than {limit_s:g} s"
                log.warning("snapshot not evaluated", version=notice.tag.version, error=why)
                await acknowledge(self.source, notice.tag, error=why)

    async def _next(self) -> SnapshotNotice | None:
        """Return the oldest pinned snapshot after the last one, or None. Waits until the publisher
        answers."""
        while True:
            try:
                news = await self.source.next(self._after, 0)
            except (RpcTimeout, FaultError) as error:
                await wait_out(error, "evaluations", RETRY_PAUSE_S)
                continue
            return news if isinstance(news, SnapshotNotice) else None


@asynccontextmanager
async def shared_evaluations(
    ctx: ServiceContext, engine: ReplicaSet, render: Renderer, gateway: Gateway
) -> AsyncIterator[SharedEvaluations]:
    """Yield the evaluations of a worker whose job has held-out tasks. `engine` is the worker's engine."""
    job = ctx.job
    assert job.tasks.evaluation is not None
    table = read_tasks(job.tasks.evaluation)
    tasks = list(table)
    source, records = receiver_of(ctx, "evaluate"), open_records(ctx)
    try:
        async with LocalScorer(job.reward, workers=1, inline=ctx.inline) as scorer:
            how: Any = {"job": job, "gateway": gateway, "first_failure_ends": ctx.inline, "shares": True}
            how["whole"] = table.whole
            how["limit_s"] = EVALUATION_LIMIT_S
            evaluator = Evaluator(engine, scorer, workflow_of(job), render, **how)
            yield SharedEvaluations(source, evaluator, tasks, records)
    finally:
        await source.close()
        await asyncio.to_thread(records.close)


async def _write_samples(
    run_log: RunRecords, tag: VersionTag, folder: str, samples: Sequence[dict[str, Any]]
) -> None:
    """Write some answers of an evaluation. If this fails, only these answers are missing; but a full disk is
    raised as an error."""
    if not samples:
        return
    told = [{"version": tag.version, "step": tag.version, **sample} for sample in samples]
    name = file_name("evaluation", tag.version)
    try:
        await asyncio.to_thread(run_log.write_samples, folder, name, lines_of(told))
    except WireError as error:
        log.warning("no samples of an evaluation", version=tag.version, error=str(error))
    first = samples[0]
    log.info("held-out sample", version=tag.version, reward=first["reward"], response=short_text(first))


def _triples(statistics: Statistics) -> dict[str, list[float | None]]:
    """Return `mean`, `best` and `maj`, each as [value, low, high]."""
    return {name: [*astuple(getattr(statistics, name))] for name in ("mean", "best", "maj")}


def is_done(records: RunRecords, steps: int) -> bool:
    """Return whether the model after `steps` steps is written and evaluated. The evaluator must check this
    before it connects to the trainer, which may have ended already. If a finished run is continued with more
    steps, the final evaluation of the earlier steps does not count."""
    found = records.read("step", "model", "evaluation")
    trained = max((record.get("epoch", 0) for record in found if record["kind"] == "step"), default=0)
    written = any(record["kind"] == "model" and record["epoch"] >= trained for record in found)
    evaluations = (record for record in found if record["kind"] == "evaluation" and record.get("final"))
    evaluated = (record for record in evaluations if record["version"] >= steps)
    return written and any(record["epoch"] >= trained for record in evaluated)


async def main(ctx: ServiceContext) -> None:
    """Run the evaluator's process. Raises `ArealError` if it cannot continue."""
    job = ctx.job
    if job.tasks.evaluation is None:
        raise EvaluationError("there is nothing to evaluate on: set tasks.evaluation in the job file")
    prepare_evaluation(job)
    table = read_tasks(job.tasks.evaluation)
    tasks = list(table)
    workflow = workflow_of(job)
    renders = make_renderers(job)
    gateway = make_gateway(ctx, trains=False)
    lead = ctx.of(job.policy)
    others = [Companion(ctx.of(policy), renders[policy]) for policy in renders if policy != job.policy]
    engine, receiver = lone_engine(lead), receiver_of(lead, "evaluate")
    records = open_records(ctx)
    if await asyncio.to_thread(is_done, records, job.trainer.steps):
        log.info("the final snapshot was evaluated before this process was started")
        ctx.ready()
        return

    async def work() -> None:
        async with LocalScorer(job.reward, workers=1, inline=ctx.inline) as scorer:
            ctx.ready()
            for source in (receiver, *(other.source for other in others)):
                await connect(source)
            evaluator = Evaluator(
                engine,
                scorer,
                workflow,
                renders[job.policy],
                job=job,
                gateway=gateway,
                others=others,
                first_failure_ends=ctx.inline,
                whole=table.whole,
            )
            board.figures = lambda: ServiceFigures(doing=evaluator.doing())
            await follow(receiver, evaluator, tasks, records)

    try:
        await unless_stopped(ctx.stop, work())
    finally:
        await gateway.close()
        await engine.stop()
        await receiver.close()
        for other in others:
            await other.close()
        await asyncio.to_thread(records.close)


if __name__ == "__main__":
    from areal_async.service.main import run_service

    run_service("evaluator", main)
