"""A small real job, run from the command line, whose processes can be found, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from areal_async.base.events import VARIABLE
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.launch.plan import services_of
from areal_async.service.record import read_run_log
from replay_buffer.ledger.rules import TaskOrder
from tests.chaos.material import Promise
from tests.events import read_events
from tests.forks import ForkedCommand, start_command
from tests.jobs import DUET, make_workspace

SERVICES = ("rollout-0", "rollout-1", "reward", "buffer", "trainer", "evaluator")
ROLES = (*SERVICES, "redis", "supervisor")
DUET_ROLES = [
    *(role for role in ROLES if role != "trainer"),
    "trainer-coder",
    "trainer-tester",
]
"""Of a job of two policies."""


def write_job(folder: Path, name: str, *, steps: int, seed: int, durability: str, **changes: Any) -> Path:
    """A job file in `folder`, with a model, tasks and a reward beside it; `changes` as in `Workspace.job`."""
    pauses = {"window_s": 20, "first_pause_s": 0.1, "longest_pause_s": 0.5}
    settings = {
        "rollout__workers": 2,
        "rollout__max_concurrent": 16,
        "buffer__durability": durability,
        "buffer__lease_s": 5.0,
        "buffer__on_abandoned": "drop",  # the checker holds the run to its lineage
        "trainer__steps": steps,
        "trainer__record_batches": False,
        "checkpoint": {"every_steps": 5, "keep": 2},
        "evaluation__every_steps": 10,
        "observe": {"metrics_port": 0, "event_log": True, "stall_s": 20},
        "supervisor": {"ready_s": 600, "restarts": 1000, **pauses},
    }
    return make_workspace(folder).job(name, evaluated=True, seed=seed, **settings | changes)


def write_duet(folder: Path, name: str, *, steps: int, seed: int, **changes: Any) -> Path:
    """A job file of two policies, the second of twice as many steps half as large, and of another η."""
    tester = {"buffer": {"batch_groups": 4, "max_staleness": 2}, "trainer": {"steps": 2 * steps}}
    policies = {"coder": {}, "tester": tester}
    changes = {"policies": policies, "rollout__workflow": DUET} | changes
    return write_job(folder, name, steps=steps, seed=seed, durability="always", **changes)


def promise_of(job: JobConfig, *, lost_s: float = 0.0) -> Promise:
    """What the checker holds the run of `job` to."""
    order = TaskOrder.of(job)

    def task_at(position: int) -> str:
        place = order.at(position)
        assert place is not None
        return order.task(*place).task_id

    return Promise(
        steps=job.trainer.steps,
        batch_groups=job.buffer.batch_groups,
        group_size=job.rollout.group_size,
        max_staleness=job.buffer.max_staleness,
        lost_s=lost_s,
        task_at=task_at,
    )


class JobFailed(Exception):
    """The job ended, and not because it was done."""


@dataclass
class Job:
    """One run of a job file, through as many supervisors as it takes."""

    job_file: Path
    failpoints: str = ""

    def __post_init__(self) -> None:
        self.config = load_job(self.job_file)
        self.run_dir = self.config.run_dir / self.config.job
        self.output = self.job_file.with_suffix(".out")
        self.process: subprocess.Popen[bytes] | ForkedCommand | None = None
        self.starts = 0

    def start(self) -> None:
        """`areal-async run`, or `resume` once it has run."""
        verb = "resume" if self.starts else "run"
        self.starts += 1
        with self.output.open("ab") as output:
            arguments = [verb, self.job_file, "--plain"]
            self.process = start_command(arguments, output.fileno(), **{VARIABLE: self.failpoints})

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        events = read_events(self.run_dir) if (self.run_dir / "events").exists() else []
        return [event for event in events if not kind or event["event"] == kind]

    def steps_logged(self) -> int:
        """Records of steps so far, redone ones among them."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b'"kind":"step"') if path.exists() else 0

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in read_run_log(self.run_dir / "metrics.jsonl") if record["kind"] == "step"]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def serving(self) -> dict[str, int]:
        """Service → process id, of those that this supervisor last saw serve and not end."""
        if self.process is None:
            return {}
        path = self.run_dir / "events" / f"supervisor-{self.process.pid}.jsonl"
        pids: dict[str, int] = {}
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
            event = json.loads(line)
            if event["event"] == "ready":
                pids[event["service"]] = event["service_pid"]
            elif event["event"] in ("started", "ended"):
                pids.pop(event["service"], None)
        return pids

    def all_serve(self) -> bool:
        return {place.name for place in services_of(self.config)} <= self.serving().keys()

    def pid(self, role: str) -> int | None:
        """Process id of a role; None while it is not there."""
        if role == "supervisor":
            return self.process.pid if self.process is not None and self.running else None
        if role != "redis":
            return self.serving().get(role)
        buffer = self.serving().get("buffer")
        try:
            children = psutil.Process(buffer).children(recursive=True) if buffer is not None else []
            return next((child.pid for child in children if child.name().endswith("-server")), None)
        except psutil.Error:
            return None

    def signal(self, role: str, number: signal.Signals) -> bool:
        """Send a signal to a role; whether it was there."""
        pid = self.pid(role)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def told(self) -> str:
        return self.output.read_text(errors="replace")[-4000:] if self.output.exists() else ""

    def wait(self, limit_s: float) -> int | None:
        """Exit status, or None when the time is up."""
        assert self.process is not None
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Leave no process behind."""
        if self.running:
            assert self.process is not None
            for role in self.serving():
                self.signal(role, signal.SIGCONT)
            self.process.terminate()
            if self.wait(20) is None:
                self.process.kill()
                self.process.wait()


def pause(seconds: float) -> None:
    """Let real time pass: a chaos run has no other clock."""
    time.sleep(seconds)
