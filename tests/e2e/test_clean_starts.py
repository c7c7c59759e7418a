"""A job whose processes start as a user's do, by command: other tests fork them (`tests/forks.py`)."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from areal_async.service.fork_server import MODULE
from tests.forks import CLEAN_VARIABLE
from tests.processes import is_gone, words_of

pytestmark = pytest.mark.slow


def loads_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def test_services_are_forks_that_are_started_again_also_if_the_fork_server_is_killed(workspace, running):
    changes = {"trainer__steps": 12, "supervisor": {"first_pause_s": 0.1}}
    job_file = workspace.job("clean", evaluated=True, **changes)
    with running("run", job_file, **{CLEAN_VARIABLE: "1"}) as job:
        job.wait_for_steps(2)
        names = ("buffer", "reward", "trainer", "rollout-0", "evaluator")
        services = {name: job.service(name) for name in names}
        supervisor = psutil.Process(job.process.pid)
        assert {process.ppid() for process in services.values()} == {supervisor.pid}
        assert not any(map(loads_torch, (supervisor, services["buffer"], services["reward"])))
        for name in ("trainer", "buffer", "reward"):
            (server,) = (each for each in supervisor.children() if MODULE in words_of(each))
            if name == "buffer":
                server.kill()
                job.wait_for(lambda pid=server.pid: is_gone(pid), "the end of the fork server")
            services[name].send_signal(signal.SIGKILL)
            job.wait_for(lambda name=name: started_again(job, name, services[name]), f"another {name}")
        run = job.end()
    assert len({record["step"] for record in run.records("step")}) == 12


def started_again(job, name: str, before: psutil.Process) -> bool:
    try:
        return job.service(name).pid != before.pid
    except psutil.Error:
        return False
