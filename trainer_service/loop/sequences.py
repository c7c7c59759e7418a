"""One optimizer step on losses of whole sequences, and the measurements on them.

A loss may compare the numbers s of sequences that are in different micro-batches or on different ranks. The
gradient is still exact, by the chain rule: first, a pass without gradient computes s of all sequences. Then
the derivatives dL/ds are computed from these few numbers. Last, the pass with gradient accumulates the
gradients of Σ dL/ds · s(θ). If every example is within one micro-batch, its loss is computed there, and the
extra pass is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from trainer_service.algorithms.sequence_losses import SequenceLoss, Sequences
from trainer_service.backends.base import TRAINED_MODEL, Columns, TrainingBackend
from trainer_service.data.flops import RowCost
from trainer_service.data.lessons import Lesson
from trainer_service.data.microbatch import MicroBatch, build_micro_batch, deal_rows, plan_passes
from trainer_service.data.rows import TrainingRow
from trainer_service.errors import DivergenceError
from trainer_service.loop.step import MOST_NAMED
from trainer_service.ranks import Ranks
from trainer_service.transfer import on_device


@dataclass(frozen=True)
class SequenceStep:
    """Result of a step; the same on every rank."""

    loss: float
    """Loss before the update."""
    grad_norm: float
    tokens: int
    """Number of trained units."""
    passes: int
    """Number of extra passes over the step's rows without gradient."""


class SequenceTrainer:
    """Trainer for losses of whole sequences. All ranks make the same calls. `budget` is the largest number of
    tokens in a micro-batch."""

    def __init__(
        self, backend: TrainingBackend, ranks: Ranks, loss: SequenceLoss, *, budget: int, cost: RowCost
    ) -> None:
        self._backend, self._ranks, self._loss, self._budget, self._cost = backend, ranks, loss, budget, cost

    def sums(self, rows: Sequence[TrainingRow], groups: NDArray[np.int64]) -> Tensor:
        """Return f64 [N]: sum of the loss's column over the units of each row. Rows with equal `groups` i64
        [N] belong to one example."""
        return self._sums(self._packed(rows, groups)[0], len(rows))

    def wrong(self, rows: Sequence[TrainingRow]) -> tuple[Tensor, Tensor]:
        """Return `sums` for rows that are one example each, and i64 [N]: the number of units of each row
        whose token is not the arg max."""
        wrong = torch.zeros(len(rows), dtype=torch.int64, device=self._ranks.device)
        sums = self._sums(self._packed(rows, np.arange(len(rows)))[0], len(rows), wrong)
        self._ranks.sum(wrong)
        return sums, wrong

    def given(self, lessons: Sequence[Lesson], refs: Sequence[Sequence[float]] | None) -> Sequences:
        """Return the sequences of lessons, with `s` set to 0 for now. `refs` has the reference's sums for
        each lesson's `evaluated` rows."""
        n = len(lessons[0].rows)
        known = [ref[:n] for ref in refs] if refs is not None else [[0.0] * n] * len(lessons)
        rows = [row for lesson in lessons for row in lesson.rows]
        arrays = {
            "s": np.zeros(len(rows)),
            "ref": np.array(known, np.float64).flatten(),
            "length": np.array([len(row.position) for row in rows]),
            "value": np.array([lesson.value for lesson in lessons], np.float64),
        }
        return Sequences(**on_device(arrays, self._ranks.device), zero=self._zero(lessons, refs))

    def train(
        self, lessons: Sequence[Lesson], names: Sequence[str], refs: Sequence[Sequence[float]] | None = None
    ) -> SequenceStep:
        """Make one update on `lessons`. `names` has the names of the lessons for error messages.

        Raises `DivergenceError` on every rank, before the update, if the loss or a number of a sequence is
        not finite."""
        rows = [row for lesson in lessons for row in lesson.rows]
        each = len(lessons[0].rows)
        batches, whole = self._packed(rows, np.repeat(np.arange(len(lessons)), each))
        given = self.given(lessons, refs)
        slopes = None if whole else self._slopes(given, batches)
        seen = torch.zeros_like(given.s)

        def loss_of(index: int, columns: Columns) -> Tensor:
            s = _summed(columns[self._loss.column], batches[index], len(rows))
            seen.add_(s.detach())
            if slopes is not None:
                return (slopes * s).sum()
            # The losses of examples in other micro-batches are constants here.
            return self._loss(replace(given, s=s)).mean()

        self._backend.train(TRAINED_MODEL, batches, loss_of, columns=(self._loss.column,))
        self._ranks.sum(seen)
        value = self._loss(replace(given, s=seen)).mean()
        loss, all_finite = torch.stack([value, seen.isfinite().all()]).tolist()
        if not (math.isfinite(loss) and all_finite):
            faulty = sorted({int(row) // each for row in (~seen.isfinite()).nonzero()[:, 0]})
            where = ", ".join(names[index] for index in faulty[:MOST_NAMED]) or "none alone"
            raise DivergenceError(
                f"the loss is {loss}; examples whose numbers are not finite: {where}. Training has diverged, "
                "or the model computes what is no number for these tokens; nothing is trained on them. Lower "
                "trainer.optimizer.lr, or start from an earlier checkpoint."
            )
        return SequenceStep(
            loss=loss,
            grad_norm=self._backend.optimizer_step(),
            tokens=sum(len(row.position) for row in rows),
            passes=int(slopes is not None) + int(self._loss.zeroed),
        )

    def _zero(self, lessons: Sequence[Lesson], refs: Sequence[Sequence[float]] | None) -> float:
        """Return z₀ of KTO."""
        rows = [lesson.crossed for lesson in lessons if lesson.crossed is not None]
        if not rows or refs is None:
            return 0.0
        sums = self.sums(rows, np.arange(len(rows))).cpu()
        known = torch.tensor([ref[-1] for ref in refs], dtype=torch.float64)
        return max(0.0, float((sums - known).mean()))

    def _slopes(self, given: Sequences, batches: Sequence[MicroBatch]) -> Tensor:
        """Return dL/ds: f64 [N]."""
        s = self._sums(batches, len(given.s)).requires_grad_()
        (slopes,) = torch.autograd.grad(self._loss(replace(given, s=s)).mean(), s)
        return slopes

    def _packed(
        self, rows: Sequence[TrainingRow], groups: NDArray[np.int64]
    ) -> tuple[list[MicroBatch], bool]:
        """Return this rank's micro-batches of the rows, and whether each example is within one micro-batch on
        all ranks. Row i becomes episode i in them."""
        place, groups = self._backend.place, groups.astype(np.int64)
        costs = [[self._cost.of(row.packed_length, len(row.position), row.image_tokens())] for row in rows]
        dealt = deal_rows(costs, place.data_ranks, groups.tolist())
        mine = dealt[place.data_rank] if place.reads else {}
        chosen = [structs.replace(rows[index], episode=index) for index in mine]
        passes = plan_passes(
            chosen,
            self._ranks,
            self._budget,
            self._cost,
            groups=groups,
            side_by_side=self._backend.side_by_side,
        )
        size = np.bincount(groups)
        homes = [
            np.unique(groups[[row.episode for row in part]], return_counts=True) for part in passes if part
        ]
        parted = any((size[examples] != counts).any() for examples, counts in homes)
        batches = [build_micro_batch(part, device=self._ranks.device) for part in passes]
        return batches, not self._ranks.largest(int(parted))

    def _sums(self, batches: Sequence[MicroBatch], n: int, wrong: Tensor | None = None) -> Tensor:
        """Return f64 [n]: sums of the loss's column, on every rank. If given, `wrong` i64 [n] receives this
        rank's counts of units that are not the arg max."""
        found = torch.zeros(n, dtype=torch.float64, device=self._ranks.device)
        names = (self._loss.column, *(("greedy",) if wrong is not None else ()))

        def add(index: int, columns: Columns) -> None:
            found.add_(_summed(columns[self._loss.column], batches[index], n))
            if wrong is not None:
                wrong.index_add_(0, batches[index].episode, (~columns["greedy"]).long())

        self._backend.evaluate(TRAINED_MODEL, batches, add, columns=names)
        self._ranks.sum(found)
        return found


def _summed(column: Tensor, batch: MicroBatch, n: int) -> Tensor:
    """Return f64 [n]: sum of the column over each sequence."""
    zeros = torch.zeros(n, dtype=torch.float64, device=column.device)
    return zeros.index_add(0, batch.episode, column.double())
