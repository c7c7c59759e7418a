"""One rank's learning from one batch: its plan, its rows, the checks before a gradient, the updates.

Knows neither the buffer nor who gets the weights, so the same code runs in a job and in a replay. Losses are
sums over all ranks and all micro-batches with coefficients taken over the whole optimizer step, so neither
packing nor the number of ranks changes what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_async.config.job import JobConfig
from areal_async.config.parts import load_part
from areal_async.rpc.messages import Batch, BatchEpisode
from areal_async.runtime.metrics import busy
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.off_policy import StepStatistics
from trainer_service.backends.base import TRAINED_MODEL, Columns, TrainingBackend
from trainer_service.checks.logprobs import LogprobCheck
from trainer_service.data.episode_rows import EpisodeBytes, check_staleness, rows_of_episodes
from trainer_service.data.flops import RowCost, load_row_cost
from trainer_service.data.microbatch import MicroBatch, build_micro_batch, plan_passes
from trainer_service.data.rows import TrainingRow
from trainer_service.data.step_plan import StepPlan, plan_step
from trainer_service.errors import DivergenceError
from trainer_service.ranks import Ranks

MOST_NAMED = 5  # Largest number of episodes that an error names


def load_backend(job: JobConfig, ranks: Ranks) -> TrainingBackend:
    """The back end of `job` with its model. Raises `ModelError`, `PartError`."""
    section = job.trainer
    minibatches = section.minibatches if job.kind == "rl" else 1
    part = load_part(job, "trainer.backend")
    # Only a part that says so takes adapters: see `areal_async/config/parts.py`.
    adapters = {"lora": section.lora, "seed": job.seed} if section.lora.rank else {}
    backend: TrainingBackend = part(
        {TRAINED_MODEL: job.model},
        section.optimizer,
        ranks,
        dtype=torch.bfloat16 if section.dtype == "bfloat16" else torch.float32,
        total_updates=section.steps * minibatches,
        **adapters,
        **section.backend_args,
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
        self._cost = load_row_cost(job.model)

    def plan(self, batch: Batch, step: int) -> StepPlan:
        """What every rank does in `step`, from its manifest alone. Raises what `plan_step` does."""
        with busy("train"):
            return plan_step(
                batch,
                self._objective,
                step=step,
                max_staleness=self._job.buffer.max_staleness,
                minibatches=self._job.trainer.minibatches,
                ranks=self._backend.place.data_ranks,
                cost=self._cost,
            )

    def episodes_of(self, plan: StepPlan) -> list[BatchEpisode]:
        """The episodes whose bytes this rank needs."""
        place = self._backend.place
        return [plan.episodes[index] for index in plan.share_of(place.data_rank)] if place.reads else []

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
            place = self._backend.place
            minibatches = [
                rows_of_episodes(
                    [
                        EpisodeBytes(
                            blobs[plan.episodes[index].episode_id], plan.episodes[index], index, places
                        )
                        for index, places in (share[place.data_rank] if place.reads else {}).items()
                    ],
                    batch.lowest_version,
                    policy=batch.policy,
                )
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
                cost=self._cost,
            )


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank."""

    losses: list[float]
    """The objective's value of each minibatch, before its update."""
    grad_norms: list[float]
    """Gradient norm of each minibatch before clipping."""
    statistics: dict[str, object]
    """See `algorithms.off_policy`; empty for a supervised loss."""
    packed_tokens: int
    """Tokens of one pass over the step's rows."""
    shared_tokens: int
    """Tokens that such a pass would have more if rows of a group did not share what they begin with."""
    micro_batches: int
    """Forward passes with gradient on this rank."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    @property
    def grad_norm(self) -> float:
        return max(self.grad_norms)


def train_step(
    backend: TrainingBackend,
    objective: Objective,
    ranks: Ranks,
    minibatches: Sequence[Sequence[TrainingRow]],
    *,
    step: int,
    max_staleness: int,
    names: Sequence[str],
    groups: NDArray[np.int64],
    advantages: NDArray[np.float32],
    micro_batch_tokens: int,
    cost: RowCost,
) -> StepResult:
    """Train on this rank's rows of each minibatch; all ranks call it with the same number of minibatches.

    `names` [E] (what an error calls them), `groups` i64 [E] and `advantages` f32 [E] are of all episodes of
    the step, those of other ranks too. Raises `DivergenceError` on every rank, before the update of the
    minibatch, when its loss or the log-prob of a unit that it trains is not finite.
    """
    packed = [
        [
            build_micro_batch(chosen, groups=groups, advantages=advantages, device=ranks.device)
            for chosen in plan_passes(rows, ranks, micro_batch_tokens, cost, groups=groups)
        ]
        for rows in minibatches
    ]
    proximal: list[Sequence[Tensor | None]] = [
        backend.evaluate(TRAINED_MODEL, batches, lambda index, columns: columns["logp"])
        if objective.wants_prox
        else [None] * len(batches)
        for batches in packed
    ]
    statistics = StepStatistics(step, max_staleness, objective.shares)
    losses, norms = [], []
    for number, (batches, prox) in enumerate(zip(packed, proximal, strict=True)):
        loss, faulty = _accumulate(backend, objective, ranks, batches, prox, len(groups), statistics)
        if faulty or not math.isfinite(loss):
            raise DivergenceError(_not_finite(loss, faulty, step, number, names))
        losses.append(loss)
        norms.append(backend.optimizer_step())
    statistics.reduce(ranks.sum, ranks.max)
    owned = [batch for batches in packed for batch in batches] if backend.place.owns else []
    return StepResult(
        losses=losses,
        grad_norms=norms,
        statistics={} if objective.supervised else statistics.report(),
        packed_tokens=ranks.total(sum(batch.n_tokens for batch in owned)),
        shared_tokens=ranks.total(sum(batch.shared_tokens for batch in owned)),
        micro_batches=sum(map(len, packed)),
    )


def _accumulate(
    backend: TrainingBackend,
    objective: Objective,
    ranks: Ranks,
    batches: Sequence[MicroBatch],
    proximal: Sequence[Tensor | None],
    n_episodes: int,
    statistics: StepStatistics,
) -> tuple[float, dict[int, int]]:
    """Gradients of one minibatch; returns its loss, and of each episode that has some the number of its units
    whose log-prob or loss is not finite."""
    units_of_episode = torch.zeros(n_episodes, dtype=torch.int64, device=ranks.device)
    for batch in batches if backend.place.owns else ():
        units_of_episode.index_add_(0, batch.units.episode, batch.units.mask.long())
    ranks.sum(units_of_episode)
    total = torch.zeros((), dtype=torch.float64)
    faulty = torch.zeros(n_episodes, dtype=torch.int64, device=ranks.device)

    def loss_of(index: int, columns: Columns) -> Tensor:
        logp, units, prox = columns["logp"], batches[index].units, proximal[index]
        terms = objective.terms(logp, prox, units)
        loss = (terms.loss * objective.coefficients(units, units_of_episode)).sum()
        # An infinite log-prob does not show in the loss: exponents are clamped.
        finite = terms.loss.isfinite() & logp.isfinite() & (logp if prox is None else prox).isfinite()
        faulty.index_add_(0, units.episode, (units.mask & ~finite).long())
        statistics.add(terms, units)
        total.add_(loss.detach().double().cpu())
        return loss

    backend.train(batches, loss_of)
    ranks.sum(total)
    ranks.sum(faulty)
    return float(total), {episode: int(faulty[episode]) for episode in faulty.nonzero()[:, 0].tolist()}


def _not_finite(loss: float, faulty: Mapping[int, int], step: int, number: int, names: Sequence[str]) -> str:
    where = ", ".join(f"{names[episode]} ({count})" for episode, count in [*faulty.items()][:MOST_NAMED])
    more = f" and {len(faulty) - MOST_NAMED} more" if len(faulty) > MOST_NAMED else ""
    units = f"; units whose log-prob or loss is not finite, by episode: {where}{more}" if faulty else ""
    return (
        f"the loss of step {step}, minibatch {number}, is {loss}{units}. Training has diverged, or the model "
        "computes what is no number for these tokens; the minibatch is not trained. Lower "
        "trainer.optimizer.lr, or start from an earlier checkpoint."
    )
