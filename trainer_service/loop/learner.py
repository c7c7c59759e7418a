"""One rank's learning from one batch: its plan, its rows, the checks before a gradient, the updates.

Knows neither the buffer nor who gets the weights, so the same code runs in a job and in a replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from areal_async.config.job import JobConfig
from areal_async.registry import BACKENDS
from areal_async.rpc.messages import Batch, BatchEpisode
from areal_async.runtime.metrics import busy
from trainer_service.algorithms.objective import Objective
from trainer_service.backends.base import POLICY, TrainingBackend
from trainer_service.checks.logprobs import LogprobCheck
from trainer_service.data.plan import StepPlan, plan_step
from trainer_service.data.rows import check_staleness, rows_of_episode
from trainer_service.loop.step import StepResult, train_step
from trainer_service.ranks import Ranks


def load_backend(job: JobConfig, ranks: Ranks) -> TrainingBackend:
    """The back end of `job` with its model. Raises `ModelError`, `PartError`."""
    section = job.trainer
    minibatches = section.minibatches if job.kind == "rl" else 1
    backend: TrainingBackend = BACKENDS.find(section.backend)(
        {POLICY: job.model},
        section.optimizer,
        ranks,
        dtype=torch.bfloat16 if section.dtype == "bfloat16" else torch.float32,
        total_updates=section.steps * minibatches,
    )
    return backend


class Learner:
    """All ranks make the same calls. Without a `check` the engine's log-probs are taken as they are."""

    def __init__(
        self, job: JobConfig, ranks: Ranks, backend: TrainingBackend, *, check: LogprobCheck | None = None
    ) -> None:
        """Raises `ObjectiveError`, `PartError` for an objective that cannot be trained."""
        self._job = job
        self._ranks = ranks
        self._backend = backend
        self._objective = Objective(job.trainer.objective, job)
        self._check = check

    def plan(self, batch: Batch, step: int) -> StepPlan:
        """What every rank does in `step`, from its manifest alone. Raises what `plan_step` does."""
        with busy("train"):
            return plan_step(
                batch,
                self._objective,
                step=step,
                max_staleness=self._job.buffer.max_staleness,
                minibatches=self._job.trainer.minibatches,
                ranks=self._ranks.data_ranks,
            )

    def episodes_of(self, plan: StepPlan) -> list[BatchEpisode]:
        """The episodes whose bytes this rank needs."""
        return [plan.episodes[index] for index in plan.indices_of(self._ranks.data_rank)]

    def train(
        self,
        batch: Batch,
        plan: StepPlan,
        blobs: Mapping[str, memoryview],
        *,
        epoch: int = 0,
        same_as: Sequence[int] = (),
    ) -> StepResult:
        """Train the step of `plan` on the bytes of this rank's episodes, by id.

        `epoch` is the trainer's, `same_as` earlier ones that published the version it starts from alike.
        Raises `BatchError`, `StalenessViolation`, `SelfCheckError` before any gradient, `DivergenceError`."""
        with busy("train"):
            step, eta = batch.step, self._job.buffer.max_staleness
            minibatches = [
                [
                    row
                    for index in share[self._ranks.data_rank]
                    for row in rows_of_episode(
                        blobs[plan.episodes[index].episode_id],
                        plan.episodes[index],
                        index,
                        batch.lowest_version,
                        policy=batch.policy,
                    )
                ]
                for share in plan.shares
            ]
            check_staleness([row for rows in minibatches for row in rows], step=step, max_staleness=eta)
            if self._check is not None:
                self._check.check(step, plan, blobs, epoch=epoch, same_as=same_as)
            return train_step(
                self._backend,
                self._objective,
                self._ranks,
                minibatches,
                step=step,
                max_staleness=eta,
                names=[episode.episode_id for episode in plan.episodes],
                groups=plan.groups,
                advantages=plan.advantages,
                micro_batch_tokens=self._job.trainer.micro_batch_tokens,
            )
