"""Decorators that declare an advantage, a loss or a correction, built in or from a user's file.

    from areal_async import advantage

    @advantage(needs_group=2)
    def centred(samples, *, scale=1.0):
        return scale * samples.centred(samples.reward)

A job file then names `path.py:centred`, or an installed package declares it as an entry point (see
`areal_async.config.registry`). Keyword-only parameters are the part's arguments (`advantage_args`,
`loss_args`, `correction_args`, `normaliser_args` under `trainer.objective`). Their annotations are checked,
as in `scale: Annotated[float, Field(gt=0)] = 1.0`. When a job file is read, the job is checked against the
decorator's fields. A user's file is not run at that time, so its parts are checked before the job starts. A
function without a decorator has the default fields.

| part | called with | returns |
|---|---|---|
| advantage `of="sample"` | `Samples` (`credit.py`): N samples, selected by `group_by` | float [N] |
| advantage `of="segment"` | `SegmentTable` (`table.py`): G segments with their rewards | float [G] |
| advantage `of="unit"` | `UnitTable`: U units of this rank, with `reward` | float [U], or columns by name |
| loss | logp f32 [S] (gradients flow through it), units `UnitTable` | f32 [S], or (f32 [S], figures) |
| correction | weight f32 [S] (exp(prox - behaviour)), units `UnitTable` | f32 [S], or (f32 [S], figures) |
| normaliser | units `UnitTable`, totals `Totals` (`normalisers.py`) | f32 [S] |

The S units are the units of one micro-batch. A correction `of="step"` is called once with the units of the
whole step, and may sum over episodes and over the step. If a unit's mask is False, its columns are 0 and its
`weight` is 1. A figure is a tensor [S], bool or f32. Its mean over units is logged with each step under its
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
)

from pydantic import Field

from areal_async.base.mistakes import Mistake
from areal_async.config.registry import LOSSES

if TYPE_CHECKING:
    from torch import Tensor

    from areal_async.config.job import JobConfig
    from areal_async.config.objective import ObjectiveSection
    from trainer_service.algorithms.table import UnitTable

TABLE_COLUMNS = ("behaviour", "version", "staleness", "episode", "group", "mask", "row_units")
"""Columns of every table."""
SEGMENT_COLUMNS = ("segment", "turn", "agent", "anchor", "unit", "truncated", "reward")
"""Further columns of a table with segments. `reward` f64 is the reward that the unit earned (`credit.py`)."""
COMPUTED_COLUMNS = ("advantage", "return", "prox", "ref", "value", "teacher", "process", "entropy")
"""Columns that the trainer computes. All except the first two need a forward pass over the step, by the
policy (`prox`, `entropy`) or by another model."""
COLUMNS = (*TABLE_COLUMNS, *SEGMENT_COLUMNS, *COMPUTED_COLUMNS)
OUTCOMES = ("on_timeout", "on_error", "on_abstain")
P = ParamSpec("P")
K = TypeVar("K")
Of = Literal["sample", "segment", "unit"]
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
"""Types for the arguments of parts."""


@dataclass(frozen=True)
class ObjectivePart:
    """A function and its declaration. It is called like the function."""

    function: Callable[..., Any]
    _: KW_ONLY
    columns: tuple[str, ...] = ()
    """Columns of the unit table that the function reads."""

    def __call__(self, *inputs: Any, **arguments: Any) -> Any:
        """Call the function. A note that names the function is added to its errors. An error ends the job,
        because a restarted trainer would get it again."""
        try:
            return self.function(*inputs, **arguments)
        except Exception as error:
            error.add_note(f"`{self.function.__name__}` is a part of the job's objective.")
            error.restart_helps = False  # type: ignore[attr-defined]
            raise

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function; `inspect.signature` of the part returns its signature."""
        return self.function

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the mistakes in a job that uses this part with the `arguments` of `field`."""
        if unknown := set(self.columns) - set(COLUMNS):
            yield Mistake(
                field.removesuffix("_args"),
                f"it needs the columns {', '.join(sorted(unknown))}, and a unit table has none of that name",
                f"The columns are {', '.join(COLUMNS)}",
            )
        if "teacher" in self.columns:
            yield from _teacher_is_one(job, field.removesuffix("_args"))


def _teacher_is_one(job: JobConfig, part: str) -> Iterator[Mistake]:
    teacher, temperature = job.trainer.teacher, job.rollout.sampling.temperature
    if (teacher.model is None) is not bool(teacher.urls):
        said = "none is named" if teacher.model is None else "both a folder and servers are named"
        yield Mistake(
            "trainer.teacher",
            f"the objective compares with a teacher, and {said}",
            "Name its folder in trainer.teacher.model, or servers in trainer.teacher.urls",
        )
    if teacher.urls and temperature != 1:
        yield Mistake(
            "rollout.sampling.temperature",
            f"the teacher's servers score at temperature 1, and tokens are sampled at {temperature:g}",
            "Set it to 1, or name the teacher's folder in trainer.teacher.model",
        )


@dataclass(frozen=True, kw_only=True)
class Advantage(ObjectivePart):
    """A part that computes advantages: how much better each sample, segment or unit is than expected."""

    of: Of = "sample"
    needs_group: int = 1
    """Size that a group must have at least; in smaller groups the advantage is always 0."""
    needs_greedy: bool = False
    """Whether each group needs a greedy episode as its baseline."""
    unpenalised: bool = False
    """Whether the advantage ignores a KL penalty on the reward, because the advantage is computed from reward
    components or other figures instead of the reward."""
    losses: tuple[str, ...] = ()
    """Built-in losses that give the documented gradient with this advantage. Empty means that every loss
    does."""

    def __post_init__(self) -> None:
        if self.of not in get_args(Of):
            raise ValueError(f"of={self.of!r}: an advantage is of {' or '.join(map(repr, get_args(Of)))}")

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from super().check_job(job, arguments, field)
        objective, size, group, reward = (
            job.trainer.objective,
            job.rollout.group_size,
            job.buffer.group,
            job.reward,
        )
        least = self.needs_group
        the, fix = f"the {objective.advantage} advantage", f"Set it to {least} or more"
        if self.losses and objective.loss in set(LOSSES.names) - {*self.losses}:
            yield Mistake(
                "trainer.objective.loss",
                f"{the} is the slope of a loss of its own, of which `{objective.loss}` makes another",
                f"Set it to {' or '.join(self.losses)}, and beside it what docs/other-trainings.md says",
            )
        if self.of != "sample" and objective.group_by != "task":
            problem = f"{the} is one of each {self.of}, not of samples that are compared"
            yield Mistake("trainer.objective.group_by", problem, "Leave it out")
        if self.needs_greedy and objective.group_by != "task":
            problem = f"{the} compares whole answers with a greedy one"
            yield Mistake("trainer.objective.group_by", problem, "Leave it out")
        if self.unpenalised and objective.kl.coefficient and objective.kl.place == "reward":
            problem = f"{the} does not read the rewards that the penalty would be taken off"
            yield Mistake("trainer.objective.kl.place", problem, "Set it to loss")
        if "prox" in self.columns and objective.prox in ("reuse", "loglinear"):
            need = f"{the} needs proximal log-probs before the first update"
            problem = f"{need}, and `{objective.prox}` has them with it"
            yield Mistake("trainer.objective.prox", problem, "Set it to auto")
        if self.needs_greedy and not job.rollout.greedy_baseline:
            problem = f"{the} compares with a greedy answer to the task, and there is none"
            yield Mistake("rollout.greedy_baseline", problem, "Set it to true")
        if job.rollout.greedy_baseline and not self.needs_greedy and job.kind == "rl":
            problem = f"{the} makes nothing of a greedy answer, and would count it as a sample"
            yield Mistake("rollout.greedy_baseline", problem, "Set it to false")
        if size < least:
            problem = f"{the} of a group of {_episodes(size)} is always zero, so nothing is learned"
            yield Mistake("rollout.group_size", problem, fix)
            return
        if group.policy == "deadline_partial" and group.min_samples < least:
            cut = _episodes(group.min_samples)
            problem = f"{the} of a group cut down to {cut} is zero, so nothing is learned of it"
            yield Mistake("buffer.group.min_samples", problem, fix)
        masking = [f"reward.{name}.then" for name in OUTCOMES if getattr(reward, name).then == "mask"]
        if masking and reward.min_scored < least:
            left = _episodes(reward.min_scored)
            problem = f"{the} of a group of which {left} is left is zero, so nothing is learned"
            yield Mistake("reward.min_scored", problem, fix)


@dataclass(frozen=True, kw_only=True)
class UnitPart(ObjectivePart):
    """A part for units: a loss or a correction."""

    figures: tuple[str, ...] = ()
    """Names of the returned figures."""


@dataclass(frozen=True, kw_only=True)
class Loss(UnitPart):
    """A part that computes the loss of each unit from its log-prob."""

    corrects: bool = False
    """Whether the loss already applies importance weights of the behaviour policy, so that a correction would
    apply them twice."""
    prox: Literal["", "loglinear"] = ""
    """Value that `prox: auto` becomes for jobs with stale samples and one minibatch per step. With
    `loglinear`, the clip of a loss bounds each unit's distance from the behaviour policy. With `recompute`
    the clip would bound nothing, because before a single update the proximal policy equals the policy."""
    statistic: Callable[..., Tensor] | None = None
    """Function for a loss that is defined over episodes. It takes the arguments of the loss (logp f32 [S],
    units, keyword arguments) and returns f32 [S].

    The loss reads the statistic's mean over each unit's episode from `units["episode_mean"]`. The number of
    units in that episode is in `units["episode_units"]`. Both values cover the whole episode, whatever the
    packing. The gradient of a unit's mean goes only to the unit's own log-prob. The sum of these gradients
    over the episode is the full gradient."""

    def proximal(
        self,
        objective: ObjectiveSection,
        advantage: ObjectivePart,
        correction: Correction,
        *,
        minibatches: int,
        max_staleness: int,
    ) -> str:
        """Return the source of the proximal log-probs for this loss with the other parts.

        The source is `recompute`, `reuse`, `loglinear`, or `behaviour` for the behaviour policy's log-probs.
        `auto` becomes `recompute` if a part needs an extra pass. Otherwise, for stale samples, it is the
        choice that this loss declares (measurements: docs/objectives.md#which-objective-to-choose)."""
        if correction.prox:
            return correction.prox
        if objective.prox != "auto":
            return objective.prox
        penalised = objective.kl.coefficient > 0 and objective.kl.place == "reward"
        over_step = correction.over_step(objective.correction_args)
        read = "prox" in {*self.columns, *correction.columns}
        if over_step or penalised or "prox" in advantage.columns or (minibatches > 1 and read):
            return "recompute"
        stale = max_staleness > 0 and correction.corrects
        return self.prox if self.prox and stale else "reuse"

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from super().check_job(job, arguments, field)
        objective = job.trainer.objective
        if "prox" in self.columns and objective.prox == "reuse" and job.trainer.minibatches > 1:
            yield Mistake(
                "trainer.objective.prox",
                f"`reuse` is wrong with trainer.minibatches = {job.trainer.minibatches}: after the first "
                "update the current policy is no longer the one the step started from",
                "Set it to auto, or trainer.minibatches to 1",
            )


@dataclass(frozen=True, kw_only=True)
class Correction(UnitPart):
    """A part that computes a weight for each unit, for data that older weights sampled."""

    corrects: bool = True
    """Whether the correction is valid for stale units. If it is not, a job with stale units must explicitly
    allow the correction."""
    of: Literal["unit", "step"] = "unit"
    """`step` if the correction compares units; it is then called once with the table of the whole step."""
    prox: Literal["", "behaviour"] = ""
    """`behaviour` if the ratio in the loss is taken against the behaviour policy instead of a proximal
    one."""

    def over_step(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the correction is called once with the whole step. This is so with `of="step"`, and
        with the argument `level: sequence`."""
        return self.of == "step" or arguments.get("level") == "sequence"

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from super().check_job(job, arguments, field)
        if job.kind != "rl":
            return
        objective, bound = job.trainer.objective, job.buffer.max_staleness
        name, chosen = objective.correction, "trainer.objective.correction"
        loss = LOSSES.known(objective.loss)
        weighs_itself = isinstance(loss, Loss) and loss.corrects
        if weighs_itself and (self.corrects or self.prox):
            weighs = f"the {objective.loss} loss weighs by the behaviour policy itself"
            yield Mistake(chosen, f"{weighs}, and `{name}` would do so again", "Set it to none")
        elif isinstance(loss, Loss) and self.prox and "prox" not in loss.columns:
            yield Mistake(
                chosen,
                f"`{name}` leaves it to the ratio of the loss to make up for stale samples, and the "
                f"{objective.loss} loss has none",
                "Set it to decoupled",
            )
        if bound > 0 and not (self.corrects or weighs_itself or objective.allow_uncorrected):
            yield Mistake(
                chosen,
                f"`{name}` with buffer.max_staleness = {bound} trains on stale units as if they were fresh",
                "Set it to decoupled, or max_staleness to 0, or trainer.objective.allow_uncorrected to true "
                "for an experiment",
            )
        if self.over_step(arguments) and objective.prox in ("reuse", "loglinear"):
            problem = (
                f"`{name}` compares the units of a whole step, which takes a pass over it first; "
                f"`{objective.prox}` saves that pass"
            )
            yield Mistake("trainer.objective.prox", problem, "Set it to auto")
        if self.prox and objective.prox != "auto":
            problem = f"`{name}` takes the behaviour policy for the proximal one"
            yield Mistake("trainer.objective.prox", problem, "Leave it out")


def _declares(
    kind: Callable[Concatenate[Callable[..., Any], P], K],
) -> Callable[P, Callable[[Callable[..., Any]], K]]:
    """Return the decorator for a kind of part. Its arguments are the kind's fields."""

    def declare(*args: P.args, **fields: P.kwargs) -> Callable[[Callable[..., Any]], K]:
        part: Any = kind(len, *args, **fields)  # raises on wrong fields at the decorator's line
        return lambda function: replace(part, function=function)

    return declare


advantage = _declares(Advantage)
loss = _declares(Loss)
correction = _declares(Correction)


def with_figures(
    part: UnitPart, values: Tensor, units: UnitTable, arguments: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call the part, and return its result and its figures. Raises `ObjectiveError` if the figures are not
    exactly the declared ones."""
    from trainer_service.errors import ObjectiveError

    result = part(values, units, **arguments)
    found, figures = result if isinstance(result, tuple) else (result, {})
    name = part.function.__name__
    if set(figures) != set(part.figures):
        raise ObjectiveError(f"{name} declares the figures {part.figures}, but returns {tuple(figures)}.")
    for what, each in (("", found), *((f" for {figure}", each) for figure, each in figures.items())):
        of_shape(f"{name} was to return{what}", each, len(values))
    return found, figures


def of_shape(what: str, values: Tensor, count: int) -> Tensor:
    """Return the values. Raises `ObjectiveError` if they are not a tensor of `count` numbers."""
    from torch import Tensor

    from trainer_service.errors import ObjectiveError

    if not isinstance(values, Tensor):
        kind = type(values)
        raise ObjectiveError(
            f"{what} a tensor of {count} numbers, and returned a {kind.__module__}.{kind.__qualname__}. Make "
            "it one with torch.as_tensor."
        )
    if (shape := tuple(values.shape)) != (count,):
        raise ObjectiveError(f"{what} {count} numbers, and returned a tensor of shape {shape}.")
    return values


def _episodes(count: int) -> str:
    return "one episode" if count == 1 else f"{count} episodes"
