"""Workers join, die and leave while a job runs: all of them work, and nothing is lost."""

import subprocess
import sys

import pytest

from areal_async.config.load import load_job
from areal_async.runtime.events import read_events
from areal_async.status.record import read_run_log
from tests.chaos.history import check
from tests.chaos.job import promise_of
from tests.e2e.conftest import told_by

pytestmark = pytest.mark.slow

WORKFLOW = """
import asyncio
import os


async def slow_tool(ctx, task):
    reply = await ctx.generate(task.prompt)
    await asyncio.sleep(0.01 if os.path.exists({hurry!r}) else 2.0)
    await ctx.generate("=", parent=reply.segment, turn=1)
"""


@pytest.mark.nightly
def test_workers_join_die_and_leave_and_nothing_is_lost(workspace, running, tmp_path):
    # The job must not be over before all that is to happen has happened, and soon after.
    hurry = tmp_path / "hurry"
    workflow = WORKFLOW.format(hurry=str(hurry))
    (workspace.folder / "slow_tool.py").write_text(workflow, encoding="utf-8")
    job_file = workspace.job(
        "elastic",
        rollout__workflow="slow_tool.py:slow_tool",
        rollout__max_concurrent=8,
        rollout__sampling={"temperature": 0.9, "max_new_tokens": 6},
        buffer__lease_s=5,
        trainer__steps=120,
        checkpoint={"every_steps": 40, "keep": 2},
        observe={"metrics_port": 0, "event_log": True},
        supervisor={"restarts": 10, "first_pause_s": 0.1},
    )
    with running("run", job_file) as job:

        def puts(name):
            return [event for event in job.events("put_acked") if event["process"] == name]

        def works(name):
            before = len(puts(name))
            job.wait_for(lambda: len(puts(name)) > before, f"work of {name}", 200)

        job.wait_for(lambda: bool(job.steps()), "the first step", 200)
        context = job.folder / "topology.json"
        by_hand = [sys.executable, "-m", "rollout_service", "--topology", str(context), "--name"]
        guest = subprocess.Popen([*by_hand, "rollout-guest"], stderr=subprocess.DEVNULL)
        try:
            assert told_by("scale", job.folder, "--workers", 3) == "started rollout-1, rollout-2\n"
            for name in ("rollout-1", "rollout-2", "rollout-guest"):
                works(name)
            job.service("rollout-1").kill()
            told_by("drain", job_file, "rollout-guest", "--outside")
            told = told_by("drain", job_file, "rollout-2", "--timeout", 20)
            assert told.startswith("rollout-2 has finished, handed back the rest and ended")
            last = puts("rollout-2")[-1]["mono_s"]
            assert guest.wait(300) == 0
            works("rollout-1")
        finally:
            guest.kill()
            guest.wait()
        hurry.touch()
        summary = job.end().summary
    assert [(e["service"], e["status"]) for e in job.events("left")] == [("rollout-2", 0)]
    assert puts("rollout-2")[-1]["mono_s"] == last
    assert summary["restarts"] == {"rollout-1": 1}
    verdict = check(read_events(job.folder), promise_of(load_job(job_file)))
    assert verdict.violations == []
    assert load_job(job.folder / "job.yaml").rollout.workers == 2


PACED = """
import asyncio
import os
import time

from areal_async import advantage


async def slow_tool(ctx, task):
    await asyncio.sleep(0.0 if os.path.exists({turn!r}) else 1.0)
    await ctx.generate(task.prompt)


@advantage(needs_group=2)
def slowly(samples):
    time.sleep(1.2 if os.path.exists({turn!r}) and not os.path.exists({hurry!r}) else 0.0)
    return samples.reward - samples.reward.mean()
"""


@pytest.mark.nightly
def test_a_slow_workflow_adds_a_worker_and_a_slow_trainer_takes_it_away(workspace, running, tmp_path):
    turn, hurry = tmp_path / "turn", tmp_path / "hurry"
    code = PACED.format(turn=str(turn), hurry=str(hurry))
    (workspace.folder / "paced.py").write_text(code, encoding="utf-8")
    job_file = workspace.job(
        "autoscaled",
        rollout__workflow="paced.py:slow_tool",
        rollout__max_concurrent=16,
        rollout__concurrency="fixed",
        rollout__sampling={"temperature": 0.9, "max_new_tokens": 4},
        rollout__autoscale={"max": 2, "every_s": 5, "retry_s": 10, "drain_s": 20},
        trainer__steps=1000,
        trainer__objective={"advantage": "paced.py:slowly"},
        checkpoint={"every_steps": 20, "keep": 2},
        observe={"metrics_port": 0, "event_log": True},
    )
    with running("run", job_file) as job:

        def changes():
            return [(event["before"], event["workers"], event["reason"]) for event in job.events("scale")]

        grown, shrunk = (1, 2, "trainer_waits"), (2, 1, "workers_idle")
        job.wait_for(lambda: grown in changes(), "a second worker", 120)
        job.wait_for(lambda: any(e["service"] == "rollout-1" for e in job.events("ready")), "it serves", 60)
        turn.touch()
        job.wait_for(lambda: shrunk in changes(), "one worker less", 120)
        job.wait_for(lambda: any(e["service"] == "rollout-1" for e in job.events("left")), "its end", 60)
        left = [event for event in job.events("left") if event["service"] == "rollout-1"]
        assert left[0]["status"] == 0
        told = told_by("scale", job.folder, "--workers", 1)
        assert told.endswith("autoscaling is off from now on\n")
        job.process.terminate()
        hurry.touch()
        job.read_all()
    kinds = [record["kind"] for record in read_run_log(job.folder / "metrics.jsonl")]
    assert kinds.count("scale") == len(changes())
    assert load_job(job.folder / "job.yaml").rollout.autoscale.max == 0
