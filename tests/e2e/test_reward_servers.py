"""Rewards in other languages: a server that holds none of our code drives a real job, and loses nothing when
it is killed and started again in mid-job."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import told_by

pytestmark = pytest.mark.slow

SERVERS = Path(__file__).parents[2] / "examples" / "reward_servers"
STEPS = 12


@pytest.fixture
def start_server():
    """Start the example server, at a free port or a given one; its process and its address."""
    if (node := shutil.which("node")) is None:
        pytest.skip("needs Node.js: the Debian package nodejs")
    with contextlib.ExitStack() as stack:

        def start(port=()):
            # Only what it needs: none of our code is on its path.
            options = {"stdout": subprocess.PIPE, "env": {"PATH": os.environ["PATH"]}, "cwd": SERVERS}
            process = stack.enter_context(subprocess.Popen([node, SERVERS / "server.js", *port], **options))
            stack.callback(process.kill)
            return process, process.stdout.readline().decode().split()[-1]

        yield start


def test_a_server_in_another_language_trains_a_job_and_its_death_loses_nothing(
    workspace, running, start_server, tmp_path
):
    server, url = start_server()
    job_file = workspace.job(
        "node-reward",
        reward={"name": "remote", "timeout_s": 10, "args": {"urls": [url], "reward": "share_of_ones"}},
        trainer__steps=STEPS,
        observe={"metrics_port": 0, "event_log": True, "stall_s": 2},
    )
    with running("run", job_file) as job:
        job.wait_for(lambda: len(job.steps()) >= 4, "step 4", 200)
        server.kill()
        server.wait()
        # What is scored and not yet trained is used up; then the job stands still for want of rewards.
        job.read_until("stalled for")
        start_server([url.rpartition(":")[2]])
        job.end()

    assert len({step["step"] for step in job.steps()}) == STEPS
    kinds = {item[2] for event in job.events("verdicts") for item in event["items"]}
    assert kinds == {"score"}, "the death of the server became verdicts"
    told_by("buffer", "export", job.folder, tmp_path / "batches.parquet", "--batches")
    rows = pq.read_table(tmp_path / "batches.parquet", columns=["response_text", "reward"]).to_pylist()
    assert len(rows) == STEPS * 8 * 4
    for row in rows:
        text = row["response_text"]
        assert row["reward"] == pytest.approx(text.count("1") / max(1, len(text)), abs=1e-6)
    rewards = [step["reward_mean"] for step in job.steps()]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2, "the job learned nothing"
