"""Steps in which something is not finite, kept so that `areal-async buffer replay` can run them again.

Under `<run>/batches/` such a step is recorded as by `trainer.record_batches`, and `states/step-000007` is the
state that it began with: a checkpoint without a ledger. Where minibatches before the faulty one were trained,
the state has seen them, and the recording says how many: a replay passes them over, with proximal log-probs
of those weights. Ranks on several hosts share no disk, and keep the batch alone.
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
"""Steps that are kept: the newest, and without states the first; without `trainer.record_batches` batches go
with their states."""

log = get_logger("trainer")


def states_folder(run_dir: Path) -> Path:
    return run_dir / "batches" / "states"


class FaultySteps:
    """Keeps the faulty steps of a run. All ranks make one and make the same calls."""

    def __init__(self, job: JobConfig, ranks: Ranks, run_dir: Path) -> None:
        self._job, self._ranks, self._run_dir = job, ranks, run_dir
        self._newest = (-1, 0)
        self._count = 0

    def begun(self, step: int) -> int | None:
        """Return how many minibatches the state kept for `step` has seen; None if none is kept."""
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
        """Keep this rank's part of a step whose minibatch `number` is the first that is faulty, before the
        weights change; a second one of the same step is kept with it. No checkpoint may be in the making.
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
