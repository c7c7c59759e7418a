"""Advantages: from the rewards of whole groups to one number per episode, before any packing."""

from __future__ import annotations

import torch
from torch import Tensor

GRPO_EPS = 1e-6


def grpo(rewards: Tensor, groups: Tensor, eps: float = GRPO_EPS) -> Tensor:
    """A = (R - mean_g) / (std_g + eps), with the sample standard deviation (n - 1) of the group.

    rewards float [E], groups i64 [E] (any labels, any order) -> f32 [E]. A group of one episode, and one
    whose rewards are all equal, get 0. Source: Shao et al. 2024, "DeepSeekMath", eq. 3 (outcome reward).
    """
    rewards = rewards.double()
    labels, member = torch.unique(groups, return_inverse=True)
    zeros = torch.zeros(labels.shape[0], dtype=torch.float64, device=rewards.device)
    count = zeros.index_add(0, member, torch.ones_like(rewards))
    mean = zeros.index_add(0, member, rewards) / count
    centred = rewards - mean[member]
    # A mean of equal numbers may be off by one rounding: such a group says nothing, exactly.
    centred = torch.where(centred.abs() <= 1e-12 * rewards.abs(), 0.0, centred)
    variance = zeros.index_add(0, member, centred.square()) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt()[member] + eps)).float()
