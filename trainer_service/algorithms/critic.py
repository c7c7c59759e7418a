"""Training of the critic. Its predictions of future reward are the column `value` of the unit table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer_service.algorithms.table import masked

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.algorithms.table import UnitTable

SUMS = ("count", "return", "return_squared", "error_squared", "clipped")


@dataclass(frozen=True)
class ValueTerms:
    """Terms of the critic's loss for each unit, all [S]."""

    loss: Tensor
    """f32, with gradient, not yet normalised; 0 where masked."""
    clipped: Tensor
    """bool: units whose gradient the clip removed."""


def value_terms(value: Tensor, units: UnitTable, clip: float | None) -> ValueTerms:
    """Return the critic's loss ½ · max((V - R)², (V' - R)²): f32 [S].

    R is the column `return`. V' is V clamped to ± clip around the value before the step. Without a clip the
    loss is ½ · (V - R)². Source: Schulman et al. 2017, sec. 5, with the clip of the reference implementation
    (Huang et al. 2022, "The 37 implementation details of PPO", no. 9)."""
    mask, old, target = units.mask, units["value"], units["return"]
    value = torch.where(mask, value.float(), old)
    error = (value - target).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        bounded = (old + (value - old).clamp(-clip, clip) - target).square()
        clipped = (bounded > error) & mask
        error = error.maximum(bounded)
    return ValueTerms(torch.where(mask, error / 2, torch.zeros_like(error)), clipped)


class ValueStatistics:
    """Accuracy with which the critic predicted the returns before the step, accumulated over the step's
    micro-batches."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        """The caller may replace them by equal ones on another device."""

    @torch.no_grad()
    def add(self, terms: ValueTerms, units: UnitTable) -> None:
        mask = units.mask
        target, value = (masked(units[name].double(), mask) for name in ("return", "value"))
        columns = (mask, target, target.square(), (target - value).square(), terms.clipped)
        self.sums += torch.stack([column.double().sum() for column in columns])

    def include(self, other: ValueStatistics) -> None:
        """Add the counts of another accumulator."""
        self.sums += other.sums

    def reduce(self, sum_: Callable[[Tensor], None]) -> None:
        """Add up over ranks, in place."""
        sum_(self.sums)

    def report(self) -> dict[str, float]:
        """Return the figures. `explained_variance` is 1 - mean (R - V)² / variance of R, or 0 if all returns
        are equal."""
        count, total, squared, error, clipped = self.sums.tolist()
        count = max(1.0, count)
        variance = squared / count - (total / count) ** 2
        return {
            "return_mean": total / count,
            "value_error": error / count,
            "explained_variance": 1 - error / count / variance if variance > 1e-12 else 0.0,
            "value_clip_share": clipped / count,
        }
