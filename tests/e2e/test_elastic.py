"""Workers join, die and leave while a job runs, by decisions of autoscaling and by hand: all of them work,
and nothing is lost."""

import subprocess
import sys

import pytest

from areal_async.base.events import read_events
from areal_async.config.load import load_job
from tests.chaos.history import check
from tests.chaos.job import promise_of
from tests.e2e.conftest import told_by
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

PACED = """
import asyncio
import os
import time

from areal_async import advantage


async def slow_tool(ctx, task):
    reply = await ctx.generate(task.prompt)
    await asyncio.sleep(0.0 if os.path.exists({turn!r}) else 1.0)
    await ctx.generate("=", parent=reply.segment, turn=1)


@advantage(needs_group=2)
def slowly(samples):
    time.sleep(1.2 if os.path.exists({turn!r}) and not os.path.exists({hurry!r}) else 0.0)
    return samples.reward - samples.reward.mean()
"""
"""First generation is slow, then training is, then neither."""


@pytest.mark.nightly
def test_workers_join_die_and_leave_by_autoscaling_and_by_hand_and_nothing_is_lost(
    workspace, running, tmp_path
):
    turn, hurry = tmp_path / "turn", tmp_path / "hurry"
    code = PACED.format(turn=str(turn), hurry=str(hurry))
    (workspace.folder / "paced.py").write_text(code, encoding="utf-8")
    job_file = workspace.job(
        "elastic",
        rollout__workflow="paced.py:slow_tool",
        rollout__max_concurrent=16,
        rollout__sampling={"temperature": 0.9, "max_new_tokens": 4},
        rollout__autoscale={"max": 2, "every_s": 5, "retry_s": 10, "drain_s": 20},
        buffer__lease_s=5,
        trainer__steps=300,
        trainer__objective={"advantage": "paced.py:slowly"},
        checkpoint={"every_steps": 20, "keep": 2},
        observe={"metrics_port": 0, "event_log": True},
        supervisor={"restarts": 10, "first_pause_s": 0.1},
    )
    with running("run", job_file) as job:

        def changes():
            return [(event["before"], event["workers"], event["reason"]) for event in job.events("scale")]

        def of(kind, name):
            return [event for event in job.events(kind) if event["service"] == name]

        def puts(name):
            return [event for event in job.events("put_acked") if event["process"] == name]

        def works(name):
            before = len(puts(name))
            job.wait_for(lambda: len(puts(name)) > before, f"an episode of {name}")

        job.wait_for(lambda: (1, 2, "trainer_waits") in changes(), "a second worker")
        job.wait_for(lambda: of("ready", "rollout-1"), "it serves")
        turn.touch()
        job.wait_for(lambda: (2, 1, "workers_idle") in changes(), "one worker less")
        job.wait_for(lambda: of("left", "rollout-1"), "its end")
        assert of("left", "rollout-1")[0]["status"] == 0
        by_hand = [sys.executable, "-m", "rollout_service", "--topology", job.folder / "topology.json"]
        guest = subprocess.Popen([*by_hand, "--name", "rollout-guest"], stderr=subprocess.DEVNULL)
        try:
            told = told_by("scale", job.folder, "--workers", 3)
            assert told.startswith("started rollout-1, rollout-2")
            assert told.endswith("autoscaling is off from now on\n")
            for name in ("rollout-1", "rollout-2", "rollout-guest"):
                works(name)
            job.service("rollout-1").kill()
            told_by("drain", job_file, "rollout-guest", "--outside")
            told = told_by("drain", job_file, "rollout-2", "--timeout", 20)
            assert told.startswith("rollout-2 has finished, handed back the rest and ended")
            last = puts("rollout-2")[-1]["mono_s"]
            assert guest.wait(LIMIT_S) == 0
            works("rollout-1")
        finally:
            guest.kill()
            guest.wait()
        hurry.touch()
        run = job.end()
    assert of("left", "rollout-2")[0]["status"] == 0
    assert puts("rollout-2")[-1]["mono_s"] == last
    assert run.summary["restarts"] == {"rollout-1": 1}
    assert check(read_events(run.folder), promise_of(load_job(job_file))).violations == []
    assert len(run.records("scale")) == len(changes())
    assert load_job(run.folder / "job.yaml").rollout.autoscale.max == 0
