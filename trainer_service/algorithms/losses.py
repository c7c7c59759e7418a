"""Losses: one number per unit, from log-probs and advantages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp: e^20 is far outside any clip range and still finite."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±`EXPONENT_LIMIT`."""
    return log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


class PpoLoss(NamedTuple):
    loss: Tensor
    """f32 [S]"""
    clipped_low: Tensor
    """bool [S]: the lower clip decides, and the unit has no gradient."""
    clipped_high: Tensor
    """bool [S]: likewise the upper."""


def ppo(logp: Tensor, prox: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> PpoLoss:
    """max(-A ρ, -A clip(ρ, 1 - clip_low, 1 + clip_high)) with ρ = exp(logp - prox).

    All f32 [S]; gradients flow through `logp` only. Source: Schulman et al. 2017, eq. 7, with the two clip
    ranges of Yu et al. 2025, "DAPO".
    """
    rho = ratio_of(logp - prox.detach())
    loss = torch.maximum(-advantage * rho, -advantage * rho.clamp(1 - clip_low, 1 + clip_high))
    with torch.no_grad():
        clipped_low = (advantage < 0) & (rho < 1 - clip_low)
        clipped_high = (advantage > 0) & (rho > 1 + clip_high)
    return PpoLoss(loss, clipped_low, clipped_high)


def sft(logp: Tensor) -> Tensor:
    """-logp: cross-entropy on the units themselves. f32 [S] -> f32 [S]."""
    return -logp
