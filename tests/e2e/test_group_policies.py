"""A real job that compares with a greedy answer, whose episodes do not all come in time, and one of whose
workers is stopped as planned."""

import signal

import pytest

from trainer_service.data.recording import read_step

pytestmark = pytest.mark.slow

STRAGGLERS = """
import asyncio
import os
from pathlib import Path


async def stragglers(ctx, task):
    await ctx.generate(task.prompt)
    late = {0: 0, 1: 3}.get(int(task.task_id.split(":")[1]) % 3)
    if ctx.sample == late:
        (Path(__file__).parent / f"straggler-of-{os.getpid()}").touch()
        await asyncio.sleep(120)
"""
"""Of each three groups one lacks its greedy answer, one lacks another sample."""
STEPS, GROUPS = 8, 8


@pytest.mark.nightly
def test_groups_are_whole_or_partial_by_policy_and_a_stopped_worker_hands_over(workspace, running):
    (workspace.folder / "stragglers.py").write_text(STRAGGLERS, encoding="utf-8")
    job_file = workspace.job(
        "stragglers",
        rollout__workers=2,
        rollout__max_concurrent=32,
        rollout__workflow="stragglers.py:stragglers",
        buffer={
            "max_staleness": 2,
            "batch_groups": GROUPS,
            "lease_s": 1.5,
            "group": {"policy": "deadline_partial", "deadline_s": 3.0, "min_samples": 2},
            "dynamic_filtering": True,
        },
        trainer__steps=STEPS,
        trainer__objective={"preset": "remax"},
        supervisor={"ready_s": 600, "restarts": 10, "first_pause_s": 0.1},
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 2, "step 2")
        worker = job.service("rollout-0")
        straggler = workspace.folder / f"straggler-of-{worker.pid}"
        straggler.unlink(missing_ok=True)
        # Of its group's 3 s next to nothing has passed then: the worker has something to hand over.
        job.wait_for(straggler.exists, "a straggler")
        worker.send_signal(signal.SIGTERM)
        run = job.end()
    summary, steps = run.summary, run.records("step")
    assert summary["restarts"] == {"rollout-0": 1}
    counted = summary["transitions"]
    assert counted["absent"] > 0
    assert counted["generated:deadline"] > 0
    assert counted["worker_drains"] >= 1
    assert counted["queued:drained"] > 0
    trained = [step["episodes"] for step in steps]
    assert sum(trained) == summary["episodes_trained"]
    assert min(trained) < GROUPS * 4, "some of the groups trained were partial"
    assert min(trained) >= GROUPS * 2
    assert summary["max_staleness_seen"] <= 2
    lacking = [step["groups_without_baseline"] for step in steps]
    assert 0 < sum(lacking) < STEPS * GROUPS
    assert all(step["grad_norm"] > 0 for step in steps)
    for number, without in enumerate(lacking):
        groups = read_step(run.folder / "batches", number).batch.groups
        greedy = [episode for group in groups for episode in group.episodes if episode.sample == 0]
        assert len(greedy) == len(groups) - without
        assert {episode.n_sampled for episode in greedy} == {0}
        others = [episode for group in groups for episode in group.episodes if episode.sample]
        assert all(episode.n_sampled for episode in others)
