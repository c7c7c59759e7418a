"""Run folders for the page, made by hand: a job, records, samples."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>window.hurt=1</script><img src=x onerror=window.hurt=1>"


def run_folder(parent: Path, name: str = "sums", **job: Any) -> Path:
    folder = parent / name
    folder.mkdir(parents=True, mode=0o700)
    (folder / "run.lock").touch(0o600)
    given = {"job": name, "model": "/models/tiny", "reward": {"name": "exact_match"}}
    given |= {"tasks": {"train": "/tasks/train.jsonl"}, **job}
    (folder / "job.yaml").write_text(json.dumps(given))
    return folder


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "step", "time_s": 1000.0 + number, "policy": "policy", "step": number, "version": number + 1,
        "loss": 0.1 / (number + 1), "grad_norm": 2.0, "reward_mean": min(1.0, 0.1 * number), "tokens": 100,
        "staleness_mean": 0.5, "staleness_max": 1, "step_s": 2.0,
        "busy_s": 1.5, "wait_s": 0.5, "publish_s": 0.1,
        **fields,
    }  # fmt: skip


def load(at_s: float, steps: int, **services: Any) -> dict[str, Any]:
    return {"kind": "load", "time_s": at_s, "steps": steps, "services": services}


def append(folder: Path, records: Iterable[dict[str, Any]]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def episode(answer: Sequence[str] = ("4", "2"), **fields: Any) -> dict[str, Any]:
    n = len(answer)
    draw = random.Random(n)
    sampled = {
        "author": "assistant", "agent": "", "text": "".join(answer), "tokens": [*answer], "mask": [1] * n,
        "version": [7 + (3 * i // max(1, n)) for i in range(n)],
        "logp": [-draw.random() * 3 for _ in range(n)], "advantage": [draw.random() - 0.5 for _ in range(n)],
    }  # fmt: skip
    return {
        "policy": "policy", "step": 9, "version": 9, "group": "g1", "episode": "e1", "task": "t1",
        "reward": 1.0, "rewards": {"exact": 1.0, "format": 0.5}, "verdict": "score", "finish": "stop",
        "ground_truth": "42",
        "segments": [{"author": "prompt", "text": "How much is 40 + 2?"}, sampled], **fields,
    }  # fmt: skip


def write_samples(folder: Path, name: str, episodes: Iterable[dict[str, Any]]) -> Path:
    path = folder / "samples" / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text("".join(json.dumps(each) + "\n" for each in episodes))
    path.chmod(0o600)
    return path
