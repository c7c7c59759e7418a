"""Normalisers: the coefficient of each unit in the loss of one optimizer step.

The loss of a step is Σ coefficient · (loss of the unit), summed over all its micro-batches and ranks.
`units_of_episode` counts the trainable units of every episode of that optimizer step, on all ranks, so the
result depends neither on how rows were packed nor on who trains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def token(mask: Tensor, episode: Tensor, units_of_episode: Tensor) -> Tensor:
    """Every unit weighs the same: 1 / Σ units.

    mask bool [S], episode i64 [S], units_of_episode i64 [E] -> f32 [S]."""
    return mask.float() / units_of_episode.sum().clamp(min=1)


def sequence(mask: Tensor, episode: Tensor, units_of_episode: Tensor) -> Tensor:
    """Every episode weighs the same: mean over its units (however many rows they fill), then over the
    episodes that have any. Shapes as `token`."""
    n_episodes = (units_of_episode > 0).sum().clamp(min=1)
    return mask.float() / (units_of_episode.clamp(min=1)[episode] * n_episodes)
