"""How a job ends when it cannot go on: one paragraph that says why, and nothing left behind."""

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@contextmanager
def started(job_file: Path) -> Iterator[subprocess.Popen]:
    arguments = [sys.executable, "-m", "areal_async.cli.main", "run", str(job_file), "--plain"]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def read_until(process: subprocess.Popen, pattern: str, limit_s: float) -> str:
    """What the process printed up to a line that matches, or up to its end."""
    told, deadline_s = b"", time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not re.search(pattern, told.decode(errors="replace")):
            assert selector.select(deadline_s - time.monotonic()), f"no {pattern!r} in time: {told.decode()}"
            if not (chunk := os.read(process.stdout.fileno(), 65536)):
                break
            told += chunk
    return told.decode(errors="replace")


def run_of(job_file: Path) -> dict:
    """Id and volatile folders of the running job."""
    return json.loads((job_file.parent / "runs" / job_file.stem / "run.lock").read_text())


def service_process(run_id: str, name: str) -> psutil.Process:
    for process in psutil.process_iter():
        try:
            if process.environ().get("AREAL_ASYNC_RUN") == run_id and name in process.cmdline():
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"{name} does not run")


def assert_nothing_is_left(run: dict) -> None:
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("AREAL_ASYNC_RUN") == run["run_id"]:
                left.append(process)
        except psutil.Error:
            continue
    assert not left
    assert not Path(run["socket_dir"]).exists()
    assert not Path(run["shm_dir"]).exists()


def test_a_killed_service_ends_the_job_with_a_message_that_names_it(workspace):
    job_file = workspace.job("killed", trainer__steps=1000, checkpoint__every_steps=100)
    with started(job_file) as process:
        read_until(process, r"step [1-9]\d*/1000", 90)
        run = run_of(job_file)
        service_process(run["run_id"], "rollout-0").kill()
        told = read_until(process, r"(?!)", 30)
        assert process.wait(10) == 1
    assert "rollout-0" in told
    assert "SIGKILL" in told
    assert "Traceback" not in told
    assert_nothing_is_left(run)


def test_ctrl_c_ends_everything_within_ten_seconds_and_leaves_nothing(workspace):
    job_file = workspace.job("interrupted", trainer__steps=1000, checkpoint__every_steps=100)
    with started(job_file) as process:
        read_until(process, r"step [1-9]\d*/1000", 90)
        run = run_of(job_file)
        begun_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        told = read_until(process, r"(?!)", 15)
        assert process.wait(10) == 130
        assert time.monotonic() - begun_s < 10
    assert "Traceback" not in told
    assert_nothing_is_left(run)


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
