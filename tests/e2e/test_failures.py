"""How a job ends when it cannot go on: one paragraph that says why, and nothing left behind."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]

FRAIL = {"ready_s": 120, "restarts": 1, "first_pause_s": 0.1}


def test_a_service_that_keeps_dying_ends_the_job_with_a_message_that_names_it(
    workspace, running, nothing_is_left
):
    job_file = workspace.job("frail", trainer__steps=1000, checkpoint__every_steps=100, supervisor=FRAIL)
    with running("run", job_file) as job:
        job.read_until(r"step [1-9]\d*/1000", 200)
        run = job.record
        job.service("rollout-0").kill()
        job.read_until("rollout-0 was killed by SIGKILL; it is started again", 60)
        job.wait_for_steps(8)
        job.service("rollout-0").kill()
        told = job.read_all(60)
        assert job.process.wait(60) == 1
    assert "rollout-0 was killed by SIGKILL" in told
    assert "death number 2" in told
    assert f"areal-async resume {job.folder}" in " ".join(told.split())
    assert "Traceback" not in told
    nothing_is_left(run)


def test_ctrl_c_ends_everything_and_leaves_nothing(workspace, running, nothing_is_left):
    job_file = workspace.job("interrupted", trainer__steps=1000, checkpoint__every_steps=100)
    with running("run", job_file) as job:
        job.read_until(r"step [1-9]\d*/1000", 200)
        run = job.record
        job.process.send_signal(signal.SIGINT)
        told = job.read_all(60)
        assert job.process.wait(60) == 130
    assert "Traceback" not in told
    assert "areal-async resume" in told
    nothing_is_left(run)


def refused(job_file: Path) -> str:
    """The text with which the command line refuses to start the job."""
    arguments = [sys.executable, "-m", "areal_async.cli.main", "run", str(job_file), "--plain"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert not (job_file.parent / "runs" / job_file.stem).exists()
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def test_a_missing_model_is_refused_before_anything_starts(workspace):
    told = refused(workspace.job("no-model", model="nowhere"))
    assert "model" in told
    assert "nowhere" in told


def test_an_unreadable_task_file_is_refused_before_anything_starts(workspace):
    (workspace.folder / "broken.parquet").write_bytes(b"not parquet")
    told = refused(workspace.job("no-tasks", tasks={"train": "broken.parquet"}))
    assert "tasks.train" in told
    assert "broken.parquet" in told


def test_a_busy_port_is_refused_before_anything_starts(workspace):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        told = refused(workspace.job("busy-port", observe={"metrics_port": port}))
    assert str(port) in told
    assert "observe.metrics_port" in told
