"""A real job whose episodes do not all come in time, and one of whose workers is stopped as planned."""

import signal

import pytest

pytestmark = pytest.mark.slow

STRAGGLERS = """
import asyncio
import os
from pathlib import Path


async def stragglers(ctx, task):
    await ctx.generate(task.prompt)
    if ctx.sample == 3 and int(task.task_id.split(":")[1]) % 3 == 0:
        (Path(__file__).parent / f"straggler-of-{os.getpid()}").touch()
        await asyncio.sleep(120)
"""


@pytest.mark.nightly
def test_groups_are_whole_or_partial_by_policy_and_a_stopped_worker_hands_over(workspace, running):
    steps = 8
    (workspace.folder / "stragglers.py").write_text(STRAGGLERS, encoding="utf-8")
    job_file = workspace.job(
        "stragglers",
        rollout__workers=2,
        rollout__max_concurrent=16,
        rollout__workflow="stragglers.py:stragglers",
        buffer={
            "max_staleness": 2,
            "batch_groups": 8,
            "lease_s": 1.5,
            "group": {"policy": "deadline_partial", "deadline_s": 3.0, "min_samples": 2},
            "dynamic_filtering": True,
        },
        trainer__steps=steps,
        supervisor={"ready_s": 600, "restarts": 10, "first_pause_s": 0.1},
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 2, "step 2", 200)
        worker = job.service("rollout-0")
        straggler = workspace.folder / f"straggler-of-{worker.pid}"
        straggler.unlink(missing_ok=True)
        # Of its group's 3 s next to nothing has passed then: the worker has something to hand over.
        job.wait_for(straggler.exists, "a straggler")
        worker.send_signal(signal.SIGTERM)
        summary = job.end().summary
    assert summary["restarts"] == {"rollout-0": 1}
    counted = summary["transitions"]
    assert counted["absent"] > 0
    assert counted["generated:deadline"] > 0
    assert counted["worker_drains"] >= 1
    assert counted["queued:drained"] > 0
    trained = [step["episodes"] for step in job.steps()]
    assert sum(trained) == summary["episodes_trained"]
    assert min(trained) < 8 * 4, "some of the groups trained were partial"
    assert min(trained) >= 8 * 2
    assert summary["max_staleness_seen"] <= 2
