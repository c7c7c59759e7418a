"""Statistics of the correction and the loss in a step, split by staleness.

Sums are in fp64, so the result does not depend on micro-batches or ranks. They stay on the units' device and
are read once, for the report. With w = exp(prox - beh) before
truncation:

    ess   (Σ w)² / (N Σ w²)          share of the data that is effectively used
    chi2  mean (w - 1)²              chi-square divergence of prox from beh, sampled from beh
    kl    mean (w log w - w + 1)     KL(prox ‖ beh), sampled from beh; never negative

The entropy is estimated as the mean of -beh over the sampled units. If the objective computes the entropy of
the whole distribution, that value is reported instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer_service.algorithms.objective import UnitTerms
from trainer_service.algorithms.table import UnitTable, masked

SUMS = ("count", "w", "w_squared", "chi2", "kl", "surprise")


class StepStatistics:
    """Accumulator over the micro-batches of the step that starts from version `step`. `figures` has the names
    of further figures; the accumulator computes the mean of each over units. `device` is that of the
    units."""

    def __init__(
        self,
        step: int,
        max_staleness: int,
        figures: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self._step = step
        self._names = tuple(figures)
        rows = len(SUMS) + len(self._names) + 2
        self.table = torch.zeros(rows, max_staleness + 1, dtype=torch.float64, device=device)
        """Sums, the largest w and the largest -w by staleness. The caller may replace the table by an equal
        one on another device."""
        self.table[-2:] = -torch.inf

    @torch.no_grad()
    def add(self, terms: UnitTerms, units: UnitTable) -> None:
        """Count the unmasked units of one micro-batch. Their staleness must have been checked before."""
        mask = units.mask
        staleness = masked(self._step - units.version, mask)
        w = terms.weight.double()
        columns = torch.stack(
            [
                torch.ones_like(w),
                w,
                w.square(),
                (w - 1).square(),
                torch.xlogy(w, w) - w + 1,
                -units.behaviour.double(),
                *(terms.figures[name].double() for name in self._names),
            ]
        )
        self.table[:-2].index_add_(1, staleness, masked(columns, mask))
        both = torch.stack([w, -w]).masked_fill(~mask, -torch.inf)
        self.table[-2:].scatter_reduce_(1, staleness.expand(2, -1), both, "amax")

    def include(self, other: StepStatistics) -> None:
        """Add the counts of another accumulator for the same step."""
        self.table[:-2] += other.table[:-2]
        self.table[-2:] = self.table[-2:].maximum(other.table[-2:])

    def reduce(self, sum_: Callable[[Tensor], None], max_: Callable[[Tensor], None]) -> None:
        """Add up over ranks, in place. The arguments are all-reduce functions."""
        sum_(self.table[:-2])
        max_(self.table[-2:])

    def report(self) -> dict[str, object]:
        """Return the figures over all units. `by_staleness` has the same figures for each staleness that
        occurred."""
        table = self.table.T.cpu()
        sums, extremes = table[:, :-2], table[:, -2:]
        figures: dict[str, object] = dict(self._figures(sums.sum(0), extremes.amax(0)))
        figures["by_staleness"] = {
            str(staleness): self._figures(sums[staleness], extremes[staleness])
            for staleness in range(len(sums))
            if sums[staleness, 0] > 0
        }
        return figures

    def _figures(self, sums: Tensor, extremes: Tensor) -> dict[str, float]:
        total = dict(zip((*SUMS, *self._names), sums.tolist(), strict=True))
        count = total["count"]
        if count == 0:
            return {"units": 0}
        return {
            "units": int(count),
            "w_mean": total["w"] / count,
            "w_max": float(extremes[0]),
            "w_min": -float(extremes[1]),
            "ess": total["w"] ** 2 / (count * total["w_squared"]),
            "chi2": total["chi2"] / count,
            "kl_prox_beh": total["kl"] / count,
            "entropy": total["surprise"] / count,
            **{name: total[name] / count for name in self._names},
        }


class EffectiveSamplesWatch:
    """Monitor of the effective share of the samples (`ess`). It triggers after `patience` consecutive steps
    below `floor`."""

    def __init__(self, floor: float, patience: int, advice: str) -> None:
        """`advice` is a sentence on which settings to change."""
        self._floor, self._patience, self._advice = floor, patience, advice
        self._below = 0

    def after_step(self, share: object) -> str:
        """Return the advice if the monitor triggers in this step, and an empty string otherwise.

        `share` is the effective share of the step. If it is not a number, the step does not count. A share at
        or above the floor restarts the count."""
        if not isinstance(share, float):
            return ""
        self._below = self._below + 1 if share < self._floor else 0
        if self._below != self._patience:
            return ""
        return (
            f"the effective share of the samples was below {self._floor:g} in {self._patience} steps, "
            f"last at {share:.3g}: they say little about the policy that is trained. {self._advice}"
        )
