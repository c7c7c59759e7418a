"""Losses of units, from their log-probs. `parts.py` describes how to write a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from trainer_service.algorithms.kl import EXPONENT_LIMIT
from trainer_service.algorithms.parts import NotNegative, Positive, loss

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.algorithms.table import UnitTable

    WithFigures = tuple[Tensor, dict[str, Tensor]]

CLIP = 0.2  # Default clip of a ratio
RATIO = ("prox", "advantage")
CLIP_SHARES = ("clip_low_share", "clip_high_share")
ClipLow = Annotated[float, Field(gt=0, lt=1)]
"""Type of the lower clip. A ratio is clipped below 1 - `clip_low`."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio that is clamped to ±`EXPONENT_LIMIT`."""
    return log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def clipped(
    rho: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> WithFigures:
    """Return max(-A ρ, -A clip(ρ, 1 - clip_low, 1 + clip_high)) and its clip figures.

    The figures mark units whose gradient is 0 because the lower or the upper clip applies."""
    bound = -advantage * rho.clamp(1 - clip_low, 1 + clip_high)
    loss = (-advantage * rho).maximum(bound)
    if dual_clip is not None:
        loss = loss.where(advantage >= 0, loss.minimum(-advantage * dual_clip))
    return loss, {
        "clip_low_share": (advantage < 0) & (rho < 1 - clip_low),
        "clip_high_share": (advantage > 0) & (rho > 1 + clip_high),
    }


@loss(columns=RATIO, figures=CLIP_SHARES, prox="loglinear")
def ppo(
    logp: Tensor,
    units: UnitTable,
    *,
    clip_low: ClipLow = CLIP,
    clip_high: Positive = CLIP,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> WithFigures:
    """Return `clipped` with ρ = exp(logp - prox): f32 [S]. With `dual_clip` c, the loss is at most -cA if A <
    0.

    Source: Schulman et al. 2017, eq. 7, with the two clip ranges of Yu et al. 2025, "DAPO"; dual clip from Ye
    et al. 2020, "Mastering complex control in MOBA games with deep reinforcement learning"."""
    return clipped(ratio_of(logp - units["prox"]), units.advantage, clip_low, clip_high, dual_clip)


@loss(columns=RATIO, figures=CLIP_SHARES)
def raft_pp(
    logp: Tensor, units: UnitTable, *, clip_low: ClipLow = CLIP, clip_high: Positive = CLIP
) -> WithFigures:
    """Return `ppo` if A > 0 and 0 otherwise: f32 [S]. The normaliser still counts all units.

    Source: Xiong et al. 2025, "A minimalist approach to LLM reasoning", sec. 2 (RAFT++)."""
    better = units.advantage.clamp(min=0)
    return clipped(ratio_of(logp - units["prox"]), better, clip_low, clip_high)


def log_ratio(logp: Tensor, units: UnitTable, **_: Any) -> Tensor:
    """Return logp - prox: f32 [S]."""
    return logp - units["prox"]


@loss(columns=RATIO, figures=CLIP_SHARES, statistic=log_ratio)
def gspo(
    logp: Tensor, units: UnitTable, *, clip_low: ClipLow = 3e-4, clip_high: Positive = 4e-4
) -> WithFigures:
    """Return `clipped` with the ratio of the whole episode, ρ = exp(mean over its units of logp - prox): f32
    [S].

    Source: Zheng et al. 2025, "Group sequence policy optimization", eq. 5 to 7. If advantages or weights
    differ within an episode, the loss is that of eq. 13 (GSPO-token)."""
    return clipped(ratio_of(units["episode_mean"]), units.advantage, clip_low, clip_high)


def clipped_log_ratio(
    logp: Tensor, units: UnitTable, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> Tensor:
    """Return logp - prox: f32 [S]. It is clamped to at most `clip_high` if A > 0, and to at least -`clip_low`
    otherwise."""
    d = logp - units["prox"]
    return d.clamp(max=clip_high).where(units.advantage > 0, d.clamp(min=-clip_low))


@loss(columns=RATIO, figures=CLIP_SHARES, statistic=clipped_log_ratio)
def gmpo(
    logp: Tensor, units: UnitTable, *, clip_low: Positive = 0.4, clip_high: Positive = 0.4
) -> WithFigures:
    """Return -A ρ: f32 [S].

    ρ is the geometric mean of the ratios of the episode's units. Each ratio is clipped in log space, on the
    side to which the update pushes it (`clipped_log_ratio`). Source: Zhao et al. 2025, "Geometric-mean policy
    optimization", eq. 4 and algorithm 1."""
    d, advantage = (logp - units["prox"]).detach(), units.advantage
    return -advantage * ratio_of(units["episode_mean"]), {
        "clip_low_share": (advantage < 0) & (d < -clip_low),
        "clip_high_share": (advantage > 0) & (d > clip_high),
    }


@loss(columns=RATIO, figures=CLIP_SHARES)
def cispo(
    logp: Tensor,
    units: UnitTable,
    *,
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0,
    clip_high: Positive = 4.0,
) -> WithFigures:
    """Return -sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A logp with ρ = exp(logp - prox): f32 [S].

    sg stops the gradient. So every unit keeps a gradient, and the figures mark units whose weight is clipped.
    Source: MiniMax 2025, "MiniMax-M1", eq. 4 and 5."""
    rho = ratio_of(logp - units["prox"]).detach()
    return -rho.clamp(1 - clip_low, 1 + clip_high) * units.advantage * logp, {
        "clip_low_share": rho < 1 - clip_low,
        "clip_high_share": rho > 1 + clip_high,
    }


@loss(columns=RATIO)
def sapo(
    logp: Tensor, units: UnitTable, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05
) -> Tensor:
    """Return -A σ(τ (ρ - 1)) 4 / τ with ρ = exp(logp - prox): f32 [S].

    τ depends on the sign of A. At ρ = 1 the gradient equals that of `ppo`, and it fades as ρ moves away from
    1 in either direction. Source: Gao et al. 2025, "Soft adaptive policy optimization", sec. 3."""
    tau = (units.advantage > 0).float() * (tau_positive - tau_negative) + tau_negative
    gate = (tau * (ratio_of(logp - units["prox"]) - 1)).sigmoid() * 4 / tau
    return -units.advantage * gate


@loss(columns=RATIO, figures=("moved_share",))
def dppo(
    logp: Tensor,
    units: UnitTable,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    bound_low: Positive = 0.15,
    bound_high: Positive = 0.15,
) -> WithFigures:
    """Return -A ρ, unclipped, with ρ = exp(logp - prox); 0 for a unit that has moved too far: f32 [S].

    A unit has moved too far if A pushes it further away from prox and its distance already exceeds the bound.
    `moved_share` is the share of such units. The distance between the probabilities p and q of the unit is |q
    - p| for `tv`. For `kl` it is the divergence between distributions with two outcomes, this unit or any
    other: p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    Source: Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning" (binary TV and KL). In
    the paper, the distance is measured from the behaviour policy. `correction: bypass` does the same here."""
    advantage, old, new = units.advantage, units["prox"], logp.detach()
    p, q = old.exp(), new.exp()
    far = (q - p).abs() if divergence == "tv" else p * (old - new) + (1 - p) * (log_rest(p) - log_rest(q))
    moved = ((advantage > 0) & (q > p) & (far > bound_high)) | ((advantage < 0) & (q < p) & (far > bound_low))
    loss = -advantage * ratio_of(logp - old)
    return loss.masked_fill(moved, 0.0), {"moved_share": moved}


def log_rest(p: Tensor) -> Tensor:
    """Return log(1 - p). The value 1 - p is clamped to at least 1e-8, because p may be rounded to 1."""
    return (1 - p).clamp(min=1e-8).log()


@loss(columns=RATIO, statistic=log_ratio)
def kimi(logp: Tensor, units: UnitTable, *, tau: NotNegative = 0.1) -> Tensor:
    """Return -A logp + τ/2 D (logp - prox): f32 [S]. The second term has the gradient of τ/2 D².

    D = Σ over the episode's units of logp - prox. Summed over an episode, the loss is -A Σ logp + τ/2 D².
    Source: Kimi team 2025, "Kimi k1.5", eq. 3: the gradient of a surrogate loss that squares the log-ratio of
    the whole answer."""
    ratio = (units["episode_mean"] * units["episode_units"]).detach()
    d = logp - units["prox"]
    return -units.advantage * logp + tau * ratio * (d - d.detach() / 2)


@loss(columns=RATIO)
def kimi_token(logp: Tensor, units: UnitTable, *, tau: NotNegative = 0.1) -> Tensor:
    """Return -A logp + τ/2 (logp - prox)²: f32 [S].

    Each unit has a penalty of its own. If all units move in the same direction, the penalty of `kimi` grows
    with the square of the answer's length, but this penalty grows only in proportion to the length. Source:
    as `kimi`, but with the log-ratio of each token squared instead of the answer's."""
    return -units.advantage * logp + tau / 2 * (logp - units["prox"]).square()


@loss(
    columns=("advantage",),
    figures=("tapered_share",),
    corrects=True,
    statistic=lambda logp, units, **_: logp - units.behaviour,
)
def topr(logp: Tensor, units: UnitTable, *, level: Literal["sequence", "token"] = "sequence") -> WithFigures:
    """Return -A logp if A >= 0, and -sg(min(ρ, 1)) A logp otherwise: f32 [S].

    sg stops the gradient. ρ = exp(Σ over the episode's units of logp - beh), which is near 0 for long
    answers. With `level: token`, ρ is the ratio of each unit alone. `tapered_share` counts the units with A <
    0 and ρ < 1. Source: Le Roux et al. 2025, "Tapered off-policy REINFORCE", sec. 3."""
    of_unit = logp - units.behaviour
    log_rho = units["episode_mean"] * units["episode_units"] if level == "sequence" else of_unit
    rho = ratio_of(log_rho.detach())
    worse = units.advantage < 0
    taper = rho.clamp(max=1).where(worse, rho.new_ones(()))
    return -taper * units.advantage * logp, {"tapered_share": worse & (rho < 1)}


@loss(columns=("advantage",))
def reinforce(logp: Tensor, units: UnitTable) -> Tensor:
    """Return -A logp: f32 [S]. Source: Williams 1992, "Simple statistical gradient-following algorithms"."""
    return -units.advantage * logp
