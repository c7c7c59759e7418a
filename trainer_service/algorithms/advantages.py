"""Advantages of samples, from the rewards of the samples of one group.

`trainer.objective.group_by` defines what a sample is: an episode of a task, one agent's part of an episode,
or the part of an episode from some turn on. R is the reward of a sample, and n is the size of its group.
mean_g and std_g (with n - 1) are taken over the group. A group of one, and a group with equal rewards, get
exactly 0, before any whitening over the batch. `parts.py` describes how to write an advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_service.algorithms.parts import Positive, advantage
from trainer_service.errors import ObjectiveError

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.algorithms.credit import Samples


@advantage(needs_group=2)
def grpo(samples: Samples, *, eps: Positive = 1e-6) -> Tensor:
    """Return A = (R - mean_g) / (std_g + eps): f64 [N]. Source: Shao et al. 2024, "DeepSeekMath", sec. 4.1.2
    (outcome reward)."""
    return samples.over_std(samples.reward, eps)


@advantage(needs_group=2)
def dr_grpo(samples: Samples) -> Tensor:
    """Return A = R - mean_g: f64 [N].

    A is not divided by the std, because that would give more weight to tasks that are nearly always or nearly
    never solved. Use this advantage with the `constant` normaliser. With `group_by: task_turn` this is the
    advantage of MAGRPO. Source: Liu et al. 2025, "Understanding R1-Zero-like training", "Dr. GRPO"; Liu et
    al. 2025, "LLM collaboration with multi-agent reinforcement learning" (MAGRPO)."""
    return samples.centred(samples.reward)


@advantage(needs_group=2)
def rloo(samples: Samples) -> Tensor:
    """Return A = n / (n - 1) · (R - mean_g), which equals R minus the mean of the others: f64 [N].

    Source: Ahmadian et al. 2024, "Back to basics", RLOO."""
    n = samples.size
    return n / (n - 1).clamp(min=1) * samples.centred(samples.reward)


@advantage(needs_group=2)
def reinforce_pp_baseline(samples: Samples) -> Tensor:
    """Return A = R - mean_g, whitened over all units of the batch: f64 [N]. Source: Hu et al. 2025,
    "REINFORCE++" (w/ baseline)."""
    return samples.whitened(samples.centred(samples.reward), samples.length.double())


@advantage(needs_group=2, needs_greedy=True)
def remax(samples: Samples) -> Tensor:
    """Return A = R minus the R of the greedy answer to the same task: f64 [N]. A group without a greedy
    answer gets 0. Source: Li et al. 2023, "ReMax"."""
    greedy = samples.baseline.double()
    found = samples.reward - samples.sum(samples.reward * greedy) / samples.sum(greedy).clamp(min=1)
    return found.masked_fill(samples.baseline | (samples.sum(greedy) == 0), 0.0)


@advantage(needs_group=2)
def opo(samples: Samples) -> Tensor:
    """Return A = R - Σ_g l R / Σ_g l, where l is the number of a sample's trained units: f64 [N].

    This baseline minimizes the variance of the gradient if the squared norm of a sample's gradient grows in
    proportion to its length. Source: Hao et al. 2025, "On-policy RL with optimal reward baseline"."""
    return samples.centred(samples.reward, samples.length.double())


@advantage(needs_group=2)
def pass_at_k(samples: Samples) -> Tensor:
    """Return A = r_max - r_second for the best sample of the group and 0 for the others: f64 [N].

    A sample's advantage is its contribution to the best reward of the group: the largest reward of all
    samples minus the largest reward of the others. The objective is then pass@k, where k is the size of the
    group. If two samples are equally good, neither contributes anything. Source: Tang et al. 2025,
    "Optimizing language models for inference time objectives using reinforcement learning" (leave-one-out; k
    samples per task)."""
    return (samples.reward - samples.others_best(samples.reward)).clamp(min=0.0)


@advantage(needs_group=2, unpenalised=True)
def gdpo(samples: Samples, *, weights: dict[str, float] | None = None, eps: Positive = 1e-6) -> Tensor:
    """Return A = Σ_c w_c · (R_c - mean_g) / (std_g + eps), whitened over the samples of the batch: f64 [N].

    The sum runs over the components c of the reward. `weights` selects components and gives their weights
    w_c; by default every component has weight 1. For each component, only samples that have it are compared.
    Source: Liu et al. 2026, "GDPO". Raises `ObjectiveError` if no reward of the step has any of the
    components."""
    chosen = weights or dict.fromkeys(samples.components, 1.0)
    found = {name: values for name, values in samples.components.items() if name in chosen}
    if not found:
        raise ObjectiveError(
            f"the advantage gdpo compares components of the reward ({', '.join(chosen) or 'all'}), and those "
            f"of this step have none of that name ({', '.join(samples.components) or 'none at all'}): let "
            "the reward return some, or use grpo."
        )
    total = samples.reward * 0.0
    for name, values in found.items():
        has = ~values.isnan()
        part = samples.only(has, values)
        total[has] += chosen[name] * part.over_std(part.reward, eps)
    return samples.whitened(total, total * 0.0 + 1.0)


@advantage()
def reward(samples: Samples, *, baseline: float = 0.0) -> Tensor:
    """Return A = R - `baseline`: f64 [N]. Use it for REINFORCE, and for losses that depend on the sign of A,
    such as `raft_pp` and `topr`."""
    return samples.reward - baseline
