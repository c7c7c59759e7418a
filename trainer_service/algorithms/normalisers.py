"""Normalisers: the coefficient of each unit in the loss of one optimizer update, which is
Σ coefficient · (loss of the unit) over all its micro-batches and ranks.

`Totals` counts over the whole update, so the result depends neither on the packing of rows nor on their
ranks. `parts.py` describes how to write your own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.algorithms.table import UnitTable


@dataclass(frozen=True)
class Totals:
    """Counts of an optimizer update, over all ranks and all its micro-batches."""

    units_of_episode: Tensor
    """i64 [E]: unmasked units of each episode; 0 for one of another update."""
    rows: int
    """Rows with unmasked units."""

    @property
    def units(self) -> int:
        return max(1, int(self.units_of_episode.sum()))

    @property
    def episodes(self) -> int:
        """Episodes with unmasked units."""
        return max(1, int((self.units_of_episode > 0).sum()))


def token(units: UnitTable, totals: Totals) -> Tensor:
    """Return equal weights for all units: 1 / Σ units. f32 [S]"""
    return units.mask.float() / totals.units


def sequence(units: UnitTable, totals: Totals) -> Tensor:
    """Return equal weights for all rows: mean over a row's units, then over the rows. f32 [S]"""
    return units.mask.float() / (units["row_units"] * max(1, totals.rows))


def rollout(units: UnitTable, totals: Totals) -> Tensor:
    """Return equal weights for all episodes, independent of their number of rows: mean over an episode's
    units, then over the episodes that have any. f32 [S]"""
    return units.mask.float() / (totals.units_of_episode.clamp(min=1)[units.episode] * totals.episodes)


def constant(units: UnitTable, totals: Totals, *, length: Annotated[int, Field(ge=1)]) -> Tensor:
    """Return the weights for the sum over an episode's units divided by a fixed `length`, then the mean over
    episodes. A long answer weighs more than a short one. f32 [S]. Source: Liu et al. 2025, "Understanding
    R1-Zero-like training"."""
    return units.mask.float() / (length * totals.episodes)
