"""A step of training: the rows of a batch, their unit table, the optimizer updates.

    pack the rows → fill the table (column passes, rewards, advantages) → per minibatch: gradients, update

Losses are sums over all ranks and all micro-batches with coefficients taken over the whole optimizer update,
so neither packing nor the number of ranks changes what is computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer_service.algorithms.by_models import process_slopes
from trainer_service.algorithms.critic import ValueStatistics, value_terms
from trainer_service.algorithms.normalisers import Totals
from trainer_service.algorithms.objective import Objective
from trainer_service.algorithms.off_policy import StepStatistics
from trainer_service.algorithms.table import EpisodeTable, UnitTable
from trainer_service.backends.base import (
    CRITIC,
    PROCESS,
    REFERENCE,
    TEACHER,
    TRAINED_MODEL,
    Columns,
    TrainingBackend,
)
from trainer_service.data.flops import RowCost
from trainer_service.data.microbatch import MicroBatch, build_micro_batch, plan_passes
from trainer_service.data.rows import PLACES, TrainingRow
from trainer_service.data.units import build_units
from trainer_service.errors import GradientNotFinite, NotFinite, NothingToLearn
from trainer_service.ranks import Ranks

if TYPE_CHECKING:
    from trainer_service.teacher import TeacherServers

MOST_NAMED = 5  # Largest number of episodes that an error names
SOURCES = {
    "prox": (TRAINED_MODEL, "logp"),
    "entropy": (TRAINED_MODEL, "entropy"),
    "ref": (REFERENCE, "logp"),
    "value": (CRITIC, "value"),
    "teacher": (TEACHER, "logp"),
    "process": (PROCESS, "logp"),
}
"""Of each column that takes a forward pass, the model that computes it and what the model calls it."""


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank."""

    losses: list[float]
    """The objective's value of each minibatch, before its update; NaN where the update was left out because
    something is not finite, and 0 in a step without anything to learn."""
    grad_norms: list[float]
    """Gradient norm of each minibatch before clipping; 0 of one that was skipped."""
    statistics: dict[str, object]
    """See `algorithms.off_policy`."""
    packed_tokens: int
    """Tokens of one pass over the step's rows."""
    shared_tokens: int
    """Tokens that such a pass would have more if rows of a group did not share what they begin with."""
    replayed_tokens: int
    """Of `packed_tokens` those that went to the experts of the engine, in some layer at least."""
    micro_batches: int
    """Forward passes with gradient on this rank."""
    critic: dict[str, float] = field(default_factory=dict)
    """See `algorithms.critic.ValueStatistics`, with the largest gradient norm of a critic of its own; empty
    where none is trained."""
    process: dict[str, float] = field(default_factory=dict)
    """`loss`, `accuracy` and `grad_norm` of a process reward model, before its update; empty without one."""
    advantages: dict[int, dict[int, float]] = field(default_factory=dict)
    """Of episodes that were asked for, by index, those of the units that this rank trained, by their number
    in the episode."""
    skipped: str = ""
    """Why updates were left out; empty where none was."""
    not_finite: int = 0
    """Updates that were left out because something was not finite."""
    updates: int = 0
    """Updates that were made, of as many as `losses` has."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`columns`: rows packed, columns, rewards and advantages computed; `update`: gradients and updates."""
    groups_without_baseline: int | None = None
    """Groups whose greedy answer did not come, which give nothing; None where none has one."""

    @property
    def loss(self) -> float:
        """The mean over minibatches, those left out that have none."""
        known = [loss for loss in self.losses if math.isfinite(loss)]
        return sum(known) / max(1, len(known))

    @property
    def grad_norm(self) -> float:
        return max(self.grad_norms)


@dataclass(frozen=True)
class Minibatch:
    """What this rank computes for one optimizer update."""

    batches: list[MicroBatch]
    units: list[UnitTable]
    """The part of the table of each micro-batch; empty on a rank that does not own its columns."""
    n_episodes: int
    """Episodes of the step."""


def train_step(
    backend: TrainingBackend,
    objective: Objective,
    ranks: Ranks,
    minibatches: Sequence[Sequence[TrainingRow]],
    *,
    step: int,
    max_staleness: int,
    names: Sequence[str],
    episodes: EpisodeTable,
    micro_batch_tokens: int,
    cost: RowCost,
    teacher: TeacherServers | None = None,
    begun: int = 0,
    sampled: Collection[int] = (),
    on_fault: Callable[[int], str | None] = lambda number: None,
) -> StepResult:
    """Train on this rank's rows of each minibatch; all ranks call it with the same number of minibatches.

    `names` [E] (what an error calls them) and `episodes` are of all episodes of the step, those of other
    ranks too; of those `sampled`, by their index, the result has the advantages. The first `begun`
    minibatches are passed over: the weights have seen them. Every rank calls
    `on_fault(number)` while what is trained is as before minibatch `number`, when an advantage, the loss, a
    gradient, or the log-prob or value of a unit is not finite there, or nothing is to be learned and that
    ends the job; the process reward model is trained after the last of them. Then, on every rank, the update
    is left out, or with `on_non_finite: stop` a `NotFinite` is raised, with what `on_fault` says at its end.
    Raises `DivergenceError` when an update makes weights that are not finite, and `NothingToLearn`.
    """
    begun_s = time.monotonic()
    groups = episodes.group.numpy()
    passes = [plan_passes(rows, ranks, micro_batch_tokens, cost, groups=groups) for rows in minibatches]
    packed = [[build_micro_batch(rows, device=ranks.device) for rows in chosen] for chosen in passes]
    owns = backend.place.owns
    rows = [row for chosen in passes for rows in chosen for row in rows] if owns else []
    units = build_units(
        rows,
        episodes,
        ranks,
        device=ranks.device,
        with_segments=objective.with_segments,
    )
    if teacher is not None:
        found = torch.from_numpy(ranks.together(lambda: teacher.logprobs(rows)))
        units = units.with_columns(teacher=found.to(ranks.device))
    units = objective.fill(_with_computed(backend, objective, units, packed), step)
    updates = _Updates(backend, objective, ranks, step, max_staleness)
    losses, norms, critic_norms = [math.nan] * len(packed), [0.0] * len(packed), []
    skipped: list[str] = []
    not_finite = 0

    def leave_out(number: int, error: NotFinite) -> None:
        nonlocal not_finite
        kept = on_fault(number)
        if isinstance(error, GradientNotFinite) and error.model == TRAINED_MODEL and objective.own("loss"):
            error = GradientNotFinite(
                f"the loss of step {step}, minibatch {number}, is finite, and its gradient is not. Look at "
                f"the loss {objective.own('loss')} first: a root or logarithm at 0, a division by 0 or an "
                f"exponential of much has none, even where torch.where leaves it out. Else: {error}"
            )
        if objective.on_non_finite == "stop":
            raise type(error)(f"{error} {kept}") if kept else error
        updates.discard()
        skipped.append(str(error))
        not_finite += 1

    process: dict[str, float] = {}
    made = begun
    try:
        _check_advantages(units, objective, ranks, step, names)
    except NotFinite as error:
        leave_out(0, error)
    if not skipped and not objective.learns_without_advantage and not _has_advantages(units, ranks):
        why = f"every advantage of step {step} is 0, so nothing is to be learned from it"
        if objective.on_nothing_to_learn == "stop":
            on_fault(0)
            raise NothingToLearn(
                f"{why}: the rewards of each group are equal. Give tasks that are neither too hard nor too "
                "easy, or set trainer.objective.on_nothing_to_learn: skip."
            )
        losses = [0.0] * len(packed)
        skipped.append(why)
    trained = not skipped
    filled_s = time.monotonic()
    for number, minibatch in enumerate(_cut(units, packed, owns) if trained else ()):
        if number < begun:
            continue
        totals = _totals(minibatch, ranks)
        try:
            loss, faulty = updates.accumulate(minibatch, totals)
            if faulty or not math.isfinite(loss):
                raise NotFinite(_not_finite(loss, faulty, step, number, names, objective.own("loss")))
            norms[number], of_critic = updates.apply()
        except NotFinite as error:
            leave_out(number, error)
        else:
            losses[number] = loss
            made += 1
            critic_norms += of_critic
            updates.count()
    if trained and objective.trains_process:
        try:
            process = _train_process(backend, objective, units, packed)
        except NotFinite as error:
            leave_out(len(packed), error)
    statistics, critic = updates.report()
    owned = [batch for batches in packed for batch in batches] if owns else []
    return StepResult(
        losses=losses,
        grad_norms=norms,
        statistics=statistics,
        critic=critic | ({"grad_norm": max(critic_norms)} if critic_norms else {}),
        process=process,
        packed_tokens=ranks.total(sum(batch.n_tokens for batch in owned)),
        shared_tokens=ranks.total(sum(batch.shared_tokens for batch in owned)),
        replayed_tokens=ranks.total(sum(batch.replayed_tokens for batch in owned)),
        micro_batches=sum(map(len, packed)) if trained else 0,
        advantages=_advantages_of(units, rows, sampled),
        skipped="; ".join(skipped),
        not_finite=not_finite,
        updates=made,
        seconds={"columns": filled_s - begun_s, "update": time.monotonic() - filled_s},
        groups_without_baseline=episodes.groups_without_baseline if objective.needs_greedy else None,
    )


def _with_computed(
    backend: TrainingBackend,
    objective: Objective,
    units: UnitTable,
    packed: Sequence[Sequence[MicroBatch]],
) -> UnitTable:
    """The column passes: what the models say of the units before the first update."""
    batches = [batch for chosen in packed for batch in chosen]
    asked: dict[str, dict[str, str]] = {}
    for column in sorted(objective.columns - {*units.columns}):
        model, own = SOURCES[column]
        if column == "value" and objective.critic_is_head:
            model = TRAINED_MODEL
        asked.setdefault(model, {})[own] = column
    for model, names in asked.items():
        found = backend.evaluate(model, batches, lambda index, columns: columns, columns=tuple(names))
        for own, column in names.items():
            parts = [each[own].detach().float() for each in found]
            units = units.with_columns(**{column: torch.cat(parts) if parts else units.behaviour.clone()})
    return units


def _advantages_of(
    units: UnitTable, rows: Sequence[TrainingRow], episodes: Collection[int]
) -> dict[int, dict[int, float]]:
    """Of these episodes the advantages of the units in `rows`, whose order the table has."""
    found: dict[int, dict[int, float]] = {}
    end = 0
    for row in rows:
        start, end = end, end + len(row.position)
        if row.episode in episodes and row.places is not None:
            numbers = row.places[PLACES.index("unit")].tolist()
            found.setdefault(row.episode, {}).update(
                zip(numbers, units.advantage[start:end].tolist(), strict=True)
            )
    return found


def _train_process(
    backend: TrainingBackend,
    objective: Objective,
    units: UnitTable,
    packed: Sequence[Sequence[MicroBatch]],
) -> dict[str, float]:
    """One update of the process reward model. Its log-probs are in the table, so the derivatives of its loss
    are known before the pass."""
    slopes, figures = process_slopes(units, *objective.process)
    batches = [batch for chosen in packed for batch in chosen]
    starts = list(accumulate([0, *(batch.n_units for batch in batches)]))
    kept = torch.where(units.mask, slopes, 0.0).float()

    def loss_of(index: int, columns: Columns) -> Tensor:
        return (columns["logp"] * kept[starts[index] : starts[index + 1]]).sum()

    backend.train(PROCESS, batches, loss_of)
    return figures | {"grad_norm": backend.optimizer_step(PROCESS)}


def _cut(units: UnitTable, packed: Sequence[Sequence[MicroBatch]], owns: bool) -> list[Minibatch]:
    """The part of the table of each micro-batch of each minibatch, whose order the table has."""
    start = 0
    found: list[Minibatch] = []
    for batches in packed:
        parts: list[UnitTable] = []
        for batch in batches if owns else ():
            parts.append(units.part(start, start + batch.n_units))
            start += batch.n_units
        found.append(Minibatch(list(batches), parts, len(units.episodes)))
    return found


def _check_advantages(
    units: UnitTable, objective: Objective, ranks: Ranks, step: int, names: Sequence[str]
) -> None:
    """Raise `NotFinite` where an advantage is not finite; it says which of the computed columns is not."""

    def faulty(column: str) -> list[int]:
        counts = torch.zeros(len(names), dtype=torch.int64, device=units.mask.device)
        counts.index_add_(0, units.episode, (units.mask & ~units[column].isfinite()).long())
        ranks.sum(counts)
        return counts.nonzero()[:, 0].tolist()

    if not (found := faulty("advantage")):
        return
    rewards = units.episodes.reward
    first = next((episode for episode in found if not rewards[episode].isfinite()), found[0])
    said = (
        f"the advantage of episode {names[first]} of step {step} is not finite (its reward is "
        f"{float(rewards[first])}): the step is not trained. "
    )
    for column in sorted(objective.columns):
        for episode in faulty(column)[:1]:
            raise NotFinite(
                f"{said}The column {column}, which the model {SOURCES[column][0]} computes, is not finite in "
                f"episode {names[episode]}: lower the learning rate of what is trained, or start from an "
                "earlier checkpoint."
            )
    made = objective.own("advantage") or "what makes an advantage of it"
    raise NotFinite(f"{said}Bound what the reward returns, or mend {made}.")


def _has_advantages(units: UnitTable, ranks: Ranks) -> bool:
    return bool(ranks.largest(int((units.advantage[units.mask] != 0).any())))


def _totals(minibatch: Minibatch, ranks: Ranks) -> Totals:
    counts = torch.zeros(minibatch.n_episodes, dtype=torch.int64, device=ranks.device)
    rows = torch.zeros((), dtype=torch.float64)
    for units in minibatch.units:
        counts.index_add_(0, units.episode, units.mask.long())
        rows += (units.mask.double() / units["row_units"]).sum().cpu()
    ranks.sum(counts)
    ranks.sum(rows)
    return Totals(counts, round(float(rows)))


class _Updates:
    """The gradients and updates of the minibatches of one step."""

    def __init__(
        self, backend: TrainingBackend, objective: Objective, ranks: Ranks, step: int, max_staleness: int
    ) -> None:
        self._backend = backend
        self._objective = objective
        self._ranks = ranks
        self._critic_alone = objective.trains_critic and step < objective.critic.warmup_steps
        """Whether the policy is left as it is."""
        self._new = lambda: (StepStatistics(step, max_staleness, objective.figures), ValueStatistics())
        self._statistics, self._values = self._new()
        self._now, self._values_now = self._new()
        """Of the minibatch that is being trained."""

    def accumulate(self, minibatch: Minibatch, totals: Totals) -> tuple[float, dict[int, int]]:
        """Gradients of the policy, and of a critic of its own; returns the policy's loss, and of each episode
        that has some the number of its units whose log-prob, value or loss is not finite."""
        objective, ranks = self._objective, self._ranks
        self._now, self._values_now = self._new()
        means = self._means_of_episodes(minibatch, totals) if objective.over_episodes else None
        total = torch.zeros((), dtype=torch.float64)
        faulty = torch.zeros(len(totals.units_of_episode), dtype=torch.int64, device=ranks.device)

        def loss_of(index: int, columns: Columns) -> Tensor:
            logp = columns["logp"]
            units = _with_mean(objective, logp, minibatch.units[index], means, totals)
            terms = objective.terms(columns, units)
            coefficients = objective.coefficients(units, totals)
            loss = (terms.loss * coefficients).sum()
            # An infinite log-prob does not show in the loss: exponents are clamped.
            finite = terms.loss.isfinite() & logp.isfinite()
            if "prox" in units:
                finite &= units["prox"].isfinite()
            if self._critic_alone:
                loss = loss * 0
            if objective.critic_is_head:
                values = self._value_terms(columns["value"], units)
                finite &= values.isfinite()
                loss = loss + objective.critic.coefficient * (values * coefficients).sum()
            faulty.index_add_(0, units.episode, (units.mask & ~finite).long())
            self._now.add(terms, units)
            total.add_(loss.detach().double().cpu())
            return loss

        def value_loss_of(index: int, columns: Columns) -> Tensor:
            units = minibatch.units[index]
            values = self._value_terms(columns["value"], units)
            faulty.index_add_(0, units.episode, (units.mask & ~values.isfinite()).long())
            return (values * objective.coefficients(units, totals)).sum()

        columns = objective.trained_columns
        self._backend.train(TRAINED_MODEL, minibatch.batches, loss_of, columns=columns)
        if objective.has_own_critic:
            self._backend.train(CRITIC, minibatch.batches, value_loss_of, columns=("value",))
        ranks.sum(total)
        ranks.sum(faulty)
        return float(total), {episode: int(faulty[episode]) for episode in faulty.nonzero()[:, 0].tolist()}

    def apply(self) -> tuple[float, list[float]]:
        """Update the policy, and a critic of its own; the norms of their gradients: 0 for the policy where
        the critic alone is trained, and none without a critic of its own. Raises `GradientNotFinite` before
        either has changed."""
        if not self._objective.has_own_critic:
            return self._backend.optimizer_step(), []
        self._backend.gradient_norm(CRITIC)
        if self._critic_alone:
            self._backend.discard()
            return 0.0, [self._backend.optimizer_step(CRITIC)]
        self._backend.gradient_norm()
        return self._backend.optimizer_step(), [self._backend.optimizer_step(CRITIC)]

    def discard(self) -> None:
        """Clear gradients without an update."""
        self._backend.discard()
        if self._objective.has_own_critic:
            self._backend.discard(CRITIC)

    def count(self) -> None:
        """The minibatch is trained: its figures are those of the step too."""
        self._statistics.include(self._now)
        self._values.include(self._values_now)

    def _value_terms(self, value: Tensor, units: UnitTable) -> Tensor:
        terms = value_terms(value, units, self._objective.critic.clip)
        self._values_now.add(terms, units)
        return terms.loss

    def _means_of_episodes(self, minibatch: Minibatch, totals: Totals) -> Tensor | None:
        """f32 [E]: the mean over each episode of what the loss needs one of, where an episode's units are in
        several micro-batches; it takes a pass without gradient. None where each episode is in one."""
        ranks, objective = self._ranks, self._objective
        held = torch.zeros(len(totals.units_of_episode), dtype=torch.int64, device=ranks.device)
        for units in minibatch.units:
            held[units.episode.unique()] += 1
        ranks.sum(held)
        if int(held.max()) <= 1:
            return None
        sums = torch.zeros(len(held), dtype=torch.float64, device=ranks.device)

        def add(index: int, columns: Columns) -> None:
            units = minibatch.units[index]
            found = objective.statistic(columns["logp"], units)
            assert found is not None
            sums.index_add_(0, units.episode, found.double())

        self._backend.evaluate(TRAINED_MODEL, minibatch.batches, add)
        ranks.sum(sums)
        return (sums / totals.units_of_episode.clamp(min=1)).float()

    def report(self) -> tuple[dict[str, object], dict[str, float]]:
        """The figures of the step, and those of the critic; empty where there are none."""
        self._statistics.reduce(self._ranks.sum, self._ranks.max)
        self._values.reduce(self._ranks.sum)
        return (
            self._statistics.report(),
            self._values.report() if self._objective.trains_critic else {},
        )


def _with_mean(
    objective: Objective, logp: Tensor, units: UnitTable, means: Tensor | None, totals: Totals
) -> UnitTable:
    """With `episode_mean` and `episode_units`, if the loss needs them: see `Loss.statistic`."""
    found = objective.statistic(logp, units)
    if found is None:
        return units
    if means is None:
        sums = torch.zeros(len(totals.units_of_episode), dtype=torch.float64, device=logp.device)
        sums.index_add_(0, units.episode, found.detach().double())
        means = (sums / totals.units_of_episode.clamp(min=1)).float()
    return units.with_columns(
        episode_mean=means[units.episode] + found - found.detach(),
        episode_units=totals.units_of_episode[units.episode].float(),
    )


def _not_finite(
    loss: float, faulty: Mapping[int, int], step: int, number: int, names: Sequence[str], own: str
) -> str:
    where = ", ".join(f"{names[episode]} ({count})" for episode, count in [*faulty.items()][:MOST_NAMED])
    more = f" and {len(faulty) - MOST_NAMED} more" if len(faulty) > MOST_NAMED else ""
    units = (
        f"; units whose log-prob, value or loss is not finite, by episode: {where}{more}" if faulty else ""
    )
    return (
        f"the loss of step {step}, minibatch {number}, is {loss}{units}. "
        + (f"Look at the loss {own} first, and bound what it computes. Else: training" if own else "Training")
        + " has diverged, or the model or the loss computes what is no number for these units; the minibatch "
        "is not trained. Lower trainer.optimizer.lr and start from an earlier checkpoint, or bound what the "
        "loss computes."
    )
