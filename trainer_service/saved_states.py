"""Saved states of a trainer: the decisions when to save a state, and whether on disk or in shared memory.

A state in shared memory survives only the death of the trainer's process. It is a checkpoint folder as on
disk, within the run's folder in shared memory (mode 0700, removed with the run). The folder gets its name
only when all ranks have written their files and its step is committed. Every file is verified by its hash
before use, and the previous state stays until the new one is named. The state has no copy of the ledger,
because the buffer survives the death of the trainer. The buffer frees no data because of such a state.

A thread writes both kinds while steps continue, from one copy of the state in host memory. Only one state of
either kind is therefore written at a time. `Cadence` decides how often this is cheap enough.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from areal_async.base.log import get_logger
from areal_async.config.checks import checkpoint_interval
from areal_async.config.job import JobConfig
from areal_async.service.record import RunRecords
from trainer_service.backends.base import TrainingBackend, models_of
from trainer_service.checkpoint import (
    MEASURING,
    Checkpoint,
    CheckpointReader,
    Checkpoints,
    Retention,
    TrainerState,
    measured_in,
    named_checkpoints,
    step_of,
)
from trainer_service.checkpoint_store import CheckpointStore
from trainer_service.errors import CheckpointError, DiskFull
from trainer_service.loop.device_turns import TrainerTurns
from trainer_service.ranks import Ranks

FOLDER = "trainer-state"
DISK_SHARE, MEMORY_SHARE = 0.01, 0.02
"""Largest share of a rank's time for checkpoints on disk with `checkpoint.every_steps: auto`, and for states
in memory. Both the time that the copy blocks the step and the CPU time of writing count."""
DISK_LEAST_S = 5.0
"""Least time between two checkpoints on disk. The limit exists because at each checkpoint the buffer also
copies its ledger and frees old data."""
FORGET = 0.25  # Weight of a lower cost in the next expected cost; a higher cost counts fully
STATE_BYTES_PER_WEIGHT_BYTE = 6
"""Upper bound for the size of a state in bytes per byte of the model's files, until the size is known:
weights are bf16 in the files, and a state has fp32 weights and two moments."""
SPARE_SHARE = 0.1  # Share of shared memory that must stay free besides two states

Place = Literal["disk", "memory"]
log = get_logger("trainer")


@dataclass
class Cadence:
    """Rate limit for costly work, so that it takes at most `share` of all time. Times are from one monotonic
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


def has_room(state_bytes: int, *, free_bytes: int, total_bytes: int, available_bytes: int) -> bool:
    """Return whether two states fit both into shared memory of `total_bytes` and into the machine's available
    memory."""
    return 2 * state_bytes <= min(free_bytes - SPARE_SHARE * total_bytes, available_bytes / 2)


def left_in_memory(shm_dir: Path, reader: CheckpointReader, above: Checkpoint | None) -> Checkpoint | None:
    """Return the state that a trainer of this run left in memory, if it is complete and newer than `above`.

    All ranks call it. A damaged state counts as none. Likewise, a state counts as none if a host lacks files
    that its ranks read."""
    try:
        left = reader.newest(shm_dir / FOLDER)
    except CheckpointError:  # the reader has logged it
        return None
    if left is None or (above is not None and left.manifest.step <= above.manifest.step):
        return None
    return left


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
    shm_dir: Path | None = None
    """The run's folder in shared memory; None if no state is saved there."""
    turns: TrainerTurns | None = None
    """Turns on a device that the engines share in time; None if the device is the trainer's alone."""


class States:
    """The saved states of one trainer. All ranks create it, and call `leave` and `wait` in the same order.

    `every` is the number of steps between two checkpoints on disk. With `auto` they are written as often as
    it is cheap, with at most `longest` steps between two. `memory` writes the states in shared memory; None
    for none. `weights_bytes` is the size of the model's files."""

    def __init__(
        self,
        disk: Checkpoints,
        memory: Checkpoints | None,
        *,
        every: int | Literal["auto"],
        longest: int,
        steps: int,
        weights_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.disk, self.memory = disk, memory
        self._ranks = disk.ranks
        self._every, self._longest, self._steps, self._clock = every, longest, steps, clock
        self._guess_bytes = STATE_BYTES_PER_WEIGHT_BYTE * weights_bytes
        self._cadences: dict[Place, Cadence] = {
            "disk": Cadence(DISK_SHARE, DISK_LEAST_S),
            "memory": Cadence(MEMORY_SHARE),
        }
        self._newest: Place | None = None
        self._on_disk = 0

    @classmethod
    def of(cls, training: TrainingRun, pending: Callable[[], Collection[int]] = tuple) -> States:
        """Create the saver for a job's run, on disk and if possible in shared memory. Evaluations in the run
        log determine the best checkpoints."""
        job, ranks, run_log, shm_dir = training.job, training.ranks, training.run_log, training.shm_dir
        of: Any = {"job": job.job, "policy": job.policy, "ranks": ranks}
        keep = Retention(
            job.checkpoint.keep,
            job.checkpoint.keep_best,
            lambda: measured_in(run_log.read(*MEASURING), job.policy) if run_log is not None else (),
            pending,
        )
        disk = Checkpoints(training.run_dir / "checkpoints", **of, keep=keep, store=CheckpointStore.of(job))
        memory = None
        if shm_dir is not None and job.checkpoint.in_memory:
            memory = Checkpoints(shm_dir / FOLDER, **of, keep=Retention(1), in_memory=True)
        return cls(
            disk,
            memory,
            every=job.checkpoint.every_steps,
            longest=checkpoint_interval(job),
            steps=job.trainer.steps,
            weights_bytes=sum(
                path.stat().st_size
                for use in models_of(job).values()
                if use.optimizer is not None or use.follows
                for path in use.folder.glob("*.safetensors")
            ),
        )

    def went_on_from(self, restored: Checkpoint) -> None:
        """Register the existing checkpoints, after the trainer has resumed from `restored`."""
        for checkpoints in filter(None, (self.disk, self.memory)):
            checkpoints.went_on_from(restored)
        if self._ranks.many_hosts:
            self._on_disk = self._ranks.largest(self.disk.newest if self._ranks.first else 0)
            return
        there = [step_of(folder) for folder in named_checkpoints(self.disk.root)]
        self._on_disk = max((step for step in there if step <= restored.manifest.step), default=0)

    def forget_memory(self) -> None:
        """Remove the states in memory, because they do not belong to the history of this trainer."""
        if self.memory is not None and self._ranks.first_here:
            shutil.rmtree(self.memory.root, ignore_errors=True)

    def due(self, step: int, *, asked: bool = False) -> Place | None:
        """Return where to save the state after `step` steps, or None if it is not saved.

        If `asked`, the place is the disk, unless `every` is a number."""
        if step == self._steps or (self._every != "auto" and step % self._every == 0):
            return "disk"
        if self._every == "auto" and (asked or step - self._on_disk >= self._longest):
            return "disk"
        writing = any(each.is_writing for each in (self.disk, self.memory) if each is not None)
        if not writing:
            self._learn()
        now_s = self._clock()
        disk = self._every == "auto" and self._cadences["disk"].is_due(now_s)
        memory = self.memory is not None and self._cadences["memory"].is_due(now_s) and self._fits()
        against = torch.tensor([writing, writing or not disk, writing or not memory], dtype=torch.int64)
        self._ranks.max(against)  # one objection is enough, so that all ranks do the same
        busy, no_disk, no_memory = against.tolist()
        return None if busy else "memory" if not no_memory and no_disk else None if no_disk else "disk"

    def leave(self, place: Place, state: TrainerState) -> None:
        """Copy a state and start to write it (see `Checkpoints.begin`).

        It first waits for the previous state in the other place, because both use one copy. If a state finds
        no room in memory, no more states are saved there. Every other error is raised."""
        self._cadences[place].begin(self._clock())
        self._settle_memory()
        into = self.disk
        if place == "disk":
            self._on_disk = state.step
        elif self.memory is None:
            return
        else:
            self.disk.wait()
            into = self.memory
        self._newest = place
        into.begin(state)

    def wait(self) -> None:
        """Wait until no rank is writing. Raises the error of a failed checkpoint."""
        self._settle_memory()
        self.disk.wait()

    def check(self) -> None:
        """Raise the error if this rank could not write a checkpoint."""
        self.disk.check()

    def _settle_memory(self) -> None:
        if self.memory is None:
            return
        try:
            self.memory.wait()
        except DiskFull as error:
            log.warning("no more states are left in memory", error=str(error))
            self.forget_memory()
            self.memory = None

    def _learn(self) -> None:
        """Report the cost of the newest state to its cadence, once."""
        place, self._newest = self._newest, None
        written = self.memory if place == "memory" else self.disk
        if place is not None and written is not None:
            self._cadences[place].cost(written.cost_s)

    def _fits(self) -> bool:
        if self.memory is None or not self._ranks.first_here:
            return True
        size = self.memory.size_bytes or self.disk.size_bytes or self._guess_bytes
        usage, available_bytes = shutil.disk_usage(self.memory.root.parent), psutil.virtual_memory().available
        own = self.memory.size_bytes  # the current state is removed when the next is written
        available_bytes += own
        return has_room(
            size, free_bytes=usage.free + own, total_bytes=usage.total, available_bytes=available_bytes
        )
