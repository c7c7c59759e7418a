"""Recordings of steps with a number that is not finite, so that `areal-async buffer replay` can repeat them.

Such a step is recorded under `<run>/batches/`, like a step with `trainer.record_batches`. The folder
`states/step-000007` has the state at the start of the step: a checkpoint without a ledger. If earlier
minibatches of the step were trained, that state already includes them, and the recording has their number. A
replay skips these minibatches and takes proximal log-probs from the weights of that state. Ranks on several
hosts share no disk, so they record only the batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_async.base.log import get_logger
from areal_async.config.job import JobConfig
from areal_async.rpc.messages import Batch
from trainer_service.checkpoint import Checkpoints, Retention, TrainerState, named_checkpoints
from trainer_service.data.recording import write_step
from trainer_service.ranks import Ranks

KEPT = 3
"""Number of faulty steps to keep. With states, the newest are kept, otherwise the first. Without
`trainer.record_batches`, a batch is deleted with its state."""

log = get_logger("trainer")


def states_folder(run_dir: Path) -> Path:
    return run_dir / "batches" / "states"


class FaultySteps:
    """Recorder for the faulty steps of a run. All ranks create it and make the same calls."""

    def __init__(self, job: JobConfig, ranks: Ranks, run_dir: Path) -> None:
        self._job, self._ranks, self._run_dir = job, ranks, run_dir
        self._newest = (-1, 0)
        self._count = 0

    def begun(self, step: int) -> int | None:
        """Return the number of minibatches that the kept state of `step` includes; None if no state is
        kept."""
        newest, begun = self._newest
        return begun if newest == step else None

    def keep(
        self,
        batch: Batch,
        blobs: Mapping[str, Any],
        routes: Mapping[str, Any],
        number: int,
        state: TrainerState,
    ) -> None:
        """Record this rank's part of a step before the weights change; `number` is its first faulty
        minibatch.

        A later faulty minibatch of the same step is in the same recording. No checkpoint may be in progress.
        Raises `DiskFull`."""
        alone = self._ranks.many_hosts
        if self.begun(batch.step) is not None or (alone and self._count >= KEPT):
            return
        self._count += 1
        root = self._run_dir / "batches"
        rank = self._ranks.rank
        write_step(root, batch, blobs, routes=routes, rank=rank, begun=number)
        self._newest = (batch.step, number)
        if alone:
            return
        states = states_folder(self._run_dir)
        job, policy, keep = self._job.job, self._job.policy, Retention(KEPT)
        kept = Checkpoints(states, job=job, policy=policy, ranks=self._ranks, keep=keep)
        kept.begin(state)
        kept.wait()
        if self._ranks.first:
            for folder in named_checkpoints(states)[:-KEPT]:
                shutil.rmtree(folder, ignore_errors=True)
                if not self._job.trainer.record_batches:
                    shutil.rmtree(root / folder.name, ignore_errors=True)
            log.info("a faulty step is kept for a replay", step=batch.step, folder=str(root))
