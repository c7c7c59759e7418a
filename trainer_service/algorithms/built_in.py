"""The built-in advantages, losses, corrections and normalisers; `parts.py` says how to write one of your own.

A normaliser gives the coefficient of each unit in the loss of one optimizer step, which is
Σ coefficient · (loss of the unit) over all its micro-batches and ranks. `units_of_episode` counts the
trainable units of every episode of that optimizer step, on all ranks, so the result depends neither on how
rows were packed nor on who trains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_async.config.base import Section
from trainer_service.algorithms.parts import advantage, correction, loss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.data.microbatch import UnitTable

CLIP, CAP = 0.2, 5.0  # Defaults of `ppo` and `decoupled`
EXPONENT_LIMIT = 20.0
"""Log-ratios are clamped to ± this before exp: e^20 is far outside any clip range and still finite."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±`EXPONENT_LIMIT`."""
    return log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


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


class PpoArguments(Section):
    clip_low: float = Field(default=CLIP, gt=0, lt=1)
    """The ratio is clipped below 1 - this."""
    clip_high: float = Field(default=CLIP, gt=0)
    """The ratio is clipped above 1 + this."""


@loss(columns=("prox", "advantage"), shares=("clip_low", "clip_high"), arguments=PpoArguments)
def ppo(
    logp: Tensor, units: UnitTable, *, clip_low: float = CLIP, clip_high: float = CLIP
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


def behaviour_weight(prox: Tensor, behaviour: Tensor) -> Tensor:
    """w = exp(prox - beh), detached, in fp32; not truncated. f32 [S] -> f32 [S]."""
    return ratio_of(prox.detach().float() - behaviour.float())


class DecoupledArguments(Section):
    cap: float = Field(default=CAP, gt=0)
    """The weight is truncated at this."""


@correction(columns=("prox",), shares=("truncated",), arguments=DecoupledArguments)
def decoupled(weight: Tensor, units: UnitTable, *, cap: float = CAP) -> tuple[Tensor, dict[str, Tensor]]:
    """min(w, cap): the decoupled PPO objective weighs a loss whose ratio is taken against the proximal policy
    by how likely that policy was to sample the unit. Source: Hilton et al. 2022, "Batch size-invariance for
    policy optimization", eq. 5; Fu et al. 2025, "AReaL"."""
    return weight.clamp(max=cap), {"truncated": weight > cap}


@correction(corrects=False)
def none(weight: Tensor, units: UnitTable) -> Tensor:
    """1 everywhere: only right for units that the current weights sampled."""
    return weight.new_ones(weight.shape)


def token(mask: Tensor, episode: Tensor, units_of_episode: Tensor) -> Tensor:
    """Every unit weighs the same: 1 / Σ units.

    mask bool [S], episode i64 [S], units_of_episode i64 [E] -> f32 [S]."""
    return mask.float() / units_of_episode.sum().clamp(min=1)


def sequence(mask: Tensor, episode: Tensor, units_of_episode: Tensor) -> Tensor:
    """Every episode weighs the same: mean over its units (however many rows they fill), then over the
    episodes that have any. Shapes as `token`."""
    n_episodes = (units_of_episode > 0).sum().clamp(min=1)
    return mask.float() / (units_of_episode.clamp(min=1)[episode] * n_episodes)
