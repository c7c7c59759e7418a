"""Checkpoints of a training, and the steps after which one is written.

A thread writes a checkpoint while steps continue, from a copy of the state in host memory. Only one is
written at a time. `Cadence` decides how often this is cheap enough.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from areal_async.config.checks import checkpoint_interval
from areal_async.config.job import JobConfig
from areal_async.service.record import RunRecords
from trainer_service.backends.base import TrainingBackend
from trainer_service.checkpoint import (
    MEASURING,
    Checkpoint,
    Checkpoints,
    Retention,
    TrainerState,
    measured_in,
)
from trainer_service.checkpoint_store import CheckpointStore
from trainer_service.ranks import Ranks

SHARE = 0.01
"""Largest share of a rank's time for checkpoints with `checkpoint.every_steps: auto`. It counts the time that
the copy blocks the step, and the CPU time of writing."""
LEAST_S = 5.0
"""Least time between two checkpoints. For each one, the buffer also copies its ledger and frees old data."""
FORGET = 0.25  # Weight of a lower cost in the next expected cost; a higher cost counts fully


@dataclass
class Cadence:
    """Rate limit for costly work: it takes at most `share` of all time. Times are from one monotonic
    clock."""

    share: float
    least_s: float = 0.0
    """Least time between two runs of the work."""
    expected_s: float = 0.0
    """Expected cost of the next run."""
    begun_s: float = -math.inf

    def is_due(self, now_s: float) -> bool:
        return now_s - self.begun_s >= max(self.least_s, self.expected_s / self.share)

    def begin(self, now_s: float) -> None:
        self.begun_s = now_s

    def cost(self, seconds: float) -> None:
        """Report the cost of a run. A higher cost lengthens the interval at once. Lower costs shorten it
        gradually, because the cost of a write varies with the machine's load."""
        self.expected_s = max(seconds, self.expected_s + FORGET * (seconds - self.expected_s))


@dataclass(frozen=True)
class TrainingRun:
    """One rank's part in a training: the job, the ranks, the back end, and the places for output."""

    job: JobConfig
    ranks: Ranks
    backend: TrainingBackend
    run_dir: Path
    run_log: RunRecords | None
    """The run log; only on rank 0."""
    stopping: threading.Event


class States:
    """Saver for the states of one trainer. All ranks create it and call `leave` and `wait` in the same order.

    `every` is the number of steps between two checkpoints. With `auto` they are written as often as it is
    cheap, with at most `longest` steps between two."""

    def __init__(
        self,
        disk: Checkpoints,
        *,
        every: int | Literal["auto"],
        longest: int,
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.disk, self._ranks = disk, disk.ranks
        self._every, self._longest, self._steps, self._clock = every, longest, steps, clock
        self._cadence = Cadence(SHARE, LEAST_S)
        self._learned = True  # Whether the cadence knows the cost of the newest checkpoint
        self._on_disk = 0

    @classmethod
    def of(cls, training: TrainingRun, pending: Callable[[], Collection[int]] = tuple) -> States:
        """Create the saver for a job's run. Evaluations in the run log determine the best checkpoints."""
        job, ranks, run_log = training.job, training.ranks, training.run_log
        keep = Retention(
            job.checkpoint.keep,
            job.checkpoint.keep_best,
            lambda: measured_in(run_log.read(*MEASURING), job.policy) if run_log is not None else (),
            pending,
        )
        disk = Checkpoints(
            training.run_dir / "checkpoints",
            job=job.job,
            policy=job.policy,
            ranks=ranks,
            keep=keep,
            store=CheckpointStore.of(job),
        )
        every, longest = job.checkpoint.every_steps, checkpoint_interval(job)
        return cls(disk, every=every, longest=longest, steps=job.trainer.steps)

    def went_on_from(self, restored: Checkpoint) -> None:
        """Register the existing checkpoints, after the trainer has resumed from `restored`."""
        self.disk.went_on_from(restored)
        self._on_disk = restored.manifest.step

    def due(self, step: int, *, asked: bool = False) -> bool:
        """Return whether to save the state after `step` steps. If `asked`, it is saved unless `every` is a
        number."""
        if step == self._steps:
            return True
        if self._every != "auto":
            return step % self._every == 0
        if asked or step - self._on_disk >= self._longest:
            return True
        writing = self.disk.is_writing
        if not writing and not self._learned:
            self._cadence.cost(self.disk.cost_s)
            self._learned = True
        against = torch.tensor([writing or not self._cadence.is_due(self._clock())], dtype=torch.int64)
        self._ranks.max(against)  # one objection is enough, so that all ranks do the same
        return not against

    def leave(self, state: TrainerState) -> None:
        """Copy a state and start to write it (see `Checkpoints.begin`)."""
        self._cadence.begin(self._clock())
        self._on_disk, self._learned = state.step, False
        self.disk.begin(state)

    def wait(self) -> None:
        """Wait until no rank is writing. Raises the error of a failed checkpoint."""
        self.disk.wait()

    def check(self) -> None:
        """Raise the error if this rank could not write a checkpoint."""
        self.disk.check()
