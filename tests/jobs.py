"""Job files on a random model that needs no training, and the command that runs them, for tests of whole
jobs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal_async.cli.quickstart.model import split_problems, write_model, write_tasks

REWARD = """
from reward_service.sdk import RewardInput, reward


@reward
def share_of_ones(given: RewardInput) -> float:
    return given.response.count("1") / max(1, len(given.response))
"""
"""Varies within every group, so that even a random model has something to learn."""

DUET = "duet.py:duet"
DUET_CODE = """
async def duet(ctx, task):
    said = await ctx.generate(task.prompt, max_new_tokens=8)
    if ctx.sample:  # the first sample of a group has nothing of the second policy
        checked = await ctx.generate("1+1=", policy="tester", max_new_tokens=6)
        await ctx.generate("2", parent=checked.segment, policy="tester", max_new_tokens=4)
        await ctx.generate("3", parent=checked.segment, max_new_tokens=4)
"""
"""Episodes in which two policies speak, also in one path."""


def command(*arguments: object) -> list[str]:
    """Return the command line by which tests call `areal-async` and start their jobs."""
    return [sys.executable, "-m", "areal_async.cli.main", *map(str, arguments)]


@dataclass(frozen=True)
class Workspace:
    """A folder with a model, tasks and a reward; `job` writes a job file into it."""

    folder: Path

    def job(self, name: str, *, evaluated: bool = False, **changes: Any) -> Path:
        """The path of the job file; `evaluated` gives it an evaluator: one more process with torch.
        No spare is prepared but where `changes` have a section of the supervisor's: nothing is to die."""
        content: dict[str, Any] = {
            "job": name,
            "seed": 3,
            "run_dir": "runs",
            "model": "model",
            "tasks": {"train": "train.jsonl"},
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
            "observe": {"metrics_port": 0},
        }
        if evaluated:
            content["tasks"] = {"train": "train.jsonl", "evaluation": "held_out.jsonl"}
            content["evaluation"] = {"every_steps": 5, "sampling": {"temperature": 0.0, "max_new_tokens": 8}}
        for key, value in changes.items():
            section, _, field = key.partition("__")
            if field:
                content[section] = {**content.get(section, {}), field: value}
            else:
                content[section] = value
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path


def make_workspace(folder: Path) -> Workspace:
    """Whatever a job needs, in `folder`; a model that is there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split_problems(seed=0, n_held_out=64)
    write_tasks(train[:500], folder / "train.jsonl", "train")
    write_tasks(held_out, folder / "held_out.jsonl", "held_out")
    if not (folder / "model").exists():
        write_model(folder / "model", seed=0)
        config = json.loads((folder / "model" / "config.json").read_text())
        (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 320}))
    (folder / "duet.py").write_text(DUET_CODE, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return Workspace(folder)
