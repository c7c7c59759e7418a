"""Trainings from files in tests: jobs, data, and one rank of the trainer as a process.

python files_process.py RANK WORLD JOB OUT [JOB OUT …]
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from areal_async.config.job import JobConfig
from areal_async.service.rank_group import Meeting
from areal_async.service.record import RunLog
from trainer_service.loop.from_files import FileTrainer
from trainer_service.loop.learner import load_backend
from trainer_service.ranks import Ranks, join_ranks
from trainer_service.saved_states import TrainingRun


def rows_of(form: str, n: int, seed: int) -> list[dict[str, Any]]:
    """Sums, the right one preferred to a wrong one."""
    draw = random.Random(f"{form}:{seed}")
    rows = []
    for _ in range(n):
        a, b = draw.randint(0, 4), draw.randint(0, 4)
        wrong = draw.choice([x for x in range(10) if x != a + b])
        good = draw.random() < 0.5
        rows.append(
            {
                "pairs": {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{wrong}"},
                "labelled": {
                    "prompt": f"{a}+{b}=",
                    "completion": f"{a + b if good else wrong}",
                    "label": good,
                },
                "scored": {
                    "prompt": f"{a}+{b}=",
                    "completion": f"{a + b if good else wrong}",
                    "score": good + 0.5,
                },
            }[form]
        )
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def job_of(
    folder: Path, model: Path, kind: str, form: str = "pairs", *, lr: float = 3e-3, **changes: Any
) -> JobConfig:
    """A job on files that lie in `folder`; `changes` are of the section of its kind, and of `trainer`."""
    trainer = {"steps": 40, "optimizer": {"lr": lr}, "torch_threads": 1} | changes.pop("trainer", {})
    return JobConfig.model_validate(
        {
            "job": "files",
            "kind": kind,
            "model": str(model),
            "tasks": {
                "train": write_rows(folder / "train.jsonl", rows_of(form, 64, 0)),
                "evaluation": write_rows(folder / "held.jsonl", rows_of(form, 40, 1)),
            },
            "trainer": trainer,
            kind: {"batch_size": 16, "evaluate_every": 10} | changes,
            "checkpoint": {"every_steps": 4, "keep": 99, "in_memory": False},
        }
    )


def trainer_of(job: JobConfig, out: Path, ranks: Ranks | None = None) -> FileTrainer:
    out.mkdir(parents=True, exist_ok=True)
    ranks = ranks or join_ranks(0, 1)
    job = job.model_copy(update={"trainer": job.trainer.model_copy(update={"ranks": ranks.world})})
    run_log = RunLog(out / "metrics.jsonl") if ranks.first else None
    backend = load_backend(job, ranks)
    return FileTrainer(TrainingRun(job, ranks, backend, out, run_log, threading.Event()))


if __name__ == "__main__":
    number, size, *paths = sys.argv[1:]
    torch.set_num_threads(1)
    joined = join_ranks(int(number), int(size), meeting=Meeting.from_environment())
    for given, out in zip(map(Path, paths[::2]), map(Path, paths[1::2]), strict=True):
        assert trainer_of(JobConfig.model_validate_json(given.read_text()), out, joined).run()
    sys.stdout.flush()
    os._exit(0)
