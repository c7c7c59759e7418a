"""`areal-async evaluate`: the score of any model or checkpoint on any tasks with any reward.

Answers and figures are computed in the same way as by the evaluator of a run
(`rollout_service/evaluator.py`), but without a run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console, Group
from rich.table import Table

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.records import Task
from areal_async.base.verdicts import Score, Verdict, kind_of, message_of
from areal_async.cli.tools import EvaluateRequest, plain, print_json, run_tool
from areal_async.data.tasks import read_tasks
from areal_async.service.context import ServiceContext, settle
from areal_async.show.progress import progress
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput
from rollout_service.evaluator import Evaluation, Evaluator, lone_engine, prepare_evaluation
from rollout_service.process import make_gateway, make_renderers
from rollout_service.tools.serving import ModelFolder, lone_evaluator, target_of
from rollout_service.workflows import workflow_of


def answers_file(path: Path) -> IO[bytes]:
    """Create the file for the answers. Raises `ConfigError` if it exists already, or cannot be written."""
    try:
        return path.open("xb")
    except OSError as error:
        mistake = Mistake("--out", f"{path} cannot be written: {error.strerror}", "Name a new file")
        raise ConfigError("the command line", [mistake]) from error


def line_of(task: Task, sample: int, given: RewardInput, verdict: Verdict) -> bytes:
    """Return an answer as a line of JSON."""
    score = verdict if isinstance(verdict, Score) else None
    line = {
        "task_id": task.task_id,
        "data_source": task.data_source,
        "sample": sample,
        "prompt": given.prompt,
        "response": given.response,
        "ground_truth": given.ground_truth,
        "reward": score.value if score else None,
        "rewards": score.components if score else {},
        "verdict": kind_of(verdict),
        "message": message_of(verdict),
        "truncated": given.truncated,
    }
    return msgspec.json.encode(line, enc_hook=str) + b"\n"


def main(request: EvaluateRequest) -> None:
    with target_of(request.target) as target:
        for option, given in (("--data", request.data), ("--reward", request.reward)):
            if given is None and not target.content:
                mistake = Mistake(option, "a model folder has none of its own", f"Add {option}")
                raise ConfigError("the command line", [mistake])
        known = target.content.get("tasks", {})
        tasks = Path(request.data or known["evaluation"] or known["train"])
        sections = {"evaluation": {"engine": request.engine, "samples": request.samples}}
        if request.reward is not None:
            target.content.pop("reward", None)
            sections["reward"] = {"name": request.reward}
        answers: AbstractContextManager[IO[bytes] | None] = nullcontext()
        if request.out is not None:
            answers = answers_file(Path(request.out))
        with answers as out, lone_evaluator(target, request, sections, tasks=tasks) as ctx:
            begun_s = time.monotonic()
            done = asyncio.run(evaluated(ctx, target.model, request.limit, out))
            wall_s = time.monotonic() - begun_s
    samples = ctx.job.evaluation.samples
    if request.as_json:
        known = {"target": target.said, "data": str(tasks), "reward": ctx.job.reward.name, "samples": samples}
        sampling = ctx.job.evaluation_sampling
        known |= {"temperature": sampling.temperature, "max_new_tokens": sampling.max_new_tokens}
        figures = done.figures()
        print_json(known | figures | {"by_source": figures.pop("sources"), "wall_s": round(wall_s, 2)})
        return
    console = Console(highlight=False)
    console.print(f"{plain(target.said)} on {plain(str(tasks))}, {wall_s:.1f} s\n", markup=False)
    console.print(Group(*tables(done, samples)))
    if request.out is not None:
        console.print(f"The answers are in {request.out}.", markup=False)


async def evaluated(ctx: ServiceContext, model: Path, limit: int | None, out: IO[bytes] | None) -> Evaluation:
    """Answer and score the first `limit` held-out tasks of the job. Raises the evaluator's errors."""
    job = ctx.job
    assert job.tasks.evaluation is not None
    table = read_tasks(job.tasks.evaluation)
    tasks: Sequence[Task] = list(table)[:limit]
    prepare_evaluation(job)
    renders, gateway = make_renderers(job), make_gateway(ctx, trains=False)
    engine = lone_engine(ctx)
    try:
        async with LocalScorer(job.reward) as scorer:
            settle()
            workflow, render = workflow_of(job), renders[job.policy]
            how: Any = {"job": job, "gateway": gateway, "whole": table.whole}
            evaluator = Evaluator(engine, scorer, workflow, render, **how)
            cut = 0

            def take(task: Task, sample: int, given: RewardInput, verdict: Verdict) -> None:
                nonlocal cut
                cut += given.truncated
                if out is not None:
                    out.write(line_of(task, sample, given, verdict))

            evaluator.on_verdict = take
            asked, sampling = len(tasks) * job.evaluation.samples, job.evaluation_sampling
            how = f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"
            limit_text = f"at most {sampling.max_new_tokens} tokens (--max-new-tokens)"
            _note(f"answers: {asked}, sampling: {how} (--temperature), {limit_text}")
            with progress("answering", asked) as evaluator.on_answered:
                done = await evaluator.evaluate(ModelFolder(model, job.policy), tasks)
            if cut:
                _note(f"note: {cut} of {asked} answers ended at the limit, {limit_text}")
            return done
    finally:
        await gateway.close()
        await engine.stop()


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tables(done: Evaluation, samples: int) -> list[Table]:
    """Return the figures as tables: for all tasks, for each data source, and for each component of the
    reward."""
    name = "mean reward" if done.overall.partial_credit else "accuracy"
    several = (f"best@{samples}", f"maj@{samples}") if samples > 1 else ()
    title = f"{name}, mean@{samples}" if several else name
    table = _table("", title, "95 % interval", *several, "tasks", "unscored")
    rows = [("all", done.overall, sum(done.unscored.values()))]
    if len(done.by_source) > 1:
        rows += [(source, one, done.unscored.get(source, 0)) for source, one in done.by_source.items()]
    for label, one, unscored in rows:
        mean = one.mean
        interval = "–" if mean.low is None else f"{mean.low:.3f} to {mean.high:.3f}"
        others = [f"{figure.value:.3f}" for figure in (one.best, one.maj)] if several else []
        table.add_row(plain(label), f"{mean.value:.3f}", interval, *others, str(one.tasks), str(unscored))
    if not done.rewards:
        return [table]
    components = _table("component", "mean")
    for label, value in done.rewards.items():
        components.add_row(plain(label), f"{value:.3f}")
    return [table, components]


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    return table


if __name__ == "__main__":
    run_tool(EvaluateRequest, main)
