"""Corrections for units that older weights, or an engine of other numerics, sampled; `parts.py` says how to
write your own.

Each starts from w = exp(prox - beh), detached, in fp32. A unit that it drops gets the weight 0 and stays in
the count of the normaliser: to leave one out never gives more weight to another.
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

CAP = 5.0  # Default of the truncations
Level = Literal["token", "sequence"]


def behaviour_weight(prox: Tensor, behaviour: Tensor) -> Tensor:
    """w = exp(prox - beh), detached, in fp32; not truncated. f32 [S] -> f32 [S]."""
    return ratio_of(prox.detach().float() - behaviour.float())


@correction(columns=("prox",), figures=("truncated_share",))
def decoupled(
    weight: Tensor, units: UnitTable, *, cap: Positive = CAP, level: Level = "token"
) -> WithFigures:
    """min(w, cap), or with `level: sequence` min(Π w over the episode, cap), which is exact and soon 0 or at
    the cap: f32 [S]. The decoupled PPO objective weighs a loss whose ratio is taken against the proximal
    policy by how likely that policy was to sample the unit. Source: Hilton et al. 2022, "Batch
    size-invariance for policy optimization", eq. 5; Fu et al. 2025, "AReaL"."""
    if level == "sequence":
        weight = ratio_of(units.by_episode(_log_weight(units))[units.episode]).float()
    return weight.clamp(max=cap), {"truncated_share": weight > cap}


@correction(columns=("prox",), figures=("truncated_share",))
def tis(weight: Tensor, units: UnitTable, *, cap: Positive = 2.0, level: Level = "token") -> WithFigures:
    """`decoupled` with the tighter cap that is usual against engines of other numerics: f32 [S]. Source:
    Ionides 2008, "Truncated importance sampling"; Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"."""
    return decoupled.function(weight, units, cap=cap, level=level)


@correction(columns=("prox",), figures=("dropped_share",))
def icepop(
    weight: Tensor,
    units: UnitTable,
    *,
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    high: Annotated[float, Field(gt=1)] = 5.0,
) -> WithFigures:
    """w within [low, high], and 0 outside: f32 [S]. Source: Ling team 2025, "Every step evolves" (IcePop)."""
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
    """Return min(w, cap), and 0 for every unit of an episode whose mean divergence is outside [low, high], in
    nats a token; `low` none is -high: f32 [S]. The divergence of the proximal policy from the behaviour
    policy is estimated by `k1` -d, `k2` d²/2 or `k3` e^d - 1 - d, with d = prox - beh; only `k1` can be below
    0. Source: Liu et al. 2025, "When speed kills stability" (masked importance sampling of sequences by their
    geometric mean ratio, which is `k1`); the estimators are those of Schulman 2020."""
    found = units.mean_of_episode(estimate(estimator, units.behaviour, units["prox"]))
    dropped = (found > high) | (found < (-high if low is None else low))
    return weight.clamp(max=cap).masked_fill(dropped, 0.0), {"dropped_share": dropped}


@correction(columns=("prox", "advantage"), figures=("dropped_share",), of="step")
def m2po(weight: Tensor, units: UnitTable, *, threshold: Positive = 0.04, cap: Positive = CAP) -> WithFigures:
    """Return min(w, cap), and 0 for some of the units that the advantage pushes further from the behaviour
    policy, A (prox - beh) > 0. Of these, the units of the step with the largest (prox - beh)² are dropped, as
    few as needed to bring the mean of the rest down to `threshold`; of equal ones all are dropped: f32 [S].

    Source: Zheng et al. 2025, "Prosperity before collapse" (M2PO); the choice of units follows their code.
    Dropping other units too removes the gradients that lead back to the behaviour policy, and the policy
    breaks down.
    """
    d = _log_weight(units).double()
    outward = (units.advantage * d > 0) & units.mask
    moment = d.square().masked_fill(~outward, -1.0)
    ordered = units.gathered(moment).sort().values
    ordered = ordered[ordered >= 0]
    means = ordered.cumsum(0) / ordered.new_ones(len(ordered)).cumsum(0)
    kept = int((means <= threshold).sum())
    limit = float(ordered[kept]) if kept < len(ordered) else math.inf
    dropped = outward & (moment >= limit)
    return weight.clamp(max=cap).masked_fill(dropped, 0.0), {"dropped_share": dropped}


def _log_weight(units: UnitTable) -> Tensor:
    """prox - beh: f32 [S]."""
    return units["prox"] - units.behaviour


@correction(prox="behaviour")
def bypass(weight: Tensor, units: UnitTable) -> Tensor:
    """1 everywhere, for the loss takes its ratio against the behaviour policy itself: one ratio, and no pass
    for a proximal policy. f32 [S]. Source: the clipped objective of Schulman et al. 2017 as it is written."""
    return weight.new_ones(weight.shape)


@correction(corrects=False)
def none(weight: Tensor, units: UnitTable) -> Tensor:
    """1 everywhere: only right for units that the current weights sampled."""
    return weight.new_ones(weight.shape)
