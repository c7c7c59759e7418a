"""The optimizer updates of a step, and the numbers of them on which the host decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer_service.algorithms.normalisers import Totals
from trainer_service.algorithms.table import UnitTable
from trainer_service.data.microbatch import MicroBatch
from trainer_service.ranks import Ranks


@dataclass(frozen=True)
class Minibatch:
    """This rank's part of one optimizer update."""

    batches: list[MicroBatch]
    units: list[UnitTable]
    """Unit table of each micro-batch; empty on a rank that does not own the columns."""
    totals: Totals
    splits_episodes: bool
    """Whether units of an episode are in several micro-batches of the update, on any rank."""


def minibatches_of(
    packed: Sequence[list[MicroBatch]], tables: Iterator[UnitTable], ranks: Ranks, n_episodes: int
) -> tuple[list[Minibatch], bool, bool]:
    """Return the minibatches, whether every advantage is finite, and whether one is not 0.

    `packed` are the micro-batches of each minibatch, and `tables` their unit tables, which are none on a rank
    that does not own the columns. All ranks call it. All numbers are read from the device at once."""
    k, device = len(packed), ranks.device
    units: list[list[UnitTable]] = [[] for _ in packed]
    counts = torch.zeros(2, k, n_episodes, dtype=torch.int64, device=device)
    """Numbers of units and of micro-batches of each episode."""
    sums = torch.zeros(3, k, dtype=torch.float64, device=device)
    """Numbers of rows, of units whose advantage is not finite, and of units whose advantage is not 0."""
    for number, batches in enumerate(packed):
        for _, part in zip(batches, tables, strict=False):
            units[number].append(part)
            mask, advantage = part.mask, part.advantage
            counts[0, number].index_add_(0, part.episode, mask.long())
            counts[1, number].add_(torch.zeros_like(counts[1, number]).index_fill_(0, part.episode, 1))
            rows = mask.double() / part["row_units"]
            flags = (rows, mask & ~advantage.isfinite(), mask & (advantage != 0))
            sums[:, number].add_(torch.stack([each.double().sum() for each in flags]))
    ranks.sum(counts)
    ranks.sum(sums)
    most = counts[1].amax(1, keepdim=True)
    read = torch.cat([Totals.figures(counts[0], sums[0]), most, sums[1:].T], dim=1).tolist()
    minibatches = [
        Minibatch(batches, parts, Totals.of(of_update, figures[:3]), figures[3] > 1)
        for batches, parts, of_update, figures in zip(packed, units, counts[0], read, strict=True)
    ]
    return minibatches, not any(figures[4] for figures in read), any(figures[5] for figures in read)
