"""Advantages: from the rewards of whole groups to one number per episode, before any packing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.algorithms.parts import advantage

if TYPE_CHECKING:
    from torch import Tensor


@advantage(needs_group=2)
def grpo(rewards: Tensor, groups: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A = (R - mean_g) / (std_g + eps), with the sample standard deviation (n - 1) of the group.

    rewards float [E], groups i64 [E] (any labels, any order) -> f32 [E]. A group of one episode, and one
    whose rewards are all equal, get 0. Source: Shao et al. 2024, "DeepSeekMath", eq. 3 (outcome reward).
    """
    rewards = rewards.double()
    labels, member = groups.unique(return_inverse=True)
    zeros = rewards.new_zeros(labels.shape[0])
    count = zeros.index_add(0, member, rewards.new_ones(rewards.shape))
    mean = zeros.index_add(0, member, rewards) / count
    centred = rewards - mean[member]
    # A mean of equal numbers may be off by one rounding: such a group says nothing, exactly.
    centred = centred.masked_fill(centred.abs() <= 1e-12 * rewards.abs(), 0.0)
    variance = zeros.index_add(0, member, centred.square()) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt()[member] + eps)).float()
