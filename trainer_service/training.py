"""One rank's part in the training of a job: what all kinds of training are given."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from areal_async.config.job import JobConfig
from areal_async.service.record import RunRecords
from trainer_service.backends.base import TrainingBackend
from trainer_service.ranks import Ranks


@dataclass(frozen=True)
class Training:
    """The job, this rank and its back end, and the places that it writes to."""

    job: JobConfig
    ranks: Ranks
    backend: TrainingBackend
    run_dir: Path
    run_log: RunRecords | None
    """Exists on rank 0 only."""
    stopping: threading.Event
    shm_dir: Path | None = None
    """The run's folder in shared memory; None: no state is left there."""
