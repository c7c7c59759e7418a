"""Advantages of units and segments from the later rewards in their sequence.

A sequence is everything that one agent did in one episode, in the order of time. Prompts, tool answers and
masked units are skipped, so the unit t + 1 is the next trained unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trainer_service.algorithms.parts import Fraction, NotNegative, Positive, advantage

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.algorithms.table import SegmentTable, UnitTable


@advantage(of="unit", columns=("value", "truncated"))
def gae(
    units: UnitTable, *, gamma: Fraction = 1.0, lam: Fraction = 0.95, whiten: bool = True
) -> dict[str, Tensor]:
    """Return `advantage` A_t = δ_t + γλ A_{t+1} and `return` A + V, f64 [U] each.

    δ_t = r_t + γ V_{t+1} - V_t. After the last unit V is 0. But if a limit of the job cut the episode off, V
    after the last unit is the last unit's own value, because this is the best available estimate. `whiten`
    gives A mean 0 and std 1 over all units of the batch. Source: Schulman et al. 2016, "High-dimensional
    continuous control using generalized advantage estimation", eq. 16."""
    order, value = units.in_time(), units["value"].double()
    after = order.following(value, value * units["truncated"])
    found = order.to_go(units["reward"] + gamma * after - value, gamma * lam)
    return {"advantage": units.whiten(found) if whiten else found, "return": found + value}


@advantage(of="unit")
def reinforce_pp(units: UnitTable, *, gamma: Fraction = 1.0) -> Tensor:
    """Return A_t = Σ_{k≥t} γ^{k-t} r_k, whitened over all units of the batch: f64 [U]. With `kl.place:
    reward`, the KL penalty is already subtracted from r. Source: Hu et al. 2025, "REINFORCE++"."""
    return units.whiten(units.in_time().to_go(units["reward"], gamma))


@advantage(of="segment", needs_group=2, columns=("anchor",))
def gigpo(
    segments: SegmentTable,
    *,
    omega: NotNegative = 1.0,
    gamma: Fraction = 0.95,
    norm: Literal["none", "std"] = "none",
    eps: Positive = 1e-6,
) -> Tensor:
    """Return A = A_episode + ω · A_step: f64 [G].

    A_episode is the agent's reward in the episode minus the mean of its group. A_step compares returns. A
    segment's return is Σ_k γ^k r_k over the segment and the agent's later segments. A_step is this return
    minus the mean return of segments that begin in the same state. Two segments begin in the same state if
    they have equal anchors, the same agent and the same task. A segment without an anchor, or with a unique
    one, gets A_episode. `norm: std` divides both terms by the standard deviation of the compared values.
    Source: Feng et al. 2025, "Group-in-group policy optimization for LLM agent training", sec. 4."""
    from trainer_service.algorithms.credit import Samples, samples_of_segments
    from trainer_service.algorithms.table import keys

    whole = samples_of_segments(segments, "task_agent")
    earned = segments.in_time().to_go(segments.reward, gamma)
    state = keys(segments.group, segments.agent, segments.anchor)
    steps = Samples(earned, state, segments.length, segments.anchor == 0)

    def compared(samples: Samples) -> Tensor:
        values = samples.reward
        return samples.over_std(values, eps) if norm == "std" else samples.centred(values)

    return compared(whole.samples)[whole.owner] + omega * compared(steps).masked_fill(steps.baseline, 0.0)


@advantage(of="segment", needs_group=2)
def marti(
    segments: SegmentTable,
    *,
    alpha: float = 0.5,
    mode: Literal["margin", "quality"] = "margin",
    history: Literal["all", "last"] = "all",
    eps: Positive = 1e-6,
) -> Tensor:
    """Return A = (R' - mean) / (std + eps) with R' = R + α Δ: f64 [G].

    Mean and std are over the same turn of the same agent in the group's episodes. R is the agent's reward in
    the turn. Q is the mean reward of its earlier turns. With `history: last`, Q is the reward of the previous
    turn. With `margin`, Δ is R - Q. With `quality`, for rewards from 0 to 1, Δ is Q R - (1 - Q)(1 - R). In
    the first turn Δ is 0. Source: Zhang et al. 2025, "MARTI", reward shaping, after Park et al. 2025,
    "MAPoRL"."""
    import torch

    from trainer_service.algorithms.credit import samples_of_segments
    from trainer_service.algorithms.table import InTime

    credit = samples_of_segments(segments, "task_agent_turn", turn_discount=0.0)
    samples, r = credit.samples, credit.samples.reward
    one, none = torch.ones_like(r), torch.zeros_like(r)
    assert samples.sequence is not None, "turns are of something"
    back = InTime.of(samples.sequence, torch.arange(len(r)).flip(0))
    if history == "last":
        earlier, count = back.following(r, none), back.following(one, none)
    else:
        earlier, count = back.to_go(r, 1.0) - r, back.to_go(one, 1.0) - 1
    q = earlier / count.clamp(min=1)
    delta = r - q if mode == "margin" else q * r - (1 - q) * (1 - r)
    return samples.over_std(r + alpha * delta * (count > 0), eps)[credit.owner]
