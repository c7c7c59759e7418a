"""Two jobs and one reward service, which comes late, dies in the middle and comes back."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]

STEPS, GROUPS, EPISODES = 8, 8, 4


@contextlib.contextmanager
def reward_service(registry):
    """`areal-async reward up`, once it says that it serves."""
    command = [sys.executable, "-m", "areal_async.cli.main", "reward", "up", "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--registry", str(registry)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert "reward service: 1 workers" in process.stdout.readline()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.timeout(300)
def test_verdicts_are_final_for_jobs_that_share_a_reward_service_which_is_killed(
    workspace, running, nothing_is_left, tmp_path
):
    registry = tmp_path / "registry"
    shared = {"service": "shared", "registry": str(registry), "timeout_s": 10}

    def job_file(name, reward):
        return workspace.job(
            name,
            tasks={"train": "train.parquet"},
            reward=reward | shared,
            trainer__steps=STEPS,
            checkpoint={"every_steps": 4, "keep": 2},
            observe={"metrics_port": 0, "event_log": True, "stall_s": 2.0},
            buffer={"max_staleness": 4, "batch_groups": GROUPS},
        )

    own = job_file("shared-own", {"name": "reward.py:share_of_ones"})
    built_in = job_file("shared-built-in", {"name": "arithmetic"})
    with running("run", own) as first, running("run", built_in) as second:
        told = first.read_until(r"areal-async reward up", limit_s=90)
        assert f"areal-async reward up --registry {registry}" in told
        with reward_service(registry) as service:
            first.wait_for_steps(2, limit_s=120)
            second.wait_for_steps(1, limit_s=120)
            service.kill()
            service.wait()
        left = [job.record for job in (first, second)]
        with reward_service(registry):
            assert "done" in first.read_all(150).lower()
            second.read_all(150)
            assert (first.process.wait(60), second.process.wait(60)) == (0, 0)
            assert not list(registry.glob("job-*"))
    for job, record in zip((first, second), left, strict=True):
        summary = json.loads((job.folder / "summary.json").read_text())
        assert summary["steps"] == STEPS
        assert summary["episodes_trained"] == STEPS * GROUPS * EPISODES
        assert summary["episodes_dropped"] == 0
        nothing_is_left(record)
        assert os.path.exists(job.folder / "logs" / "reward.log")
