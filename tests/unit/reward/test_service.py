"""The process of the reward service against a buffer that speaks the real wire."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import psutil
import pytest

from areal_async.config.job import JobConfig
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.verdicts import Score
from areal_async.runtime.context import RunPlaces, ServicePlace
from areal_async.runtime.service import STOPPED_STATUS
from tests.scrape import fetch_samples
from tests.unit.reward.wire_buffer import DEADLINE_S, WireBuffer


@pytest.fixture
def endpoint(tmp_path):
    RunSecret.make(tmp_path)
    return f"ipc://{tmp_path}/b"


@pytest.fixture
def start(tmp_path, endpoint):
    """Start the service for a reward; returns (process, what it told when ready)."""
    started = []

    def run(reward="arithmetic", workers=2):
        job = JobConfig.model_validate(
            {
                "job": "demo",
                "model": str(tmp_path),
                "tasks": {"train": str(tmp_path / "tasks.jsonl")},
                "reward": {"name": reward, "workers": workers, "timeout_s": 600},
            }
        )
        places = RunPlaces(
            run_id="r",
            supervisor_pid=os.getpid(),
            run_dir=str(tmp_path),
            socket_dir=str(tmp_path),
            shm_dir=str(tmp_path),
            buffer_endpoint=endpoint,
            weights_endpoint=f"ipc://{tmp_path}/w",
            services=[ServicePlace("reward-0", "reward", 0, "reward_service", 0)],
            job=job.model_dump(mode="json"),
        )
        context = tmp_path / "context.json"
        context.write_bytes(msgspec.json.encode(places))
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "reward_service", "--context", str(context), "--name", "reward-0"]
        with open(tmp_path / "reward.log", "w") as log:
            process = subprocess.Popen(
                [*command, "--ready-fd", str(write_fd)], pass_fds=(write_fd,), stdout=log, stderr=log
            )
        os.close(write_fd)
        started.append(process)
        with open(read_fd) as told:
            return process, told.readline()

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def play():
    """Run a buffer's coroutine beside blocking test code. It is given an event that the test sets, or the
    end of the test; the function returned waits for its result."""
    threads = []

    def begin(coroutine_function):
        stopped, result = threading.Event(), {}

        async def run():
            result["value"] = await coroutine_function(lambda: asyncio.to_thread(stopped.wait, DEADLINE_S))

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        threads.append((thread, stopped))

        def finish():
            stopped.set()
            thread.join(DEADLINE_S)
            return result["value"]

        return finish

    yield begin
    for thread, stopped in threads:
        stopped.set()
        thread.join(DEADLINE_S)


def family(process):
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes):
    deadline = time.monotonic() + 60
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < deadline, processes
        os.sched_yield()


def test_the_service_scores_over_a_restart_of_the_buffer_and_stops_clean(endpoint, start, play):
    served = threading.Event()

    async def buffer(end_of_test):
        front = WireBuffer(endpoint, 300)
        async with front.serving():
            await front.until(lambda: len(front.taken) >= 100)
        # As a buffer does when a claim runs out: its reply may have been lost with the first server.
        front.left += [name for name in front.claimed if name not in front.taken]
        async with front.serving():
            await front.until(lambda: set(front.taken) == {f"t#0.{n}" for n in range(300)})
            served.set()
            await end_of_test()
        return front

    finish = play(buffer)
    process, told = start()
    assert served.wait(DEADLINE_S)
    samples = fetch_samples(json.loads(told)["metrics_port"])
    assert samples['areal_reward_verdicts_total{kind="score",reward="arithmetic"}'] >= 300
    assert samples["areal_reward_workers_alive"] == 2
    assert samples['areal_busy_seconds_total{activity="score"}'] > 0
    workers = family(process)
    assert len(workers) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == STOPPED_STATUS
    all_gone(workers)
    assert all(verdict == Score(1.0) for verdict in finish().taken.values())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_stopped_amid_hanging_calls_leaves_no_process(endpoint, start, play, tmp_path, how):
    file = tmp_path / "hang.py"
    file.write_text(
        "from reward_service.sdk import reward\n@reward\ndef f(given):\n    while True:\n        pass\n"
    )
    hanging = threading.Event()

    async def buffer(end_of_test):
        front = WireBuffer(endpoint, 20)
        async with front.serving():
            await front.until(lambda: front.claimed)
            hanging.set()
            await end_of_test()
        return front

    finish = play(buffer)
    process, _ = start(f"{file}:f")
    assert hanging.wait(DEADLINE_S)
    workers = family(process)
    assert len(workers) == 2
    process.send_signal(how)
    assert process.wait(60) == (STOPPED_STATUS if how == signal.SIGTERM else -9)
    all_gone(workers)
    assert finish().taken == {}


def test_a_reward_that_cannot_be_loaded_ends_the_service_with_one_paragraph(start, tmp_path):
    process, told = start("no_such_file.py:f")
    assert process.wait(60) == 1
    assert told == ""
    log = (tmp_path / "reward.log").read_text()
    assert "there is no file no_such_file.py" in log
    assert "Traceback" not in log
