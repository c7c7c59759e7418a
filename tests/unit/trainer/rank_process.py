"""One rank of a trainer that replays recorded batches: a script for each rank of a test, or in process.

python rank_process.py RANK WORLD MODEL BATCHES OUT
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from areal_async.base.records import Task
from areal_async.config.job import JobConfig
from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Commit,
    ExportLedger,
    Fetch,
    Fetched,
    LedgerCopy,
    NextBatch,
    OpenTrainer,
    SeeTasks,
    TasksSeen,
    TrainerOpened,
    Waiting,
)
from areal_async.rpc.schema import Ok
from areal_async.service.rank_group import Meeting
from areal_async.service.record import RunLog
from trainer_service.backends.base import TrainingBackend
from trainer_service.checkpoint import Checkpoint
from trainer_service.data.recording import read_step
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.loop.rl import RlTrainer
from trainer_service.loop.step import StepResult
from trainer_service.ranks import Ranks, join_ranks
from trainer_service.saved_states import TrainingRun


class RecordedBuffer:
    """The trainer's side of a buffer whose batches are on disk. `calls` lists what was asked, in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[tuple] = []
        self._waits = 1

    def call(self, request, *, attachments=(), timeout_s=None):
        return self.exchange(request, attachments=attachments)[0]

    def exchange(self, request, *, attachments=()):
        match request:
            case OpenTrainer("policy", step=step):
                self.calls.append(("open", step, b"".join(attachments)))
                return TrainerOpened(epoch=1, step=step), []
            case NextBatch("policy", epoch=epoch, step=step):
                return self.next_batch(epoch, step), []
            case Fetch(episode_ids=episode_ids):
                self.calls.append(("fetch", len(episode_ids)))
                recorded = read_step(self.root, int(episode_ids[0].split("#")[1].split(".")[0]))
                routed = [name for name in episode_ids if request.routes and name in recorded.routes]
                held = [recorded.blobs[name] for name in episode_ids]
                told = [recorded.routes[name] for name in routed]
                return Fetched(episode_ids, routed), [memoryview(each) for each in (*held, *told)]
            case ExportLedger("policy", step=step):
                self.calls.append(("export", step))
                return LedgerCopy(step), [b"ledger of %d" % step]
            case SeeTasks(task_ids=task_ids):
                return TasksSeen([Task(name, "", ground_truth=f"truth of {name}") for name in task_ids]), []
            case Commit("policy", step=step):
                self.calls.append(("commit", step))
            case Checkpointed("policy", step=step):
                self.calls.append(("checkpointed", step))
        return Ok(), []

    def next_batch(self, epoch, step):
        if self._waits:
            self._waits -= 1
            return Waiting("rollout -> buffer", "0 of 4 groups are scored")
        self.calls.append(("next", step))
        return read_step(self.root, step).batch


def job_of(model: Path, out: Path, **trainer) -> JobConfig:
    settings = {"steps": 4, "minibatches": 2, "micro_batch_tokens": 24, "optimizer": {"lr": 1e-3}} | trainer
    return JobConfig.model_validate(
        {
            "job": "job",
            "model": str(model),
            "run_dir": str(out),
            "tasks": {"train": "unused.jsonl"},
            "buffer": {"max_staleness": 2},
            "checkpoint": {"every_steps": 2, "keep": 4},
            "trainer": settings,
        }
    )


def trainer_of(
    job: JobConfig, out: Path, buffer: RecordedBuffer, *, ranks: Ranks | None = None, **options: Any
) -> RlTrainer:
    """One rank of the job's trainer, whose files are in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    ranks = ranks or join_ranks(0, 1)
    backend = options.pop("backend", None) or load_backend(job, ranks)
    given = {"files": {}, "publisher": None, "stopping": threading.Event(), "shm_dir": None} | options
    run_log = RunLog(out / "metrics.jsonl") if ranks.first else None
    training = TrainingRun(job, ranks, backend, out, run_log, given.pop("stopping"), given.pop("shm_dir"))
    return RlTrainer(training, buffer, **given)


def learner_of(model: Path, out: Path, **trainer: Any) -> tuple[TrainingBackend, Learner]:
    """Back end and learner of a trainer of one rank, whose steps are one minibatch."""
    job, ranks = job_of(model, out, minibatches=1, **trainer), join_ranks(0, 1)
    backend = load_backend(job, ranks)
    return backend, Learner(job, ranks, backend)


def train_batch(learner: Learner, batch: Batch, blobs: Mapping[str, bytes], **options: Any) -> StepResult:
    """Train `learner` on a batch whose episodes came as `blobs`."""
    views = {name: memoryview(blob) for name, blob in blobs.items()}
    return learner.train(batch, learner.plan(batch, batch.step), views, **options)


def run(
    rank: int,
    world: int,
    model: Path,
    batches: Path,
    out: Path,
    *,
    restored: Checkpoint | None = None,
    **trainer,
) -> RecordedBuffer:
    torch.set_num_threads(1)
    ranks = join_ranks(rank, world, meeting=Meeting.from_environment())
    buffer = RecordedBuffer(batches)
    made = trainer_of(job_of(model, out, **{"ranks": world} | trainer), out, buffer, ranks=ranks)
    assert made.run(name="trainer", ready=lambda: None, restored=restored)
    return buffer


if __name__ == "__main__":
    number, size, *paths = sys.argv[1:]
    steps = int(os.environ.get("STEPS", "4"))
    settings = json.loads(os.environ.get("TRAINER", "{}"))  # more of the section `trainer`
    run(int(number), int(size), *map(Path, paths), steps=steps, record_batches=True, **settings)
    sys.stdout.flush()
    os._exit(0)
