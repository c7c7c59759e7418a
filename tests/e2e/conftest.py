"""Real jobs, started from the command line as a user would, on a random model that needs no training."""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from areal_async.quickstart.model import split_problems, write_model, write_parquet
from areal_async.runtime.events import read_events
from areal_async.status.record import read_run_log

REWARD = """
from reward_service.sdk import RewardInput, reward


@reward
def share_of_ones(given: RewardInput) -> float:
    return given.response.count("1") / max(1, len(given.response))
"""
"""Varies within every group, so that even a random model has something to learn."""

WORKFLOW = """
async def eight_turns(ctx, task):
    reply = await ctx.generate(task.prompt)
    for turn in range(1, 8):
        reply = await ctx.generate(parent=reply.segment, turn=turn)
"""
"""Episodes so long that generation is what the job waits for: weights arrive while they are made."""


@dataclass(frozen=True)
class Workspace:
    """A folder with a model, tasks and a reward; `job` writes a job file into it."""

    folder: Path

    def job(self, name: str, **changes: Any) -> Path:
        content = {
            "job": name,
            "seed": 3,
            "run_dir": "runs",
            "model": "model",
            "tasks": {"train": "train.parquet", "evaluation": "held_out.parquet"},
            "rollout": {
                "group_size": 4,
                "max_concurrent": 32,
                "max_model_len": 48,
                "sampling": {"temperature": 0.9, "max_new_tokens": 32},
            },
            "buffer": {"max_staleness": 4, "batch_groups": 8},
            "reward": {"name": "reward.py:share_of_ones"},
            "trainer": {
                "steps": 10,
                "record_batches": True,
                "optimizer": {"lr": 1e-3, "clip_grad_norm": 1.0},
                "objective": {"prox": "reuse"},
            },
            "checkpoint": {"every_steps": 1, "keep": 100},
            "evaluation": {"every_steps": 5, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
            "observe": {"metrics_port": 0},
        }
        for key, value in changes.items():
            section, _, field = key.partition("__")
            if field:
                content[section] = {**content[section], field: value}
            else:
                content[section] = value
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    workspace: Workspace

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_run_log(self.folder / "metrics.jsonl") if record["kind"] == kind]

    def weights(self, version: int) -> Path:
        """The folder whose `model.safetensors` or checkpoint holds the weights of `version`."""
        if version == 0:
            return self.workspace.folder / "model"
        return self.folder / "checkpoints" / f"step-{version:06d}"


class RunningJob:
    """A job started from the command line, and its processes."""

    def __init__(self, folder: Path, *arguments: str | Path, **environment: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            command(*arguments, "--plain"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment,
        )
        self.told = ""

    def read_until(self, pattern: str, limit_s: float) -> str:
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

    def read_all(self, limit_s: float) -> str:
        return self.read_until(r"(?!)", limit_s)

    @property
    def record(self) -> dict[str, Any]:
        """Id and volatile folders of the running job."""
        return json.loads((self.folder / "run.lock").read_text())

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in read_run_log(self.folder / "metrics.jsonl") if record["kind"] == "step"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["event"] == kind]

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = 200.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not come in time: {self.told}"
            assert self.process.poll() is None, f"the job ended before {what}: {self.read_all(5)}"
            time.sleep(0.05)

    def wait_for_steps(self, more: int, limit_s: float = 200.0) -> None:
        """Until so many more steps are trained, steps done again among them."""
        target = len(self.steps()) + more
        self.wait_for(lambda: len(self.steps()) >= target, f"{more} more steps", limit_s)

    def service(self, name: str) -> psutil.Process:
        """A process by its name in the run; `redis` is the one below the buffer."""
        if name == "redis":
            children = self.service("buffer").children(recursive=True)
            return next(child for child in children if "redis-server" in child.name())
        run_id = self.record["run_id"]
        for process in psutil.process_iter():
            try:
                if process.environ().get("AREAL_ASYNC_RUN") == run_id and name in process.cmdline():
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"{name} does not run")


def assert_nothing_is_left(run: dict[str, Any]) -> None:
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


@pytest.fixture
def nothing_is_left() -> Callable[[dict[str, Any]], None]:
    return assert_nothing_is_left


@pytest.fixture
def running(workspace: Workspace) -> Callable[..., Any]:
    """`with running("run", job_file) as job:`; what is left of it is killed."""

    @contextmanager
    def start(verb: str, job_file: Path, **environment: str) -> Iterator[RunningJob]:
        job = RunningJob(workspace.folder / "runs" / job_file.stem, verb, job_file, **environment)
        try:
            yield job
        finally:
            if job.process.poll() is None:
                job.process.kill()
            job.process.wait()

    return start


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "areal_async.cli.main", *map(str, arguments)]


def finish(workspace: Workspace, job_file: Path) -> FinishedRun:
    result = subprocess.run(
        command("run", job_file, "--plain"), capture_output=True, text=True, timeout=220, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return FinishedRun(workspace.folder / "runs" / job_file.stem, workspace)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("e2e")
    train, held_out = split_problems(seed=0, n_held_out=64)
    write_parquet(train[:500], folder / "train.parquet", "train")
    write_parquet(held_out, folder / "held_out.parquet", "held_out")
    write_model(folder / "model", seed=0)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 320}))
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "workflow.py").write_text(WORKFLOW, encoding="utf-8")
    return Workspace(folder)


@pytest.fixture(scope="session")
def asynchronous_run(workspace: Workspace) -> FinishedRun:
    return finish(workspace, workspace.job("asynchronous"))


@pytest.fixture(scope="session")
def long_episodes_run(workspace: Workspace) -> FinishedRun:
    rollout = {
        "group_size": 4,
        "max_concurrent": 32,
        "max_model_len": 320,
        "workflow": "workflow.py:eight_turns",
        "sampling": {"temperature": 0.9, "max_new_tokens": 32},
    }
    job_file = workspace.job(
        "long-episodes",
        rollout=rollout,
        evaluation={"every_steps": 5, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
    )
    return finish(workspace, job_file)


@pytest.fixture(scope="session")
def synchronous_run(workspace: Workspace) -> FinishedRun:
    return finish(workspace, workspace.job("synchronous", buffer__max_staleness=0))
