"""Normalisers: the coefficient of each unit in the loss of one optimizer update.

The loss of an update is Σ coefficient · (loss of the unit), over all its micro-batches and ranks. Because
`Totals` counts over the whole update, the result depends neither on the packing of rows nor on their
distribution over ranks. `parts.py` describes how to write a normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.algorithms.table import UnitTable


@dataclass(frozen=True)
class Totals:
    """Counts of an optimizer update, over all its ranks and micro-batches."""

    units_of_episode: Tensor
    """i64 [E]: number of unmasked units of each episode; 0 if the episode is in another update."""
    rows: int
    """Number of rows with unmasked units."""
    units: int
    """Number of unmasked units; at least 1."""
    episodes: int
    """Number of episodes with unmasked units; at least 1."""

    @classmethod
    def of(cls, units_of_episode: Tensor, figures: Sequence[float]) -> Totals:
        """Return totals from `units_of_episode` and the three numbers of `figures` for them."""
        rows, units, episodes = figures
        return cls(units_of_episode, round(rows), max(1, int(units)), max(1, int(episodes)))

    @staticmethod
    def figures(units_of_episode: Tensor, rows: Tensor) -> Tensor:
        """Return f64 [k, 3], on the device: numbers of rows, units and episodes of k updates.

        `units_of_episode` is i64 [k, E]. `rows` f64 [k] are sums over the unmasked units of 1 / (number of
        units in the unit's row)."""
        import torch

        counts = units_of_episode.sum(1), (units_of_episode > 0).sum(1)
        return torch.stack([rows, *(each.double() for each in counts)], dim=1)


def token(units: UnitTable, totals: Totals) -> Tensor:
    """Give every unit the same weight, 1 / Σ units. Returns f32 [S]."""
    return units.mask.float() / totals.units


def sequence(units: UnitTable, totals: Totals) -> Tensor:
    """Give every row the same weight: the mean over its units, then over rows. Returns f32 [S]."""
    return units.mask.float() / (units["row_units"] * max(1, totals.rows))


def rollout(units: UnitTable, totals: Totals) -> Tensor:
    """Give every episode the same weight: the mean over its units, then over episodes with units. The number
    of its rows does not matter. Returns f32 [S]."""
    return units.mask.float() / (totals.units_of_episode.clamp(min=1)[units.episode] * totals.episodes)


def constant(units: UnitTable, totals: Totals, *, length: Annotated[int, Field(ge=1)]) -> Tensor:
    """Divide the sum over an episode's units by a fixed `length`, then take the mean over episodes. A long
    answer weighs more than a short one. Returns f32 [S]. Source: Liu et al. 2025, "Understanding R1-Zero-like
    training"."""
    return units.mask.float() / (length * totals.episodes)
