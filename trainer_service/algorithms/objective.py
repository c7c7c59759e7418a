"""The objective of a job: the combination of the parts in its section.

In a step, `Objective.fill` completes the unit table. It subtracts the penalty from the rewards, and adds
advantages and the weights of a correction that compares units. `Objective.terms` then computes the loss of
one micro-batch's units. Formulas: docs/objectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from areal_async.config.job import CriticSection, JobConfig, ProcessRewardSection
from areal_async.config.objective import ObjectiveSection
from areal_async.config.parts import named_parts
from areal_async.config.registry import ADVANTAGES, CORRECTIONS, LOSSES, NORMALISERS
from trainer_service.algorithms.corrections import behaviour_weight
from trainer_service.algorithms.credit import samples_of, unit_rewards, with_penalty
from trainer_service.algorithms.kl import KlPenalty
from trainer_service.algorithms.normalisers import Totals
from trainer_service.algorithms.parts import (
    COLUMNS,
    SEGMENT_COLUMNS,
    Advantage,
    Correction,
    Loss,
    ObjectivePart,
    of_shape,
    with_figures,
)
from trainer_service.algorithms.table import UnitTable, masked
from trainer_service.errors import ObjectiveError
from trainer_service.transfer import moved

P = TypeVar("P", bound=ObjectivePart)
OF_MODELS = ("ref", "value", "teacher", "process", "entropy")
"""Columns of the table that need a forward pass, besides `prox`."""


@dataclass(frozen=True)
class UnitTerms:
    """Terms of the objective, each with one value per unit [S]. All except `loss` are detached."""

    loss: Tensor
    """f32: weighted but not yet normalised; 0 where masked."""
    weight: Tensor
    """f32: exp(prox - beh) before the correction; 1 where masked."""
    figures: Mapping[str, Tensor] = field(default_factory=dict)
    """Figures of the parts by name; bool or f32."""


class Objective:
    """Combination of the parts in an objective section. Raises `PartError` if a part cannot be loaded. Raises
    `ObjectiveError` if parts contradict each other or the `job`."""

    def __init__(
        self, section: ObjectiveSection, job: JobConfig | None = None, *, minibatches: int = 1
    ) -> None:
        self._section = section
        self._advantage = _part(Advantage, ADVANTAGES.find(section.advantage))
        self._loss = _part(Loss, LOSSES.find(section.loss))
        self._correction = _part(Correction, CORRECTIONS.find(section.correction))
        self._normaliser: Callable[..., Tensor] = NORMALISERS.find(section.normaliser)
        self.kl = KlPenalty(section.kl)
        self.critic = job.trainer.critic if job is not None else CriticSection()
        process = job.trainer.process_reward if job is not None else ProcessRewardSection()
        self.process = process.beta, process.balanced
        self.on_non_finite = section.on_non_finite
        self.on_nothing_to_learn = section.on_nothing_to_learn
        if job is not None:
            self._check(job)
        self.prox = self._loss.proximal(
            section,
            self._advantage,
            self._correction,
            minibatches=minibatches,
            max_staleness=job.buffer.max_staleness if job is not None else 0,
        )
        """Source of the proximal log-probs: `recompute`, `reuse`, `loglinear`, or `behaviour` (the log-probs
        of the behaviour policy)."""
        self._declare()
        self._check_parts()

    def _declare(self) -> None:
        """Derive from the parts which columns, models and statistics the trainer must compute."""
        section, advantage, loss, correction = self._section, self._advantage, self._loss, self._correction
        penalised = self.kl.coefficient > 0
        self._penalised = penalised and self.kl.place == "reward"
        """Whether a KL penalty is subtracted from the rewards. The penalty is computed with the policy at the
        start of the step."""
        self._of_units = {*loss.columns, *correction.columns}
        """Columns that the loss and the correction read."""
        declared = self._of_units | {*advantage.columns}
        more = {"ref": penalised, "prox": self.prox == "recompute"}
        self.columns = declared & {*OF_MODELS} | {name for name, wanted in more.items() if wanted}
        """Computed columns that must be in the table before `fill`."""
        self.with_segments = (
            advantage.of != "sample" or section.group_by != "task" or bool(declared & {*SEGMENT_COLUMNS})
        )
        """Whether the table must include segments, agents and turns."""
        self.whole_episodes = advantage.of == "unit"
        """Whether all units of an episode must be on one rank."""
        self.needs_greedy = advantage.needs_greedy
        """Whether each group needs a greedy answer as its baseline."""
        self.over_episodes = loss.statistic is not None and section.loss_args.get("level") != "token"
        """Whether the loss reads a statistic of whole episodes (`Loss.statistic`). With `level: token` it
        does not."""
        self.trains_critic = "value" in self.columns
        self.has_own_critic = self.trains_critic and self.critic.kind == "model"
        """Whether a separate model computes the values."""
        self.critic_is_head = self.trains_critic and self.critic.kind == "head"
        """Whether an additional output of the policy computes the values."""
        self.trains_process = "process" in self.columns
        """Whether a process reward model is trained with the policy."""
        trained = {"logp": True, "entropy": section.entropy > 0, "value": self.critic_is_head}
        self.trained_columns = tuple(name for name, wanted in trained.items() if wanted)
        """Columns with gradient that `terms` needs."""
        figures = {
            "kl_ref": penalised,
            "kl_teacher": "teacher" in advantage.columns,
            "entropy": section.entropy > 0,
        }
        own_figures = (*loss.figures, *correction.figures)
        self.figures = (*own_figures, *(name for name, wanted in figures.items() if wanted))
        """Names of the figures of every micro-batch."""
        self._over_step = correction.over_step(section.correction_args)
        in_loss = penalised and self.kl.place == "loss"
        own = self.trains_critic or self.trains_process or "advantage" not in loss.columns
        self.learns_without_advantage = section.entropy > 0 or in_loss or own
        """Whether a batch has a gradient even if all its advantages are 0."""

    def _check(self, job: JobConfig) -> None:
        """Raise `ObjectiveError` if a part reports a mistake in the job. Parts from a user's file report
        their mistakes only here, because the check of a job file does not import them."""
        for part in named_parts(job):
            if part.field.startswith("trainer.objective"):
                for mistake in part.mistakes(job, run_own=True):
                    raise ObjectiveError(f"{mistake.field}: {mistake.problem}. {mistake.fix}.")

    def _check_parts(self) -> None:
        section = self._section
        named = ((section.advantage, self._advantage), (section.loss, self._loss))
        for name, part in (*named, (section.correction, self._correction)):
            if missing := set(part.columns) - set(COLUMNS):
                raise ObjectiveError(
                    f"trainer.objective: {name} needs the columns {sorted(missing)}, and there are none but "
                    f"{', '.join(COLUMNS)}."
                )
        if len(set(self.figures)) < len(self.figures):
            raise ObjectiveError(
                f"trainer.objective: two parts have a figure of one name among {', '.join(self.figures)}."
            )

    def own(self, kind: str) -> str:
        """Return file and name of the `advantage` or `loss` if it comes from a user's file; otherwise an
        empty string."""
        name = str(getattr(self._section, kind))
        return Path(name).name if ".py:" in name else ""

    def fill(self, units: UnitTable, step: int) -> UnitTable:
        """Return the table with the columns `staleness` and `advantage`. A correction that compares units
        adds `correction`.

        `step` is the version that the step starts from. All ranks call it."""
        units = units.with_columns(staleness=step - units.version)
        units = units.cleared()
        if self.prox == "behaviour":
            units = units.with_columns(prox=units.behaviour)
        penalty = None
        if self._penalised:
            start = units.columns.get("prox", units.behaviour)
            units = units.with_columns(kl_ref=self.kl.values(start, units["ref"]))
            penalty = self.kl.coefficient * units["kl_ref"]
        if self._advantage.of == "unit" or "reward" in self._of_units:
            units = units.with_columns(reward=unit_rewards(units, penalty))
        units = units.with_columns(**self._advantages(units, penalty))
        self._check_columns(units)
        if self._over_step:
            weight = behaviour_weight(units["prox"], units.behaviour)
            effective, figures = with_figures(self._correction, weight, units, self._section.correction_args)
            units = units.with_columns(
                correction=effective.float(), **{f"correction_{n}": v for n, v in figures.items()}
            )
        return units

    def _advantages(self, units: UnitTable, penalty: Tensor | None) -> dict[str, Tensor]:
        part, section = self._advantage, self._section
        if part.of == "sample":
            credit = samples_of(units, section.group_by, penalty, turn_discount=section.turn_discount)
            found = self._checked(part(credit.samples, **section.advantage_args), len(credit.samples))
            return {"advantage": credit.of_units(found, units)}
        if part.of == "segment":
            segments = with_penalty(units, penalty)
            found = self._checked(part(segments, **section.advantage_args), len(segments))
            return {"advantage": moved(found, units.mask.device)[units["segment"]].float()}
        result = part(units, **section.advantage_args)
        columns = result if isinstance(result, Mapping) else {"advantage": result}
        if not {"advantage"} <= {*columns} <= {"advantage", "return"}:
            raise ObjectiveError(
                f"{section.advantage} was to return the columns advantage and, for a critic, return, and "
                f"returned {', '.join(columns) or 'none'}."
            )
        return {
            name: masked(self._checked(values, len(units)), units.mask).float()
            for name, values in columns.items()
        }

    def _check_columns(self, units: UnitTable) -> None:
        lacking = dict.fromkeys(self._of_units - {"prox"}, "a part of the objective needs")
        if self.trains_critic:
            lacking["return"] = "a critic learns"
        for column in sorted({*lacking} - {*units.columns}):
            raise ObjectiveError(
                f"{lacking[column]} the column {column}, which the advantage {self._section.advantage} does "
                "not return: gae does, or one of your own that is of units."
            )

    def _checked(self, values: Tensor, count: int) -> Tensor:
        name, of = self._section.advantage, self._advantage.of
        return of_shape(f"the advantage {name} is of each {of} and was to return", values, count)

    def statistic(self, logp: Tensor, units: UnitTable) -> Tensor | None:
        """Return f32 [S]: the statistic of each unit (`Loss.statistic`), or None if the loss has none. The
        loss reads the mean of the statistic over each episode."""
        if self._loss.statistic is None:
            return None
        logp, units = masked(logp.float(), units.mask), self._with_prox(logp, units.cleared())
        found = self._loss.statistic(logp, units, **self._section.loss_args)
        what = f"the statistic of {self._section.loss} was to return"
        return masked(of_shape(what, found, len(logp)), units.mask)

    def coefficients(self, units: UnitTable, totals: Totals) -> Tensor:
        """Return the coefficient of each unit (see `normalisers.py`): f32 [S]."""
        found = self._normaliser(units, totals, **self._section.normaliser_args)
        return of_shape(f"the normaliser {self._section.normaliser} was to return", found, len(units))

    def terms(self, columns: Mapping[str, Tensor], units: UnitTable) -> UnitTerms:
        """Return the terms of one micro-batch.

        `columns` f32 [S], with gradient, has `logp` and the other `trained_columns`. `units` has
        `episode_mean` if the loss needs it."""
        section, mask = self._section, units.mask
        logp = masked(columns["logp"].float(), mask)
        units = units.cleared()
        units = self._with_prox(logp, units)
        # If the behaviour policy is the proximal one, the weight is the current policy's ratio to it.
        compared = logp if self.prox == "behaviour" else units["prox"]
        weight = behaviour_weight(compared, units.behaviour)
        loss, shown = with_figures(self._loss, logp, units, section.loss_args)
        if logp.requires_grad and not loss.requires_grad:
            raise ObjectiveError(
                f"trainer.objective.loss: {self.own('loss') or section.loss} returned a tensor without a "
                "gradient. Compute it from the logp that it is given, without detach(), item() or numpy."
            )
        if self._over_step:
            effective = units["correction"]
            more = {name: units[f"correction_{name}"] for name in self._correction.figures}
        else:
            effective, more = with_figures(self._correction, weight, units, section.correction_args)
        loss, figures = loss * effective.detach(), {**more, **shown}
        if self.kl.coefficient > 0:
            values = units["kl_ref"] if "kl_ref" in units else self.kl.values(logp.detach(), units["ref"])
            figures["kl_ref"] = values
            if self.kl.place == "loss":
                loss = loss + self.kl.coefficient * self.kl.in_loss(logp, units["ref"])
        if "teacher" in self._advantage.columns:
            figures["kl_teacher"] = logp.detach() - units["teacher"]
        if section.entropy:
            entropy = masked(columns["entropy"].float(), mask)
            figures["entropy"] = entropy.detach()
            loss = loss - section.entropy * entropy
        return UnitTerms(masked(loss, mask), weight, figures)

    def _with_prox(self, logp: Tensor, units: UnitTable) -> UnitTable:
        """Add the proximal log-probs. The table already has them only if an extra pass computed them."""
        if self.prox == "recompute":
            return units
        logp = masked(logp.detach().float(), units.mask)
        if self.prox == "behaviour":
            logp = units.behaviour
        elif self.prox == "loglinear":
            staleness = units["staleness"].float()
            logp = units.behaviour + staleness / (staleness + 1) * (logp - units.behaviour)
        return units.with_columns(prox=logp)


def _part(kind: type[P], found: Any) -> P:
    """Return the loaded object `found` as a part. A plain function becomes a part with the default fields."""
    return found if isinstance(found, kind) else kind(found)
