"""Losses: one number per unit, from its log-prob."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.algorithms.parts import loss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.data.microbatch import UnitTable

EXPONENT_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp: e^20 is far outside any clip range and still finite."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±`EXPONENT_LIMIT`."""
    return log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


@loss(columns=("prox", "advantage"), shares=("clip_low", "clip_high"))
def ppo(
    logp: Tensor, units: UnitTable, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A ρ, -A clip(ρ, 1 - clip_low, 1 + clip_high)) with ρ = exp(logp - prox).

    logp f32 [S] -> f32 [S], and the units that have no gradient because the lower or the upper clip decides.
    Source: Schulman et al. 2017, eq. 7, with the two clip ranges of Yu et al. 2025, "DAPO".
    """
    rho, advantage = ratio_of(logp - units["prox"]), units.advantage
    clipped = -advantage * rho.clamp(1 - clip_low, 1 + clip_high)
    return (-advantage * rho).maximum(clipped), {
        "clip_low": (advantage < 0) & (rho < 1 - clip_low),
        "clip_high": (advantage > 0) & (rho > 1 + clip_high),
    }


@loss(supervised=True)
def sft(logp: Tensor, units: UnitTable) -> Tensor:
    """-logp: cross-entropy on the units themselves. f32 [S] -> f32 [S]."""
    return -logp
