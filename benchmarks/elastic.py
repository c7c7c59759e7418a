"""A running job whose workers come and go: throughput in each phase, and what was lost.

    python -m benchmarks.elastic --phase 20 --out benchmarks/results/elastic.json

One worker; two more (`areal-async scale`); one is killed; one is drained (`areal-async drain`). Generation is
what the job waits for, and does not need the cores: each episode calls a tool that takes `--tool` seconds on
average (exponential, from the episode's seed), so that throughput is a matter of how many run at once. A
worker runs at most 16.

Throughput is episodes acknowledged by the buffer, by the event log, from the moment in which the phase's
workers all serve (in the phase with the kill: from the kill) to its end. Lost is what the history checker of
the chaos tests finds: an acknowledged episode that is in no batch and was not dropped by name, or anything
else that breaks a promise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from areal_async.cli.quickstart.model import split_problems, write_model, write_tasks
from areal_async.launch.run_handle import change_workers
from areal_async.rpc.control_messages import DrainWorker, ScaleWorkers
from tests.chaos.history import check
from tests.chaos.job import Job, promise_of
from tests.jobs import REWARD

AT_ONCE = 16
"""Episodes in one worker."""
GROUP, BATCH = 4, 8
AHEAD = 8
"""`buffer.max_staleness`: steps that may be generated ahead."""
BETWEEN_S = 90.0
"""Allowance for the starts of workers, times the workers that go on meanwhile."""
LIMIT_S = 120.0
POLL_S = 0.05
DRAIN_MS = 30_000
WORKFLOW = """
import asyncio
import os
import random


async def slow_tool(ctx, task):
    reply = await ctx.generate(task.prompt)
    draw = random.Random(f"{ctx.episode_id}/{ctx.attempt}")
    await asyncio.sleep(draw.expovariate(1 / float(os.environ["TOOL_S"])))
    await ctx.generate("=", parent=reply.segment, turn=1)
"""


@dataclass
class Phase:
    name: str
    workers: int
    """That are to be there."""
    begin_s: float = 0.0
    """Monotonic, as in the event log."""
    end_s: float = 0.0
    settled_after_s: float = 0.0
    """From what was done until all its workers served (or the drained one had ended)."""
    episodes: int = 0
    per_s: float = 0.0
    relative: float = 0.0
    """Of one worker's throughput in the first phase, times the workers."""


@dataclass
class Outcome:
    phases: list[Phase]
    violations: list[str]
    episodes_acknowledged: int
    episodes_trained: int
    episodes_lost: int
    restarts: dict[str, int]
    drained_status: int | None
    told: list[str] = field(default_factory=list)
    """What the two commands answered."""


def write_job(folder: Path, steps: int) -> Path:
    """The job file, with a model, tasks, reward and workflow beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    train, _ = split_problems(0, 64)
    write_tasks(train, folder / "train.jsonl", "train")
    write_model(folder / "model", seed=0)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "workflow.py").write_text(WORKFLOW, encoding="utf-8")
    job = {
        "job": "elastic",
        "seed": 1,
        "run_dir": "runs",
        "model": "model",
        "tasks": {"train": "train.jsonl"},
        "rollout": {
            "group_size": GROUP,
            "max_concurrent": AT_ONCE,
            "max_model_len": 48,
            "workflow": "workflow.py:slow_tool",
            "sampling": {"temperature": 1.0, "max_new_tokens": 6},
        },
        "buffer": {"max_staleness": AHEAD, "batch_groups": BATCH, "lease_s": 5.0, "max_groups": 1024},
        "reward": {"name": "reward.py:share_of_ones", "workers": 1},
        "trainer": {
            "steps": steps,
            "optimizer": {"lr": 1e-4, "clip_grad_norm": 0.2},
            "objective": {"prox": "reuse"},
        },
        "checkpoint": {"every_steps": 20},
        "evaluation": {"sampling": {"max_new_tokens": 6}},
        "observe": {"metrics_port": 0, "event_log": True},
        "supervisor": {"restarts": 20, "first_pause_s": 0.1},
    }
    path = folder / "elastic.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def steps_for(phase_s: float, tool_s: float) -> int:
    """Enough for four phases and what lies between them: nothing is generated beyond the last step, so that
    the last phase must end well before."""
    worker_s = phase_s * (1 + 3 + 3 + 2) + BETWEEN_S
    return math.ceil(worker_s * AT_ONCE / tool_s / (GROUP * BATCH)) + AHEAD


def play(folder: Path, *, phase_s: float, tool_s: float, steps: int = 0) -> Outcome:
    """The whole story in `folder`. Raises `SystemExit` where the job fails."""
    job_file = write_job(folder, steps or steps_for(phase_s, tool_s))
    os.environ["TOOL_S"] = str(tool_s)
    job = Job(job_file)
    told: list[str] = []
    phases = [
        Phase("one worker", 1),
        Phase("two more", 3),
        Phase("one killed", 3),
        Phase("one drained", 2),
    ]

    def until(condition: Callable[[], object], what: str) -> None:
        limit_s = time.monotonic() + LIMIT_S
        while not condition():
            if not job.running or time.monotonic() > limit_s:
                raise SystemExit(f"{what} did not come: {job.told()}")
            time.sleep(POLL_S)

    def workers() -> set[str]:
        return {name for name in job.serving() if name.startswith("rollout-")}

    def measure(phase: Phase, began_s: float, *, from_now: bool = True) -> None:
        phase.settled_after_s = time.monotonic() - began_s
        phase.begin_s = time.monotonic() if from_now else began_s
        left_s = phase.begin_s + phase_s - time.monotonic()
        try:
            job.wait(max(0.0, left_s))
        finally:
            phase.end_s = time.monotonic()
        if not job.running:
            raise SystemExit(f"the job ended in the phase {phase.name!r}; give it more --steps: {job.told()}")

    job.start()
    try:
        until(lambda: workers() == {"rollout-0"} and job.steps_logged() >= 2, "the second step")
        measure(phases[0], time.monotonic())
        began_s = time.monotonic()
        told.append(change_workers(job.run_dir, ScaleWorkers(3, DRAIN_MS)).text)
        until(lambda: len(workers()) == 3, "the third worker")
        measure(phases[1], began_s)
        began_s = time.monotonic()
        job.signal("rollout-1", signal.SIGKILL)
        until(lambda: "rollout-1" not in workers(), "the death")
        until(lambda: len(workers()) == 3, "the third worker again")
        measure(phases[2], began_s, from_now=False)
        began_s = time.monotonic()
        told.append(change_workers(job.run_dir, DrainWorker("rollout-2", DRAIN_MS)).text)
        measure(phases[3], began_s)
        if job.wait(LIMIT_S + 5 * phase_s) != 0:
            raise SystemExit(f"the job failed: {job.told()}")
    finally:
        job.end()
    return judge(job, phases, told)


def judge(job: Job, phases: Sequence[Phase], told: list[str]) -> Outcome:
    events = job.events()
    for phase in phases:
        acked = [
            len(event["stored"])
            for event in events
            if event["event"] == "put_acked" and phase.begin_s <= event["mono_s"] < phase.end_s
        ]
        phase.episodes = sum(acked)
        phase.per_s = phase.episodes / (phase.end_s - phase.begin_s)
        phase.relative = phase.per_s / (phases[0].per_s * phase.workers) if phases[0].per_s else 0.0
    verdict = check(events, promise_of(job.config))
    left = [event for event in events if event["event"] == "left"]
    summary = job.summary()
    lost = [violation for violation in verdict.violations if "lost" in violation.promise]
    return Outcome(
        phases=list(phases),
        violations=[str(violation) for violation in verdict.violations],
        episodes_acknowledged=sum(len(e["stored"]) for e in events if e["event"] == "put_acked"),
        episodes_trained=summary["episodes_trained"],
        episodes_lost=len(lost),
        restarts=summary["restarts"],
        drained_status=left[-1]["status"] if left else None,
        told=told,
    )


def show(outcome: Outcome) -> None:
    print(f"{'phase':>12} {'workers':>8} {'episodes/s':>11} {'relative':>9} {'settled s':>10}")
    for phase in outcome.phases:
        print(
            f"{phase.name:>12} {phase.workers:>8} {phase.per_s:>11.1f} {phase.relative:>9.2f} "
            f"{phase.settled_after_s:>10.1f}"
        )
    print(
        f"\n{outcome.episodes_acknowledged} episodes acknowledged, {outcome.episodes_trained} trained, "
        f"{outcome.episodes_lost} lost; violations: {outcome.violations or 'none'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--phase", type=float, default=20.0, help="seconds measured in each phase")
    parser.add_argument("--tool", type=float, default=1.0, help="mean seconds of a tool call")
    parser.add_argument("--steps", type=int, default=0, help="of the job; 0: as many as the phases need")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is ended, too
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        outcome = play(Path(folder), phase_s=options.phase, tool_s=options.tool, steps=options.steps)
    show(outcome)
    if options.out:
        stated = {
            "command": "python -m benchmarks.elastic " + " ".join(sys.argv[1:]),
            "cores": len(os.sched_getaffinity(0)),
            "tool_s": options.tool,
            "at_once_per_worker": AT_ONCE,
        }
        options.out.write_text(json.dumps(stated | asdict(outcome), indent=2) + "\n")
    if outcome.violations:
        sys.exit(1)


if __name__ == "__main__":
    main()
