"""advantage × loss × correction × normaliser, chosen by name.

Each part is a pure function; this module looks them up, refuses the combinations that are wrong and says
why, and puts them together. Formulas: docs/objectives.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_async.config.trainer import ObjectiveSection
from trainer_service.algorithms import advantages, corrections, losses, normalisers
from trainer_service.data.units import UnitTable, masked
from trainer_service.errors import ObjectiveError

ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": advantages.grpo}
NORMALISERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": normalisers.token,
    "sequence": normalisers.sequence,
}


@dataclass(frozen=True)
class UnitTerms:
    """What became of each unit; all [S], and detached but for `loss`."""

    loss: Tensor
    """f32: weighted, not yet normalised; 0 where masked."""
    weight: Tensor
    """f32: exp(prox - beh) before truncation; 1 where masked."""
    truncated: Tensor
    """bool: the correction's cap decided."""
    clipped_low: Tensor
    clipped_high: Tensor


@dataclass(frozen=True)
class Objective:
    """The composition that a section names. Raises `ObjectiveError` for parts that contradict each other;
    what depends on the rest of the job (minibatches, staleness) is checked when the job file is read."""

    section: ObjectiveSection

    def __post_init__(self) -> None:
        if self.section.loss == "sft" and self.section.correction != "none":
            raise ObjectiveError(
                f"trainer.objective: loss sft has no behaviour policy to correct for, so correction "
                f"{self.section.correction} would silently do nothing; set correction: none."
            )

    @property
    def wants_prox(self) -> bool:
        """Whether a forward pass with the weights at the start of the step is needed."""
        return self.section.loss == "ppo" and self.section.prox == "recompute"

    def advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """float [E], i64 [E] -> f32 [E]; over whole groups."""
        return ADVANTAGES[self.section.advantage](rewards, groups)

    def coefficients(self, units: UnitTable, units_of_episode: Tensor) -> Tensor:
        """f32 [S]: see `normalisers`."""
        return NORMALISERS[self.section.normaliser](units.mask, units.episode, units_of_episode)

    def terms(self, logp: Tensor, prox: Tensor | None, units: UnitTable) -> UnitTerms:
        """logp f32 [S] with gradient; prox f32 [S], or None to reuse `logp` (detached)."""
        mask = units.mask
        logp = masked(logp.float(), mask)
        prox = logp.detach() if prox is None else masked(prox.detach().float(), mask)
        behaviour = masked(units.behaviour, mask)
        advantage = masked(units.advantage, mask)
        never = torch.zeros_like(mask)
        if self.section.loss == "sft":
            return UnitTerms(losses.sft(logp), torch.ones_like(behaviour), never, never, never)
        weight = corrections.behaviour_weight(prox, behaviour)
        cap = self.section.correction_cap
        decoupled = self.section.correction == "decoupled"
        effective = corrections.decoupled(weight, cap) if decoupled else corrections.none(weight)
        loss, low, high = losses.ppo(logp, prox, advantage, self.section.clip_low, self.section.clip_high)
        return UnitTerms(loss * effective, weight, (weight > cap) & mask if decoupled else never, low, high)
