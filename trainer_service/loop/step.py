"""One training step: the plan, the unit table of its rows, and the optimizer updates.

    plan → pack the rows → fill the table → per minibatch: gradients (`_accumulate`), update (`_apply`)

A loss is a sum over all ranks and all micro-batches. Its coefficients are computed over the whole optimizer
update. The result therefore depends neither on the packing nor on the number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_async.rpc.messages import Batch, BatchEpisode
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
from trainer_service.data.microbatch import (
    Share,
    build_micro_batch,
    deal_episodes,
    deal_groups,
    deal_rows,
    plan_passes,
)
from trainer_service.data.rows import PLACES, TrainingRow
from trainer_service.data.units import build_units
from trainer_service.errors import (
    BatchError,
    GradientNotFinite,
    NotFinite,
    NothingToLearn,
    StalenessViolation,
)
from trainer_service.loop.minibatches import Minibatch, minibatches_of
from trainer_service.ranks import Ranks
from trainer_service.transfer import on_device

if TYPE_CHECKING:
    from trainer_service.teacher import TeacherServers

MOST_NAMED = 5  # Largest number of episodes or examples that an error names
SOURCES = {
    "prox": (TRAINED_MODEL, "logp"),
    "entropy": (TRAINED_MODEL, "entropy"),
    "ref": (REFERENCE, "logp"),
    "value": (CRITIC, "value"),
    "teacher": (TEACHER, "logp"),
    "process": (PROCESS, "logp"),
}
"""Column that needs a forward pass → the model that computes the column, and the column's name in that
model's output."""


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step, the same on every rank. The E episodes of the step are in manifest order."""

    episodes: list[BatchEpisode]
    groups: NDArray[np.int64]
    """i64 [E]: index of each episode's group."""
    table: EpisodeTable
    """Rewards, groups and reward components of the episodes."""
    shares: list[list[Share]]
    """Shares of rows, indexed by [minibatch][data rank]. Each row is in exactly one share. If several ranks
    train rows of an episode, each of them fetches the episode."""

    def share_of(self, data_rank: int) -> Share:
        """Return the rows that one data rank trains in the step, by episode and in training order."""
        return {index: rows for shares in self.shares for index, rows in shares[data_rank].items()}


def plan_step(
    batch: Batch,
    *,
    minibatches: int,
    ranks: int,
    cost: RowCost,
    whole_episodes: bool = False,
    greedy_sample: int | None = None,
) -> StepPlan:
    """Distribute the rows of a checked manifest over the ranks by their `cost`. With `whole_episodes`, all
    rows of an episode go to one rank. `greedy_sample` is the number of the greedy sample in each group.
    Groups may differ in size: a partial group has only the samples that met its deadline. The plan is
    deterministic, so every rank makes the same plan."""
    episodes = [episode for group in batch.groups for episode in group.episodes]
    sizes = [len(group.episodes) for group in batch.groups]
    groups = np.repeat(np.arange(len(batch.groups), dtype=np.int64), sizes)
    deal = deal_episodes if whole_episodes else deal_rows

    def dealt(members: list[int]) -> list[Share]:
        indices = np.flatnonzero(np.isin(groups, members)).tolist()
        costs = [[cost.of(*size) for size in episodes[index].rows] for index in indices]
        shares = deal(costs, ranks, groups[indices].tolist())
        return [{indices[place]: rows for place, rows in share.items()} for share in shares]

    table = EpisodeTable.of(episodes, groups, greedy_sample=greedy_sample)
    return StepPlan(episodes, groups, table, [*map(dealt, deal_groups(len(batch.groups), minibatches))])


def check_manifest(batch: Batch, *, step: int, max_staleness: int) -> None:
    """Check the manifest of `step`. Raises `BatchError` if the manifest belongs to another step, names a
    group or an episode twice, or has an empty group. Raises `StalenessViolation` if an episode is too
    stale."""
    if batch.step != step:
        raise BatchError(f"asked for the batch of step {step}, got that of step {batch.step}")
    group_ids = [group.group_id for group in batch.groups]
    episodes = [episode for group in batch.groups for episode in group.episodes]
    ids = [episode.episode_id for episode in episodes]
    for what, names in (("group", group_ids), ("episode", ids)):
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BatchError(f"the batch of step {step} names {what} {twice} twice")
    if not episodes:
        raise BatchError(f"the batch of step {step} has no episodes")
    empty = [group.group_id for group in batch.groups if not group.episodes]
    if empty:
        raise BatchError(f"group {empty[0]} of step {step} has no episodes")
    for episode in episodes:
        oldest = max(episode.min_version, batch.lowest_version)
        if episode.n_sampled and not 0 <= step - oldest <= max_staleness:
            raise StalenessViolation(
                f"episode {episode.episode_id} of step {step} has min version {oldest}: "
                f"staleness {step - oldest} is outside 0 … {max_staleness}"
            )
        units = episode.parts.units if episode.parts is not None else []
        if units and len(units) != episode.n_units:
            raise BatchError(
                f"episode {episode.episode_id} of step {step} has {episode.n_units} units, and rewards of "
                f"{len(units)}"
            )


@dataclass(frozen=True)
class StepResult:
    """Result of a step. Only `micro_batches`, `advantages` and `seconds` differ by rank."""

    losses: list[float]
    """Value of the objective for each minibatch, before its update. It is NaN if the update was skipped
    because a number is not finite, and 0 if the step had nothing to learn."""
    grad_norms: list[float]
    """Gradient norm of each minibatch before clipping; 0 if its update was skipped."""
    statistics: dict[str, object]
    """See `algorithms.off_policy`."""
    packed_tokens: int
    """Number of tokens in one pass over the step's rows."""
    shared_tokens: int
    """Number of tokens saved because rows of a group share a prefix."""
    replayed_tokens: int
    """Number of packed tokens that used the engine's experts in at least one layer."""
    micro_batches: int
    """Number of forward passes with gradient on this rank."""
    critic: dict[str, float] = field(default_factory=dict)
    """Figures of `algorithms.critic.ValueStatistics`; empty if no critic is trained. A separate critic adds
    its largest gradient norm."""
    process: dict[str, float] = field(default_factory=dict)
    """`loss`, `accuracy` and `grad_norm` of a process reward model, before its update; empty if there is no
    such model."""
    advantages: dict[int, dict[int, float]] = field(default_factory=dict)
    """Advantages of the units that this rank trained, for episodes in `StepInputs.sampled`. The keys are the
    episode's index and the unit's number in the episode."""
    skipped: str = ""
    """Reason why updates were skipped; empty if none was."""
    not_finite: int = 0
    """Number of updates that were skipped because a number was not finite."""
    updates: int = 0
    """Number of updates that were made; at most the length of `losses`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Durations. `columns` covers packing, columns, rewards and advantages; `update` covers gradients and
    updates."""
    groups_without_baseline: int | None = None
    """Number of groups whose greedy answer is missing. Nothing is learned from these groups. The value is
    None if the objective needs no greedy answers."""

    @property
    def loss(self) -> float:
        """Mean over the minibatches with a finite loss."""
        known = [loss for loss in self.losses if math.isfinite(loss)]
        return sum(known) / max(1, len(known))

    @property
    def grad_norm(self) -> float:
        return max(self.grad_norms)


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step. The ranks have different rows in `minibatches` and may have a different `sampled`.
    The other inputs, and the number of minibatches, are the same on every rank."""

    minibatches: Sequence[Sequence[TrainingRow]]
    """Rows of this rank, by minibatch."""
    step: int
    max_staleness: int
    names: Sequence[str]
    """[E]: names of all episodes of the step for error messages, including episodes of other ranks."""
    episodes: EpisodeTable
    micro_batch_tokens: int
    cost: RowCost
    teacher: TeacherServers | None = None
    sampled: Collection[int] = ()
    """Indices of the episodes whose advantages the result must contain."""
    on_fault: Callable[[], str] = lambda: ""
    """Function that every rank calls after a faulty minibatch, before the weights change.

    A minibatch is faulty if an advantage, the loss, a gradient, or a unit's log-prob or value is not finite.
    The function is also called if the step has no gradient and the job must stop in that case. Its text is
    appended to the error message."""


def train_step(
    backend: TrainingBackend, objective: Objective, ranks: Ranks, inputs: StepInputs
) -> StepResult:
    """Train a step. All ranks call it. If a number is not finite, every rank skips the update; with
    `on_non_finite: stop` every rank raises `NotFinite` instead. Raises `DivergenceError` if an update makes
    weights that are not finite. Raises `NothingToLearn` if every advantage is 0 and the job must stop in that
    case."""
    return _Step(backend, objective, ranks, inputs).run()


class _Step:
    """A step on one rank. The constructor packs the rows and fills the unit table."""

    def __init__(
        self, backend: TrainingBackend, objective: Objective, ranks: Ranks, inputs: StepInputs
    ) -> None:
        self._begun_s = time.monotonic()
        self._backend, self._objective, self._ranks, self._inputs = backend, objective, ranks, inputs
        groups, tokens, cost = inputs.episodes.group.numpy(), inputs.micro_batch_tokens, inputs.cost
        beside = backend.side_by_side
        passes = [
            plan_passes(rows, ranks, tokens, cost, groups=groups, side_by_side=beside)
            for rows in inputs.minibatches
        ]
        self._packed = [
            [build_micro_batch(rows, device=ranks.device) for rows in chosen] for chosen in passes
        ]
        self._batches = [batch for batches in self._packed for batch in batches]
        owns = backend.place.owns
        self._owned = self._batches if owns else []
        self._rows = [row for chosen in passes for rows in chosen for row in rows] if owns else []
        self._units = objective.fill(self._with_computed(self._table()), inputs.step)
        tables = self._units.parts([batch.n_units for batch in self._owned])
        self._minibatches, self._is_finite, self._has_advantage = minibatches_of(
            self._packed, tables, ranks, len(inputs.names)
        )
        self._losses, self._norms = [math.nan] * len(self._packed), [0.0] * len(self._packed)
        self._critic_norms: list[float] = []
        self._skipped: list[str] = []
        self._not_finite = 0
        self._made = 0
        self._critic_alone = objective.trains_critic and inputs.step < objective.critic.warmup_steps
        """Whether this step trains only the critic."""
        self._statistics, self._values = self._new_statistics("cpu")
        self._now, self._values_now = self._new_statistics(ranks.device)
        """Statistics of the current minibatch, for the policy and for the critic. They are read from the
        device together with its loss."""

    def run(self) -> StepResult:
        trained = self._has_something_to_learn()
        filled_s = time.monotonic()
        process: dict[str, float] = {}
        if trained:
            for number, minibatch in enumerate(self._minibatches):
                self._update(number, minibatch)
            if self._objective.trains_process:
                with self._left_out(len(self._packed)):
                    process = self._train_process()
        ranks, objective = self._ranks, self._objective
        critic = self._values.report() if objective.trains_critic else {}
        return StepResult(
            losses=self._losses,
            grad_norms=self._norms,
            statistics=self._statistics.report(),
            critic=critic | ({"grad_norm": max(self._critic_norms)} if self._critic_norms else {}),
            process=process,
            packed_tokens=ranks.total(sum(batch.n_tokens for batch in self._owned)),
            shared_tokens=ranks.total(sum(batch.shared_tokens for batch in self._owned)),
            replayed_tokens=ranks.total(sum(batch.replayed_tokens for batch in self._owned)),
            micro_batches=len(self._batches) if trained else 0,
            advantages=self._sampled_advantages(),
            skipped="; ".join(self._skipped),
            not_finite=self._not_finite,
            updates=self._made,
            seconds={"columns": filled_s - self._begun_s, "update": time.monotonic() - filled_s},
            groups_without_baseline=(
                self._inputs.episodes.groups_without_baseline if objective.needs_greedy else None
            ),
        )

    def _table(self) -> UnitTable:
        ranks, teacher = self._ranks, self._inputs.teacher
        units = build_units(
            self._rows,
            self._inputs.episodes,
            ranks,
            device=ranks.device,
            with_segments=self._objective.with_segments,
        )
        if teacher is None:
            return units
        found = ranks.together(lambda: teacher.logprobs(self._rows))
        return units.with_columns(**on_device({"teacher": found}, ranks.device))

    def _with_computed(self, units: UnitTable) -> UnitTable:
        """Add the columns that models compute before the first update, with one pass of each model."""
        asked: dict[str, dict[str, str]] = {}
        for column in sorted(self._objective.columns - {*units.columns}):
            model, own = SOURCES[column]
            if column == "value" and self._objective.critic_is_head:
                model = TRAINED_MODEL
            asked.setdefault(model, {})[own] = column
        for model, names in asked.items():
            found = self._backend.evaluate(
                model, self._batches, lambda index, columns: columns, columns=tuple(names)
            )
            for own, column in names.items():
                parts = [each[own].detach().float() for each in found]
                units = units.with_columns(**{column: torch.cat(parts) if parts else units.behaviour.clone()})
        return units

    def _has_something_to_learn(self) -> bool:
        """Return whether the step has a gradient. Raises `NothingToLearn` if it has none and the job must
        stop in that case."""
        objective, step = self._objective, self._inputs.step
        if not self._is_finite:
            with self._left_out(0):
                self._refuse_advantages()
            return False
        if self._has_advantage or objective.learns_without_advantage:
            return True
        why = f"every advantage of step {step} is 0, so nothing is to be learned from it"
        if objective.on_nothing_to_learn == "stop":
            self._inputs.on_fault()
            raise NothingToLearn(
                f"{why}: the rewards of each group are equal. Give tasks that are neither too hard nor too "
                "easy, or set trainer.objective.on_nothing_to_learn: skip."
            )
        self._losses = [0.0] * len(self._packed)
        self._skipped.append(why)
        return False

    def _refuse_advantages(self) -> None:
        """Raise `NotFinite`. The error names the advantage and the column that is not finite."""
        units, names, objective = self._units, self._inputs.names, self._objective

        def faulty(column: str) -> list[int]:
            counts = torch.zeros(len(names), dtype=torch.int64, device=units.mask.device)
            counts.index_add_(0, units.episode, (units.mask & ~units[column].isfinite()).long())
            self._ranks.sum(counts)
            return counts.nonzero()[:, 0].tolist()

        found = faulty("advantage")
        rewards = units.episodes.reward
        first = next((episode for episode in found if not rewards[episode].isfinite()), found[0])
        said = (
            f"the advantage of episode {names[first]} of step {self._inputs.step} is not finite (its reward "
            f"is {float(rewards[first])}): the step is not trained. "
        )
        for column in sorted(objective.columns):
            for episode in faulty(column)[:1]:
                raise NotFinite(
                    f"{said}The column {column}, which the model {SOURCES[column][0]} computes, is not "
                    f"finite in episode {names[episode]}: lower the learning rate of what is trained, or "
                    "start from an earlier checkpoint."
                )
        made = objective.own("advantage") or "what makes an advantage of it"
        raise NotFinite(f"{said}Bound what the reward returns, or mend {made}.")

    @contextmanager
    def _left_out(self, number: int) -> Iterator[None]:
        """Context manager that skips the update of minibatch `number` if the `with` block raises `NotFinite`.
        Raises the error again if the job must stop in that case."""
        try:
            yield
            return
        except NotFinite as found:
            error = found
        kept, own = self._inputs.on_fault(), self._objective.own("loss")
        if isinstance(error, GradientNotFinite) and error.model == TRAINED_MODEL and own:
            error = GradientNotFinite(
                f"the loss of step {self._inputs.step}, minibatch {number}, is finite, and its gradient is "
                f"not. Look at the loss {own} first: a root or logarithm at 0, a division by 0 or an "
                f"exponential of much has none, even where torch.where leaves it out. Else: {error}"
            )
        if self._objective.on_non_finite == "stop":
            raise type(error)(f"{error} {kept}") if kept else error
        self._backend.discard()
        if self._objective.has_own_critic:
            self._backend.discard(CRITIC)
        self._skipped.append(str(error))
        self._not_finite += 1

    def _update(self, number: int, minibatch: Minibatch) -> None:
        """Train one minibatch. The step's statistics include it only if the update succeeds."""
        with self._left_out(number):
            loss, faulty = self._accumulate(minibatch)
            if faulty or not math.isfinite(loss):
                raise NotFinite(self._why_not_finite(loss, faulty, number))
            self._norms[number], of_critic = self._apply()
            self._losses[number] = loss
            self._made += 1
            self._critic_norms += of_critic
            self._statistics.include(self._now)
            self._values.include(self._values_now)

    def _per_episode(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(self._inputs.names), dtype=dtype, device=self._ranks.device)

    def _new_statistics(self, device: torch.device | str) -> tuple[StepStatistics, ValueStatistics]:
        step, eta = self._inputs.step, self._inputs.max_staleness
        return StepStatistics(step, eta, self._objective.figures, device), ValueStatistics(device)

    def _accumulate(self, minibatch: Minibatch) -> tuple[float, dict[int, int]]:
        """Compute the gradients of the policy and of a separate critic. Returns the policy's loss and the
        number of faulty units by episode. A unit is faulty if its log-prob, value or loss is not finite."""
        objective, ranks, totals = self._objective, self._ranks, minibatch.totals
        self._now, self._values_now = self._new_statistics(ranks.device)
        means = self._means_of_episodes(minibatch) if objective.over_episodes else None
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        faulty = self._per_episode(torch.int64)

        def loss_of(index: int, columns: Columns) -> Tensor:
            logp = columns["logp"]
            units = self._with_mean(logp, minibatch.units[index], means, totals)
            terms = objective.terms(columns, units)
            coefficients = objective.coefficients(units, totals)
            loss = (terms.loss * coefficients).sum()
            # The loss hides an infinite log-prob because exponents are clamped.
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
            total.add_(loss.detach())
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
        now, values = self._now, self._values_now
        now.reduce(ranks.sum, ranks.max)
        values.reduce(ranks.sum)
        parts = torch.stack([total, faulty.sum()]), now.table.flatten(), values.sums
        decisive, table, values.sums = torch.cat(parts).cpu().split([len(part) for part in parts])
        now.table = table.view_as(now.table)
        found, count = decisive.tolist()
        return found, {episode: n for episode, n in enumerate(faulty.tolist()) if n} if count else {}

    def _apply(self) -> tuple[float, list[float]]:
        """Update the policy and a separate critic. Returns the gradient norm of the policy and a list with
        the critic's norm. The policy's norm is 0 if only the critic is trained. The list is empty without a
        separate critic. Raises `GradientNotFinite` before either model has changed."""
        if not self._objective.has_own_critic:
            return self._backend.optimizer_step(), []
        self._backend.gradient_norm(CRITIC)
        if self._critic_alone:
            self._backend.discard()
            return 0.0, [self._backend.optimizer_step(CRITIC)]
        self._backend.gradient_norm()
        return self._backend.optimizer_step(), [self._backend.optimizer_step(CRITIC)]

    def _value_terms(self, value: Tensor, units: UnitTable) -> Tensor:
        terms = value_terms(value, units, self._objective.critic.clip)
        self._values_now.add(terms, units)
        return terms.loss

    def _means_of_episodes(self, minibatch: Minibatch) -> Tensor | None:
        """Return f32 [E]: mean of the loss's statistic over each episode, from a pass without gradient.
        Returns None if every episode is in a single micro-batch."""
        ranks, objective, totals = self._ranks, self._objective, minibatch.totals
        if not minibatch.splits_episodes:
            return None
        sums = self._per_episode(torch.float64)

        def add(index: int, columns: Columns) -> None:
            units = minibatch.units[index]
            found = objective.statistic(columns["logp"], units)
            assert found is not None
            sums.index_add_(0, units.episode, found.double())

        self._backend.evaluate(TRAINED_MODEL, minibatch.batches, add)
        ranks.sum(sums)
        return (sums / totals.units_of_episode.clamp(min=1)).float()

    def _with_mean(self, logp: Tensor, units: UnitTable, means: Tensor | None, totals: Totals) -> UnitTable:
        """Add `episode_mean` and `episode_units` if the loss needs them (see `Loss.statistic`)."""
        found = self._objective.statistic(logp, units)
        if found is None:
            return units
        if means is None:
            sums = self._per_episode(torch.float64)
            sums.index_add_(0, units.episode, found.detach().double())
            means = (sums / totals.units_of_episode.clamp(min=1)).float()
        return units.with_columns(
            episode_mean=means[units.episode] + found - found.detach(),
            episode_units=totals.units_of_episode[units.episode].float(),
        )

    def _why_not_finite(self, loss: float, faulty: Mapping[int, int], number: int) -> str:
        names, own = self._inputs.names, self._objective.own("loss")
        where = ", ".join(f"{names[episode]} ({count})" for episode, count in [*faulty.items()][:MOST_NAMED])
        more = f" and {len(faulty) - MOST_NAMED} more" if len(faulty) > MOST_NAMED else ""
        units = f"; units whose log-prob, value or loss is not finite, by episode: {where}{more}"
        look = (
            f"Look at the loss {own} first, and bound what it computes. Else: training" if own else "Training"
        )
        return (
            f"the loss of step {self._inputs.step}, minibatch {number}, is {loss}{units if faulty else ''}. "
            f"{look} has diverged, or the model or the loss computes what is no number for these units; the "
            "minibatch is not trained. Lower trainer.optimizer.lr and start from an earlier checkpoint, or "
            "bound what the loss computes."
        )

    def _train_process(self) -> dict[str, float]:
        """Update the process reward model once. The table already contains its log-probs, so the derivatives
        of its loss can be computed before the pass with gradient."""
        units = self._units
        slopes, figures = process_slopes(units, *self._objective.process)
        starts = list(accumulate([0, *(batch.n_units for batch in self._batches)]))
        kept = torch.where(units.mask, slopes, 0.0).float()

        def loss_of(index: int, columns: Columns) -> Tensor:
            return (columns["logp"] * kept[starts[index] : starts[index + 1]]).sum()

        self._backend.train(PROCESS, self._batches, loss_of)
        return figures | {"grad_norm": self._backend.optimizer_step(PROCESS)}

    def _sampled_advantages(self) -> dict[int, dict[int, float]]:
        """Return the advantages of the sampled episodes' units in this rank's rows. The table has the units
        in the order of the rows."""
        found: dict[int, dict[int, float]] = {}
        end = 0
        advantages = self._units.advantage.cpu() if self._inputs.sampled else self._units.advantage
        for row in self._rows:
            start, end = end, end + len(row.position)
            if row.episode in self._inputs.sampled and row.places is not None:
                numbers = row.places[PLACES.index("unit")].tolist()
                own = advantages[start:end].tolist()
                found.setdefault(row.episode, {}).update(zip(numbers, own, strict=True))
        return found
