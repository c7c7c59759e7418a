"""One step: from the rows of a rank to new weights, however many optimizer updates (minibatches) it holds.

The same code runs on every rank. Losses are sums over all ranks and all micro-batches with coefficients
taken over the whole optimizer step, so neither packing nor the number of ranks changes what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_service.backends.base import Backend
from trainer_service.microbatch import MicroBatch, TrainingRow, build_micro_batch
from trainer_service.objectives.compose import Objective
from trainer_service.objectives.statistics import StepStatistics
from trainer_service.packing import pack
from trainer_service.ranks import Ranks

POLICY = "policy"


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank."""

    losses: list[float]
    """The objective's value of each minibatch, before its update."""
    grad_norms: list[float]
    """Before clipping."""
    statistics: dict[str, object]
    """See `objectives.statistics`; empty for a loss without correction."""
    packed_tokens: int
    """Tokens of one pass over the step's rows."""
    micro_batches: int
    """Of this rank."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    @property
    def grad_norm(self) -> float:
        return max(self.grad_norms)


def train_step(
    backend: Backend,
    objective: Objective,
    ranks: Ranks,
    minibatches: Sequence[Sequence[TrainingRow]],
    *,
    step: int,
    max_staleness: int,
    groups: NDArray[np.int64],
    advantages: NDArray[np.float32],
    micro_batch_tokens: int,
) -> StepResult:
    """Train on this rank's rows of each minibatch; all ranks call it with the same number of minibatches.

    `groups` i64 [E] and `advantages` f32 [E] are of all episodes of the step, those of other ranks too.
    """
    packed = [
        pack_rows(rows, ranks, groups=groups, advantages=advantages, micro_batch_tokens=micro_batch_tokens)
        for rows in minibatches
    ]
    proximal: list[list[Tensor | None]] = [[None] * len(batches) for batches in packed]
    if objective.wants_prox:
        with torch.no_grad():
            proximal = [[backend.logprobs(POLICY, batch) for batch in batches] for batches in packed]
    statistics = StepStatistics(step, max_staleness)
    losses, norms = [], []
    for batches, prox in zip(packed, proximal, strict=True):
        losses.append(_accumulate(backend, objective, ranks, batches, prox, len(groups), statistics))
        norms.append(backend.update())
    statistics.reduce(ranks.sum, ranks.max)
    tokens = torch.tensor([sum(batch.n_tokens for batches in packed for batch in batches)])
    ranks.sum(tokens)
    return StepResult(
        losses=losses,
        grad_norms=norms,
        statistics=statistics.report() if objective.section.loss != "sft" else {},
        packed_tokens=int(tokens),
        micro_batches=sum(map(len, packed)),
    )


def pack_rows(
    rows: Sequence[TrainingRow],
    ranks: Ranks,
    *,
    groups: NDArray[np.int64],
    advantages: NDArray[np.float32],
    micro_batch_tokens: int,
) -> list[MicroBatch]:
    """This rank's micro-batches of one minibatch: at least one, and as many as on any other rank."""
    lengths = [row.packed_length for row in rows]
    needed = max(1, len(pack(lengths, micro_batch_tokens)))
    plan = pack(lengths, micro_batch_tokens, at_least=ranks.largest(needed))
    return [
        build_micro_batch(
            [rows[index] for index in indices], groups=groups, advantages=advantages, device=ranks.device
        )
        for indices in plan
    ]


def _accumulate(
    backend: Backend,
    objective: Objective,
    ranks: Ranks,
    batches: Sequence[MicroBatch],
    proximal: Sequence[Tensor | None],
    n_episodes: int,
    statistics: StepStatistics,
) -> float:
    """Gradients of one minibatch; returns its loss."""
    units_of_episode = torch.zeros(n_episodes, dtype=torch.int64, device=ranks.device)
    for batch in batches:
        units_of_episode.index_add_(0, batch.units.episode, batch.units.mask.long())
    ranks.sum(units_of_episode)
    total = torch.zeros((), dtype=torch.float64)
    for index, (batch, prox) in enumerate(zip(batches, proximal, strict=True)):
        terms = objective.terms(backend.logprobs(POLICY, batch), prox, batch.units)
        loss = (terms.loss * objective.coefficients(batch.units, units_of_episode)).sum()
        backend.backward(loss, last=index + 1 == len(batches))
        statistics.add(terms, batch.units)
        total += loss.detach().double().cpu()
    ranks.sum(total)
    return float(total)
