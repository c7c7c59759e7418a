"""Real jobs, started from the command line as a user would, on a random model that needs no training."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_async.observe.record import read_run_log
from areal_async.quickstart.model import write_model
from areal_async.quickstart.tasks import split_problems, write_parquet

REWARD = """
from reward_service.sdk import RewardInput, reward


@reward
def share_of_ones(given: RewardInput) -> float:
    return given.response.count("1") / max(1, len(given.response))
"""
"""Varies within every group, so that even a random model has something to learn."""


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
    train, held_out = split_problems(seed=0, n_held_out=64, signs="+")
    write_parquet(train[:500], folder / "train.parquet", "train")
    write_parquet(held_out, folder / "held_out.parquet", "held_out")
    write_model(folder / "model", seed=0)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return Workspace(folder)


@pytest.fixture(scope="session")
def asynchronous_run(workspace: Workspace) -> FinishedRun:
    return finish(workspace, workspace.job("asynchronous"))


@pytest.fixture(scope="session")
def synchronous_run(workspace: Workspace) -> FinishedRun:
    return finish(workspace, workspace.job("synchronous", buffer__max_staleness=0))
