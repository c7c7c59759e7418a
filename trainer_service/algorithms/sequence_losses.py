"""Losses of whole sequences for supervised, preference and reward-model training.

A loss reads one number s for each of N sequences: the sum of the log-probs of its units, or the score that a
reward model gives it. The loss function returns one value for each of n examples, and the loss of the step is
their mean. An example is either one sequence, or a pair of consecutive sequences, the chosen one before the
rejected one.

The `reward` that a loss defines is the number by which held-out sequences are ranked. Notation: π(y) is s,
ref(y) is s under the reference, |y| is the number of units, and σ is the logistic function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The N sequences of a step or of the held-out file, all on one device."""

    s: Tensor
    """f64 [N]: sum of log-probs, or score of a reward model."""
    ref: Tensor
    """f64 [N]: `s` under the reference; 0 without a reference."""
    length: Tensor
    """i64 [N]: number of units, at least 1."""
    value: Tensor
    """f64 [n]: margins, labels or scores of the examples."""
    zero: float = 0.0
    """The baseline z₀ of the loss `kto`."""

    @property
    def gain(self) -> Tensor:
        """f64 [N]: log π(y) / ref(y)."""
        return self.s - self.ref


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values [2n] into the values of the chosen sequences [n] and of the rejected ones [n]."""
    return values[0::2], values[1::2]


def sft_token(given: Sequences) -> Tensor:
    """Return -n π(y) / Σ |y|. The mean over examples is the cross-entropy per token."""
    return -given.s * len(given.s) / given.length.sum()


def sft_sequence(given: Sequences) -> Tensor:
    """Return -π(y) / |y|, the cross-entropy per token of each answer."""
    return -given.s / given.length


def dpo(given: Sequences, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return -(1 - ε) log σ(β d) - ε log σ(-β d) with d = gain(chosen) - gain(rejected).

    Source: Rafailov et al. 2023, "Direct Preference Optimization", eq. 7; ε from Mitchell 2023, "A note on
    DPO with noisy preferences", eq. 3."""
    chosen, rejected = pairs(given.gain)
    logits = beta * (chosen - rejected)
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def ipo(given: Sequences, *, beta: float) -> Tensor:
    """Return (h - 1 / 2β)², where h is the difference of the gains per unit.

    Source: Azar et al. 2023, "A general theoretical paradigm to understand learning from human preferences",
    eq. 17 with τ = β. The gains are means over units, as in the authors' code and in TRL."""
    chosen, rejected = pairs(given.gain / given.length)
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge(given: Sequences, *, beta: float) -> Tensor:
    """Return max(0, 1 - β d), with d as in `dpo`.

    Source: Zhao et al. 2023, "SLiC-HF", normalised by the reference as in Liu et al. 2023, "RSO", eq. 10."""
    chosen, rejected = pairs(given.gain)
    return (1 - beta * (chosen - rejected)).relu()


def orpo(given: Sequences, *, beta: float) -> Tensor:
    """Return -p(chosen) - β log σ(log odds(chosen) - log odds(rejected)).

    p = π(y) / |y| and odds = eᵖ / (1 - eᵖ). The loss needs no reference model. Source: Hong et al. 2024,
    "ORPO", eq. 6 and 7 (β is its λ)."""
    p = given.s / given.length
    chosen, rejected = pairs(p - log_one_less(p))
    return -pairs(p)[0] - beta * F.logsigmoid(chosen - rejected)


def log_one_less(p: Tensor) -> Tensor:
    """Return log(1 - eᵖ) for p <= 0, accurate for p near 0 and for p far below 0. p is clamped to at most
    -1e-12."""
    p = p.clamp(max=-1e-12)
    near = p > -0.6931
    return torch.where(
        near,
        (-torch.expm1(p.where(near, -1.0))).log(),
        torch.log1p(-p.where(~near, -1.0).exp()),
    )


def kto(given: Sequences, *, beta: float, desirable: float = 1.0, undesirable: float = 1.0) -> Tensor:
    """Return λ_D (1 - σ(β (gain - z₀))) for desirable answers and λ_U (1 - σ(β (z₀ - gain))) for others.

    z₀ = max(0, mean gain of the batch's prompts, each with the answer to another prompt). It has no gradient.
    Source: Ethayarajh et al. 2024, "KTO", eq. 8."""
    distance, good = beta * (given.gain - given.zero), given.value > 0.5
    return torch.where(good, desirable * (1 - distance.sigmoid()), undesirable * (1 - (-distance).sigmoid()))


def bradley_terry(given: Sequences) -> Tensor:
    """Return -log σ(s(chosen) - s(rejected) - margin).

    Source: Ouyang et al. 2022, "InstructGPT", eq. 1; margin from Touvron et al. 2023, "Llama 2", eq. 2."""
    chosen, rejected = pairs(given.s)
    return -F.logsigmoid(chosen - rejected - given.value)


def regression(given: Sequences) -> Tensor:
    """Return (s - score)²."""
    return (given.s - given.value).square()


@dataclass(frozen=True)
class SequenceLoss:
    """A loss and its requirements. A call with `Sequences` returns f64 [n]."""

    function: Callable[..., Tensor]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    column: str = "logp"
    """Column of the back end whose sum is `s`."""
    paired: bool = True
    referred: bool = False
    """Whether the loss needs a reference model."""
    zeroed: bool = False
    """Whether the loss needs z₀, which is computed from answers that follow other prompts (`kto`)."""
    per_unit: bool = False
    """Whether the reward of a sequence is a mean over its units."""

    def __call__(self, given: Sequences) -> Tensor:
        return self.function(given, **self.arguments)

    def reward(self, given: Sequences) -> Tensor:
        """Return the reward of each sequence: f64 [N]."""
        total = given.gain if self.referred else given.s
        return total / given.length if self.per_unit else total

    def right(self, given: Sequences) -> Tensor:
        """Return f64 [m]: 1 for each correctly ordered comparison, 0 for a wrong one, ½ for a tie.

        For a loss of pairs, a comparison is between the chosen and the rejected sequence. With labels or
        scores, each example is compared with up to 16 others."""
        reward = self.reward(given)
        if self.paired:
            chosen, rejected = pairs(reward)
            return (1 + (chosen - rejected).sign()) / 2
        shifts = range(1, min(17, len(reward)))
        rewards, values = (
            torch.cat([each - each.roll(shift) for shift in shifts] or [each[:0]])
            for each in (reward, given.value)
        )
        return (1 + (rewards * values)[values != 0].sign()) / 2

    def margin(self, given: Sequences) -> float | None:
        """Return the mean reward of preferred sequences minus the mean reward of the others. The result is
        None if either set is empty, or if the loss has no preferred sequences."""
        reward = self.reward(given)
        if self.paired:
            chosen, rejected = pairs(reward)
        elif self.zeroed:
            good = given.value > 0.5
            chosen, rejected = reward[good], reward[~good]
        else:
            return None
        return float(chosen.mean() - rejected.mean()) if len(chosen) and len(rejected) else None


LOSSES: Mapping[str, SequenceLoss] = {
    "token": SequenceLoss(sft_token, paired=False),
    "sequence": SequenceLoss(sft_sequence, paired=False),
    "dpo": SequenceLoss(dpo, referred=True),
    "ipo": SequenceLoss(ipo, referred=True, per_unit=True),
    "hinge": SequenceLoss(hinge, referred=True),
    "orpo": SequenceLoss(orpo, per_unit=True),
    "kto": SequenceLoss(kto, referred=True, zeroed=True, paired=False),
    "bradley_terry": SequenceLoss(bradley_terry, column="score"),
    "regression": SequenceLoss(regression, column="score", paired=False),
}
