"""Real jobs, started from the command line as a user would, on a random model that needs no training."""

from __future__ import annotations

import fcntl
import json
import os
import re
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_async.service.record import read_run_log
from tests.events import read_events
from tests.forks import start_command
from tests.harness.slot import in_job_slot
from tests.jobs import Workspace, command, make_workspace
from tests.processes import processes_of, words_of
from tests.waiting import LIMIT_S

ATTEMPTS = 2
"""Starts of a kind of job in one session: a test that failed is run once more."""


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    workspace: Workspace
    observed: Any = None
    """JSON value that the kind's function returned about the job while it ran."""

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_run_log(self.folder / "metrics.jsonl") if record["kind"] == kind]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["event"] == kind]

    def logs(self) -> str:
        """What its processes complained of, for the message of a test."""
        logs = sorted((self.folder / "logs").glob("*.log"))
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return "\n".join(line for line in lines if '"level":"info"' not in line)[-20_000:]

    def weights(self, version: int) -> Path:
        """The folder whose `model.safetensors` or checkpoint holds the weights of `version`."""
        if version == 0:
            return self.workspace.folder / "model"
        return self.folder / "checkpoints" / f"step-{version:06d}"


class RunningJob:
    """A job started from the command line, and its processes."""

    def __init__(self, workspace: Workspace, verb: str, job_file: Path, **environment: str) -> None:
        self.workspace = workspace
        self.folder = workspace.folder / "runs" / job_file.stem
        self.process = start_command([verb, job_file, "--plain"], **environment)
        self.told = ""

    def read_until(self, pattern: str, limit_s: float = LIMIT_S) -> str:
        """What the process printed up to a line that matches, or up to its end."""
        assert self.process.stdout is not None
        told, deadline_s = b"", time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not re.search(pattern, told.decode(errors="replace")):
                left_s = deadline_s - time.monotonic()
                assert selector.select(left_s), f"no {pattern!r} in time: {self.told}{told.decode()}"
                if not (chunk := os.read(self.process.stdout.fileno(), 65536)):
                    break
                told += chunk
        self.told += told.decode(errors="replace")
        return told.decode(errors="replace")

    def read_all(self, limit_s: float = LIMIT_S) -> str:
        return self.read_until(r"(?!)", limit_s)

    def end(self, limit_s: float = LIMIT_S, *, status: int = 0) -> FinishedRun:
        """Wait until the job ends with this status; it must leave nothing behind."""
        self.wait_for(self._has_record, "its record")
        run = self.record
        self.read_all(limit_s)
        assert self.process.wait(LIMIT_S) == status, self.told
        assert processes_of(run["run_id"]) == []
        assert not Path(run["socket_dir"]).exists()
        assert not Path(run["shm_dir"]).exists()
        return FinishedRun(self.folder, self.workspace)

    def _has_record(self) -> bool:
        lock = self.folder / "run.lock"
        return lock.exists() and f'"pid":{self.process.pid},' in lock.read_text()

    @property
    def record(self) -> dict[str, Any]:
        """Id and volatile folders of the running job."""
        return json.loads((self.folder / "run.lock").read_text())

    def logged(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_run_log(self.folder / "metrics.jsonl") if record["kind"] == kind]

    def steps(self) -> list[dict[str, Any]]:
        return self.logged("step")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["event"] == kind]

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not come in time: {self.told}"
            assert self.process.poll() is None, f"the job ended before {what}: {self.read_all(5)}"
            time.sleep(0.05)

    def wait_for_steps(self, more: int, limit_s: float = LIMIT_S) -> None:
        """Until so many more steps are trained, steps done again among them."""
        target = len(self.steps()) + more
        self.wait_for(lambda: len(self.steps()) >= target, f"{more} more steps", limit_s)

    def service(self, name: str) -> psutil.Process:
        """A process by its name in the run, awaited while it starts again; `redis` is below the buffer."""
        found: list[psutil.Process] = []

        def runs() -> bool:
            if name == "redis":
                with suppress(psutil.NoSuchProcess):
                    children = self.service("buffer").children(recursive=True)
                    found.extend(child for child in children if child.name().endswith("-server"))
            else:
                found.extend(one for one in processes_of(self.record["run_id"]) if name in words_of(one))
            return bool(found)

        self.wait_for(runs, name)
        return found[0]


@in_job_slot
@contextmanager
def started(workspace: Workspace, verb: str, job_file: Path, **environment: str) -> Iterator[RunningJob]:
    """A running job; what is left of it is killed. Where the test fails, what it said is shown."""
    job = RunningJob(workspace, verb, job_file, **environment)
    try:
        yield job
    except BaseException:
        job.process.kill()
        print(f"{job_file.stem} ended with {job.process.wait()}:\n{job.told}{job.read_all()}")
        print(FinishedRun(job.folder, workspace).logs())
        raise
    finally:
        if job.process.poll() is None:
            job.process.kill()
        job.process.wait()


@pytest.fixture
def running(workspace: Workspace) -> Callable[..., Any]:
    """`with running("run", job_file) as job:`"""
    return partial(started, workspace)


def told_by(*arguments: object, **environment: str) -> str:
    """Return what a command prints, in lines of 200 characters; it must succeed."""
    env = os.environ | {"COLUMNS": "200"} | environment
    words = command(*arguments)
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def finish(workspace: Workspace, job_file: Path) -> FinishedRun:
    with started(workspace, "run", job_file) as job:
        return job.end()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace of one test file; another file may use the same job names."""
    return make_workspace(tmp_path_factory.mktemp("e2e"))


def stamps(folder: Path) -> dict[str, list[int]]:
    """Size and time of the last change of each file in `folder`."""
    files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): [stat.st_size, stat.st_mtime_ns] for path, stat in files}


def run_once(name: str, folder: Path) -> FinishedRun:
    """Run the kind `name` of `tests/e2e/kinds.py` in `folder`, or return its run if any test process has."""
    from tests.e2e.kinds import KINDS  # it imports this module

    folder.mkdir(parents=True, exist_ok=True)
    record, attempts = folder / "finished.json", folder / "attempts"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            number = len(attempts.read_text()) if attempts.exists() else 0
            assert number < ATTEMPTS, f"the shared run {name} failed: an earlier test says why"
            attempts.write_text("x" * (number + 1))
            shutil.rmtree(folder / "runs", ignore_errors=True)
            observed = KINDS[name](make_workspace(folder))
            files = stamps(folder / "runs" / name)
            record.write_text(json.dumps({"observed": observed, "files": files}))
    observed = json.loads(record.read_text())["observed"]
    return FinishedRun(folder / "runs" / name, Workspace(folder), observed)


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], FinishedRun]]:
    """`finished(name)`: the finished run of a kind of job, which all test processes of a session share.
    The run is read-only: a test that changes a file of it fails. It may change a copy."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "e2e-shared"
    handed: set[str] = set()

    def run(name: str) -> FinishedRun:
        handed.add(name)
        return run_once(name, root / name)

    yield run
    for name in handed:
        if (record := root / name / "finished.json").exists():
            before, after = json.loads(record.read_text())["files"], stamps(root / name / "runs" / name)
            changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
            assert changed == set(), f"a test wrote into the shared run {name}"
