"""Advantages from the log-probs that additional models give to the sampled units. The models are a reference,
a teacher or a process reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainer_service.algorithms.parts import Fraction, Positive, advantage

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.algorithms.table import UnitTable


@advantage(of="unit", needs_group=2, unpenalised=True, losses=("reinforce",), columns=("prox", "ref"))
def dpo(
    units: UnitTable,
    *,
    beta: Positive = 0.1,
    loss: Literal["dpo", "ipo", "hinge"] = "dpo",
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
) -> Tensor:
    """Return -E · dL/ds of each unit's episode: f64 [U].

    L is the mean of a loss of `sequence_losses.py` over pairs. A pair consists of the episodes with the
    highest and the lowest reward of a group. A group with equal rewards has no pair. An episode's sum of
    log-probs is s, and E is the number of episodes with trained units. Use the loss `reinforce` and the
    normaliser `constant` of length 1. The gradient of a step's first update is then the gradient of L, by the
    chain rule. Source: Guo et al. 2024, "Direct language model alignment from online AI feedback"; pairs as
    in Xu et al. 2023, "Some things are more cringe than others"."""
    import torch

    from trainer_service.algorithms import sequence_losses
    from trainer_service.transfer import moved

    s, ref, length = units.read_by_episode(units["prox"], units["ref"], torch.ones_like(units.behaviour))
    pairs = pairs_of(units.episodes.reward, units.episodes.group, (length > 0) & ~units.episodes.baseline)
    if not len(pairs):
        return torch.zeros_like(units.behaviour, dtype=torch.float64)
    chosen = s[pairs.flatten()].requires_grad_()
    given = sequence_losses.Sequences(
        chosen, ref[pairs.flatten()], length[pairs.flatten()], torch.zeros(len(pairs), dtype=torch.float64)
    )
    more = {"label_smoothing": label_smoothing} if loss == "dpo" else {}
    value = getattr(sequence_losses, loss)(given, beta=beta, **more).mean()
    (slopes,) = torch.autograd.grad(value, chosen)
    found = torch.zeros_like(s).index_copy(0, pairs.flatten(), -slopes * (length > 0).sum())
    return moved(found, units.mask.device)[units.episode]


def pairs_of(reward: Tensor, group: Tensor, keep: Tensor) -> Tensor:
    """Return i64 [P, 2]: the best and the worst kept episode of each group. Ties take the first. A group
    whose kept episodes have equal rewards has no pair."""
    import torch

    found = []
    for label in group.unique().tolist():
        members = ((group == label) & keep).nonzero()[:, 0]
        if len(members) and bool(reward[members].max() > reward[members].min()):
            found.append([members[reward[members].argmax()], members[reward[members].argmin()]])
    return torch.tensor(found, dtype=torch.int64).view(-1, 2)


@advantage(of="unit", unpenalised=True, columns=("prox", "teacher"))
def distill(units: UnitTable, *, gamma: Fraction = 0.0) -> Tensor:
    """Return A_t = Σ_{k≥t} γ^{k-t} (teacher - prox): f64 [U].

    This is an estimate of the negative reverse KL divergence from a teacher. With γ = 0 each unit has only
    its own term. Rewards have no effect. Source: Agarwal et al. 2024, "On-policy distillation of language
    models" (GKD), with the gradient of Lu 2025, "On-policy distillation"."""
    return units.in_time().to_go(units["teacher"].double() - units["prox"].double(), gamma)


@advantage(of="unit", needs_group=2, unpenalised=True, columns=("process", "ref"))
def prime(units: UnitTable, *, gamma: Fraction = 1.0, beta: Positive = 0.05, whiten: bool = True) -> Tensor:
    """Return A_t = Σ_{k≥t} γ^{k-t} (r_k - mean of the others' r̄) + R - mean of the others' R: f64 [U].

    r = β (process - ref), and r̄ is an episode's mean of r. The others are the other episodes of its group;
    without others the advantage is 0. The process reward model is trained together with the policy, to
    predict whether episodes get a reward (`process_slopes`). Source: Cui et al. 2025, "Process reinforcement
    through implicit rewards", eq. 5."""
    import torch

    from trainer_service.algorithms.credit import Samples
    from trainer_service.transfer import on_device

    episodes = units.episodes
    r = beta * (units["process"].double() - units["ref"].double())
    total, length = units.read_by_episode(r, torch.ones_like(r))
    counts = (length > 0) & ~episodes.baseline
    samples = Samples(episodes.reward, episodes.group, length.long(), episodes.baseline)
    n = samples.sum(counts.double())

    def of_others(values: Tensor) -> Tensor:
        own = torch.where(counts, values, 0.0)
        return (samples.sum(own) - own) / (n - 1).clamp(min=1)

    outcome = episodes.reward - of_others(episodes.reward)
    columns = {
        "baseline": of_others(total / length.clamp(min=1)),
        "outcome": outcome,
        "some": counts & (n > 1),
    }
    there = on_device({name: each.numpy() for name, each in columns.items()}, units.mask.device)
    baseline, outcome, some = (each[units.episode] for each in there.values())
    found = units.in_time().to_go(r - baseline, gamma) + outcome
    found = torch.where(some, found, torch.zeros_like(found))
    return units.whiten(found) if whiten else found


def process_slopes(units: UnitTable, beta: float, balanced: bool = False) -> tuple[Tensor, dict[str, float]]:
    """Return f64 [U], the derivative dL/d process of each unit, and figures of the process reward model.

    L = -mean_e [w R log σ(β s) + v (1 - R) log σ(-β s)]. s is an episode's sum of process - ref. R is its
    reward, clamped to [0, 1], and w = v = 1. Source: Yuan et al. 2024, "Free process rewards without process
    labels", eq. 5. With `balanced`, w = 1/(2p) and v = 1/(2(1-p)), where p is the mean of R over n episodes,
    clamped to [1/n, 1 - 1/n].

    The figures are `loss`, `accuracy` and `auc`. `auc` is the share of pairs of a right and a wrong episode
    in which the right episode has the larger s; ties count half. A random order has 0.5, whatever the share
    of right episodes. If all episodes are right, or none is, there is no `auc`."""
    import torch
    import torch.nn.functional as F

    from trainer_service.transfer import moved

    gains = units["process"].double() - units["ref"].double()
    total, length = units.read_by_episode(gains, torch.ones_like(gains))
    kept, s = (length > 0) & ~units.episodes.baseline, beta * total
    right, n = units.episodes.reward.clamp(0, 1), kept.sum().clamp(min=1)
    wrong = 1 - right
    share = torch.tensor(0.5)
    if balanced and n > 1:
        share = (right[kept].sum() / n).clamp(1 / n, 1 - 1 / n)
    up, down = right / (2 * share), wrong / (2 * (1 - share))
    loss = -(up * F.logsigmoid(s) + down * F.logsigmoid(-s))
    slopes = torch.where(kept, beta * (down * s.sigmoid() - up * (-s).sigmoid()) / n, 0.0)
    figures = {
        "loss": float(loss[kept].sum() / n),
        "accuracy": float(((s > 0) == (right > 0.5))[kept].double().sum() / n),
    }
    gap = s[kept & (right > 0.5)][:, None] - s[kept & (right <= 0.5)]
    if gap.numel():
        figures["auc"] = float((gap.sign() + 1).mean() / 2)
    return moved(slopes, units.mask.device)[units.episode], figures
