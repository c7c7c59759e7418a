"""Corrections for units from older weights, or from an engine whose numerics differ from the trainer's.

Each correction starts from w = exp(prox - beh), detached, in fp32. A dropped unit gets the weight 0 but still
counts in the normaliser, so dropping a unit never gives more weight to another. `parts.py` describes how to
write a correction.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainer_service.algorithms.kl import estimate
from trainer_service.algorithms.losses import ratio_of
from trainer_service.algorithms.parts import Positive, correction

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.algorithms.losses import WithFigures
    from trainer_service.algorithms.table import UnitTable

CAP = 5.0  # Default truncation
Level = Literal["token", "sequence"]


def behaviour_weight(prox: Tensor, behaviour: Tensor) -> Tensor:
    """Return w = exp(prox - beh), detached, not truncated, in fp32: f32 [S] -> f32 [S]."""
    return ratio_of(prox.detach().float() - behaviour.float())


@correction(columns=("prox",), figures=("truncated_share",))
def decoupled(
    weight: Tensor, units: UnitTable, *, cap: Positive = CAP, level: Level = "token"
) -> WithFigures:
    """Return min(w, cap): f32 [S].

    With `level: sequence` it is min(Π w over the episode, cap). Without the cap, this product is the exact
    importance weight. However, the weight of a long episode is almost always near 0 or at the cap. In the
    decoupled PPO objective, the ratio in the loss compares the policy with the proximal policy. The weight w
    is the unit's probability under that policy divided by its probability under the behaviour policy. Source:
    Hilton et al. 2022, "Batch size-invariance for policy optimization", eq. 5; Fu et al. 2025, "AReaL"."""
    if level == "sequence":
        weight = ratio_of(units.by_episode(_log_weight(units))[units.episode]).float()
    return weight.clamp(max=cap), {"truncated_share": weight > cap}


@correction(columns=("prox",), figures=("truncated_share",))
def tis(weight: Tensor, units: UnitTable, *, cap: Positive = 2.0, level: Level = "token") -> WithFigures:
    """Return `decoupled` with a tighter cap, which is usual if the engine's numerics differ from the
    trainer's: f32 [S].

    Source: Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"."""
    return decoupled.function(weight, units, cap=cap, level=level)


@correction(columns=("prox",), figures=("dropped_share",))
def icepop(
    weight: Tensor,
    units: UnitTable,
    *,
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    high: Annotated[float, Field(gt=1)] = 5.0,
) -> WithFigures:
    """Return w within [low, high] and 0 outside: f32 [S].

    Source: Ling team 2025, "Every step evolves" (IcePop)."""
    dropped = (weight < low) | (weight > high)
    return weight.masked_fill(dropped, 0.0), {"dropped_share": dropped}


@correction(columns=("prox",), figures=("dropped_share",), of="step")
def mis(
    weight: Tensor,
    units: UnitTable,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    low: Annotated[float, Field(lt=0)] | None = None,
    high: Positive = 0.05,
    cap: Positive = CAP,
) -> WithFigures:
    """Return min(w, cap), or 0 for all units of an episode whose mean divergence is outside [low, high]: f32
    [S].

    The bounds are in nats per token; with `low: None`, the lower bound is -high. The divergence of the
    proximal policy from the behaviour policy is estimated with d = prox - beh: `k1` is -d, `k2` is d²/2, `k3`
    is e^d - 1 - d. Only `k1` can be negative. Source: Liu et al. 2025, "When speed kills stability"
    (sequences are masked by their geometric mean ratio, which is `k1`). The estimators are from Schulman
    2020."""
    found = units.mean_of_episode(estimate(estimator, units.behaviour, units["prox"]))
    dropped = (found > high) | (found < (-high if low is None else low))
    return weight.clamp(max=cap).masked_fill(dropped, 0.0), {"dropped_share": dropped}


@correction(columns=("prox", "advantage"), figures=("dropped_share",), of="step")
def m2po(weight: Tensor, units: UnitTable, *, threshold: Positive = 0.04, cap: Positive = CAP) -> WithFigures:
    """Return min(w, cap), or 0 for some units that the advantage pushes away from the behaviour policy: f32
    [S].

    A unit is a candidate if A (prox - beh) > 0. Candidates of the whole step are dropped in descending order
    of (prox - beh)², until the mean of this value over the remaining candidates is at most `threshold`.
    Candidates with equal values are dropped together. Units that are not candidates are never dropped,
    because they push the policy back towards the behaviour policy. Without them, the policy would break down.
    Source: Zheng et al. 2025, "Prosperity before collapse" (M2PO). The choice of candidates follows the
    authors' code."""
    import torch.nn.functional as F

    d = _log_weight(units).double()
    outward = (units.advantage * d > 0) & units.mask
    moment = d.square().masked_fill(~outward, -1.0)
    # Units that are no candidates come first, with -1. The infinity is the limit if none is dropped.
    ordered = F.pad(units.gathered(moment).sort().values, (0, 1), value=math.inf)
    is_candidate = ordered >= 0
    means = ordered.where(is_candidate, 0.0).cumsum(0) / is_candidate.cumsum(0).clamp(min=1)
    dropped = outward & (moment >= ordered.where(means > threshold, math.inf).amin())
    return weight.clamp(max=cap).masked_fill(dropped, 0.0), {"dropped_share": dropped}


def _log_weight(units: UnitTable) -> Tensor:
    """Return prox - beh: f32 [S]."""
    return units["prox"] - units.behaviour


@correction(prox="behaviour")
def bypass(weight: Tensor, units: UnitTable) -> Tensor:
    """Return 1 for every unit: f32 [S]. The ratio in the loss is taken against the behaviour policy itself,
    so no forward pass for a proximal policy is needed.

    Source: the clipped objective of Schulman et al. 2017 in its original form."""
    return weight.new_ones(weight.shape)


@correction(corrects=False)
def none(weight: Tensor, units: UnitTable) -> Tensor:
    """Return 1 for every unit: f32 [S]. This weight is correct only for units that the current weights
    sampled."""
    return weight.new_ones(weight.shape)
