"""Workers join, die and leave while a job runs: all of them work, and nothing is lost."""

import subprocess
import sys

import pytest

from areal_async.config.load import load_job
from tests.chaos.history import check
from tests.chaos.job import promise_of
from tests.e2e.conftest import told_by
from tests.events import read_events
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.slow

PACED = """
import asyncio
from pathlib import Path

HOLD = Path(__file__).with_name("hold")


async def slow_tool(ctx, task):
    reply = await ctx.generate(task.prompt)
    if HOLD.exists():
        await asyncio.sleep(2)
    await ctx.generate("=", parent=reply.segment, turn=1)
"""


@pytest.mark.nightly
def test_workers_join_die_and_leave_and_nothing_is_lost(workspace, running):
    (workspace.folder / "paced.py").write_text(PACED, encoding="utf-8")
    hold = workspace.folder / "hold"
    hold.touch()  # else a fast trainer is done before all workers have come and gone
    job_file = workspace.job(
        "elastic",
        rollout__workflow="paced.py:slow_tool",
        rollout__max_concurrent=16,
        rollout__sampling={"temperature": 0.9, "max_new_tokens": 4},
        buffer__lease_s=5,
        trainer__steps=300,
        checkpoint={"every_steps": 20, "keep": 2},
        observe={"metrics_port": 0, "event_log": True},
        supervisor={"restarts": 10, "first_pause_s": 0.1},
    )
    with running("run", job_file) as job:

        def of(kind, name):
            return [event for event in job.events(kind) if event["service"] == name]

        def puts(name):
            return [event for event in job.events("put_acked") if event["process"] == name]

        def works(name):
            before = len(puts(name))
            job.wait_for(lambda: len(puts(name)) > before, f"an episode of {name}")

        works("rollout-0")
        by_hand = [sys.executable, "-m", "rollout_service", "--topology", job.folder / "topology.json"]
        guest = subprocess.Popen([*by_hand, "--name", "rollout-guest"], stderr=subprocess.DEVNULL)
        try:
            told = told_by("scale", job.folder, "--workers", 3)
            assert told.startswith("started rollout-1, rollout-2")
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
        hold.unlink()
        run = job.end()
    assert of("left", "rollout-2")[0]["status"] == 0
    assert puts("rollout-2")[-1]["mono_s"] == last
    assert run.summary["restarts"] == {"rollout-1": 1}
    assert check(read_events(run.folder), promise_of(load_job(job_file))).violations == []
    assert load_job(run.folder / "job.yaml").rollout.workers == 2
