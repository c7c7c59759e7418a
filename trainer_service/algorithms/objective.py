"""The objective of a job: the parts that its section names, put together.

Formulas: docs/objectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal_async.config.job import JobConfig, ObjectiveSection
from areal_async.config.parts import named_parts
from areal_async.registry import ADVANTAGES, CORRECTIONS, LOSSES, NORMALISERS
from trainer_service.algorithms.built_in import behaviour_weight
from trainer_service.algorithms.parts import COLUMNS, Advantage, Correction, Loss, ObjectivePart, UnitPart
from trainer_service.data.microbatch import UnitTable
from trainer_service.errors import ObjectiveError

P = TypeVar("P", bound=ObjectivePart)


@dataclass(frozen=True)
class UnitTerms:
    """What became of each unit; all [S], and detached but for `loss`."""

    loss: Tensor
    """f32: weighted, not yet normalised; 0 where masked."""
    weight: Tensor
    """f32: exp(prox - beh) before the correction; 1 where masked."""
    shares: Mapping[str, Tensor]
    """bool: by name, the units that the loss or the correction counts."""


class Objective:
    """The composition that a section names. Raises `PartError` for a part that cannot be loaded and
    `ObjectiveError` for parts that contradict each other, or `job` where one is given."""

    def __init__(self, section: ObjectiveSection, job: JobConfig | None = None) -> None:
        self._advantage = _part(Advantage, ADVANTAGES.find(section.advantage))
        self._loss = _part(Loss, LOSSES.find(section.loss))
        self._correction = _part(Correction, CORRECTIONS.find(section.correction))
        self._normaliser: Callable[..., Tensor] = NORMALISERS.find(section.normaliser)
        self._advantage_args, self._normaliser_args = section.advantage_args, section.normaliser_args
        self._loss_args, self._correction_args = section.loss_args, section.correction_args
        for name, part in ((section.loss, self._loss), (section.correction, self._correction)):
            if missing := set(part.columns) - set(COLUMNS):
                raise ObjectiveError(
                    f"trainer.objective: {name} needs the columns {sorted(missing)}, and there are none but "
                    f"{', '.join(COLUMNS)}."
                )
        if self._loss.supervised and self._correction.corrects:
            raise ObjectiveError(
                f"trainer.objective: loss {section.loss} has no behaviour policy to correct for, so "
                f"correction {section.correction} would silently do nothing; set correction: none."
            )
        if job is not None:
            self._check(job)
        self.supervised = self._loss.supervised
        """Whether there is neither a behaviour policy nor an advantage."""
        self.shares = (*self._loss.shares, *self._correction.shares)
        """Names of the shares that every micro-batch has."""
        self.wants_prox = section.prox == "recompute" and "prox" in {
            *self._loss.columns,
            *self._correction.columns,
        }
        """Whether a forward pass with the weights at the start of the step is needed."""

    def _check(self, job: JobConfig) -> None:
        """Ask the parts what they declare: the job file's check does not import those of a user's file."""
        for part in named_parts(job):
            if part.field.startswith("trainer.objective"):
                for mistake in part.mistakes(job, run_own=True):
                    raise ObjectiveError(f"{mistake.field}: {mistake.problem}. {mistake.fix}.")

    def advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """float [E], i64 [E] -> f32 [E]; over whole groups."""
        found: Tensor = self._advantage(rewards, groups, **self._advantage_args)
        return found

    def coefficients(self, units: UnitTable, units_of_episode: Tensor) -> Tensor:
        """f32 [S]: see `built_in`."""
        return self._normaliser(units.mask, units.episode, units_of_episode, **self._normaliser_args)

    def terms(self, logp: Tensor, prox: Tensor | None, units: UnitTable) -> UnitTerms:
        """logp f32 [S] with gradient; prox f32 [S], or None to reuse `logp` (detached)."""
        mask = units.mask
        logp = masked(logp.float(), mask)
        prox = logp.detach() if prox is None else masked(prox.detach().float(), mask)
        behaviour, advantage = masked(units.behaviour, mask), masked(units.advantage, mask)
        units = replace(units, behaviour=behaviour, advantage=advantage, computed={"prox": prox})
        loss, shares = _with_shares(self._loss, logp, units, self._loss_args)
        if self.supervised:
            return UnitTerms(loss, torch.ones_like(behaviour), shares)
        weight = behaviour_weight(prox, behaviour)
        effective, more = _with_shares(self._correction, weight, units, self._correction_args)
        return UnitTerms(loss * effective.detach(), weight, shares | more)


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where the mask is off. Done before any arithmetic, so that a NaN or an infinity of a
    masked unit reaches neither a sum nor a gradient."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _part(kind: type[P], found: Any) -> P:
    """What was found as a part of its kind: a plain function declares nothing."""
    return found if isinstance(found, kind) else kind(found)


def _with_shares(
    part: UnitPart, values: Tensor, units: UnitTable, arguments: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the part returns, with exactly the shares that it declares."""
    result = part(values, units, **arguments)
    found, shares = result if isinstance(result, tuple) else (result, {})
    if set(shares) != set(part.shares):
        raise ObjectiveError(f"a part declares the shares {part.shares}, but returns {tuple(shares)}.")
    return found, shares
