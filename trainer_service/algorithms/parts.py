"""Declaring an advantage, a loss or a correction, built in or of your own.

    from areal_async import advantage

    @advantage(needs_group=2)
    def centred(samples, *, scale=1.0):
        return scale * samples.centred(samples.reward)

A job file then names `path.py:centred`, or an installed package declares it as an entry point (see
`areal_async.config.registry`). Keyword-only parameters are the part's arguments (`advantage_args`,
`loss_args`, `correction_args`, `normaliser_args` under `trainer.objective`); their annotations say what they
may be, as in `scale: Annotated[float, Field(gt=0)] = 1.0`. What the decorator declares is checked against the
job when its file is read; of a part in a file of yours, which is not run then, before the job starts. A
function without a decorator declares nothing.

| part | called with | returns |
|---|---|---|
| advantage `of="sample"` | `Samples` (`credit.py`): N of them, as `group_by` says | float [N] |
| advantage `of="segment"` | `SegmentTable` (`table.py`): G segments with their rewards | float [G] |
| advantage `of="unit"` | `UnitTable`: U units of this rank, with `reward` | float [U], or columns by name |
| loss | logp f32 [S] (gradients flow through it), units `UnitTable` | f32 [S], or that and figures |
| correction | weight f32 [S] (exp(prox - behaviour)), units `UnitTable` | f32 [S], or that and figures |
| normaliser | units `UnitTable`, totals `Totals` (`normalisers.py`) | f32 [S] |

S units are those of one micro-batch; a correction `of="step"` is called once with those of the whole step,
and may sum over its episodes and all of it. Where the mask is off, columns are 0 and `weight` is 1. A figure
is a tensor [S], bool or f32, whose mean over units is logged with each step under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
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
"""Columns that every table has."""
SEGMENT_COLUMNS = ("segment", "turn", "agent", "anchor", "unit", "truncated", "reward")
"""Columns of a table with segments. `reward` f64 is the reward of the unit (`credit.py`)."""
COMPUTED_COLUMNS = ("advantage", "return", "prox", "ref", "value", "teacher", "process", "entropy")
"""Columns that the trainer computes. All but the first two cost a forward pass over the step: by the policy
(`prox`, `entropy`) or by another model."""
COLUMNS = (*TABLE_COLUMNS, *SEGMENT_COLUMNS, *COMPUTED_COLUMNS)
OUTCOMES = ("on_timeout", "on_error", "on_abstain")
P = ParamSpec("P")
K = TypeVar("K")
Of = Literal["sample", "segment", "unit"]
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
"""Types of arguments of parts."""


@dataclass(frozen=True)
class ObjectivePart:
    """A function with its declarations. It is called like the function."""

    function: Callable[..., Any]
    _: KW_ONLY
    columns: tuple[str, ...] = ()
    """Columns of the unit table that it reads."""

    def __call__(self, *inputs: Any, **arguments: Any) -> Any:
        """Call the function. An error gets a note with the part's name and ends the job, because a restarted
        trainer would raise it again."""
        try:
            return self.function(*inputs, **arguments)
        except Exception as error:
            error.add_note(f"`{self.function.__name__}` is a part of the job's objective.")
            error.restart_helps = False  # type: ignore[attr-defined]
            raise

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the function. `inspect.signature` uses its signature for the part."""
        return self.function

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """Yield the mistakes of a job that uses this part with `arguments`. `field` is the field with the
        arguments."""
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
            (part,),
        )
    if teacher.urls and temperature != 1:
        yield Mistake(
            "rollout.sampling.temperature",
            f"the teacher's servers score at temperature 1, and tokens are sampled at {temperature:g}",
            "Set it to 1, or name the teacher's folder in trainer.teacher.model",
            ("trainer.teacher.urls",),
        )


@dataclass(frozen=True, kw_only=True)
class Advantage(ObjectivePart):
    """A part that says how much better each sample, segment or unit did than expected."""

    of: Of = "sample"
    needs_group: int = 1
    """Fewest episodes of a group that say anything."""
    needs_greedy: bool = False
    """Whether each group has an episode that was answered greedily, as its baseline."""
    unpenalised: bool = False
    """Whether it reads no rewards that a KL penalty can be taken off: components, or other figures."""
    losses: tuple[str, ...] = ()
    """Built-in losses for which its gradient is correct; none means any."""

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
        least, chosen = self.needs_group, "trainer.objective.advantage"
        the, fix = f"the {objective.advantage} advantage", f"Set it to {least} or more"
        wrong = partial(Mistake, involves=(chosen,))
        if self.losses and objective.loss in set(LOSSES.names) - {*self.losses}:
            yield wrong(
                "trainer.objective.loss",
                f"{the} is the slope of a loss of its own, of which `{objective.loss}` makes another",
                f"Set it to {' or '.join(self.losses)}, and beside it what docs/other-trainings.md says",
            )
        if self.of != "sample" and objective.group_by != "task":
            problem = f"{the} is one of each {self.of}, not of samples that are compared"
            yield wrong("trainer.objective.group_by", problem, "Leave it out")
        if self.needs_greedy and objective.group_by != "task":
            problem = f"{the} compares whole answers with a greedy one"
            yield wrong("trainer.objective.group_by", problem, "Leave it out")
        if self.unpenalised and objective.kl.coefficient and objective.kl.place == "reward":
            problem = f"{the} does not read the rewards that the penalty would be taken off"
            yield wrong("trainer.objective.kl.place", problem, "Set it to loss")
        if "prox" in self.columns and objective.prox in ("reuse", "loglinear"):
            need = f"{the} needs proximal log-probs before the first update"
            problem = f"{need}, and `{objective.prox}` has them with it"
            yield wrong("trainer.objective.prox", problem, "Set it to auto")
        if self.needs_greedy and not job.rollout.greedy_baseline:
            problem = f"{the} compares with a greedy answer to the task, and there is none"
            yield wrong("rollout.greedy_baseline", problem, "Set it to true")
        if job.rollout.greedy_baseline and not self.needs_greedy and job.kind == "rl":
            problem = f"{the} makes nothing of a greedy answer, and would count it as a sample"
            yield wrong("rollout.greedy_baseline", problem, "Set it to false")
        if size < least:
            problem = f"{the} of a group of {_episodes(size)} is always zero, so nothing is learned"
            yield wrong("rollout.group_size", problem, fix)
            return
        if group.policy == "deadline_partial" and group.min_samples < least:
            cut = _episodes(group.min_samples)
            problem = f"{the} of a group cut down to {cut} is zero, so nothing is learned of it"
            yield Mistake("buffer.group.min_samples", problem, fix, ("buffer.group.policy", chosen))
        masking = [f"reward.{name}.then" for name in OUTCOMES if getattr(reward, name).then == "mask"]
        if masking and reward.min_scored < least:
            left = _episodes(reward.min_scored)
            problem = f"{the} of a group of which {left} is left is zero, so nothing is learned"
            yield Mistake("reward.min_scored", problem, fix, ("rollout.group_size", chosen, *masking))


@dataclass(frozen=True, kw_only=True)
class UnitPart(ObjectivePart):
    """A part that works on units: a loss or a correction."""

    figures: tuple[str, ...] = ()
    """Names of the figures that it returns."""


@dataclass(frozen=True, kw_only=True)
class Loss(UnitPart):
    """One number per unit, from its log-prob."""

    clipped: bool = False
    """Whether it holds the policy near the proximal one, which does nothing while the two are the same."""
    corrects: bool = False
    """Whether it weighs by the behaviour policy itself, so that a correction would do so twice."""
    prox: Literal["", "loglinear"] = ""
    """The choice of `prox: auto` for stale samples, with one minibatch a step: `loglinear` if the loss then
    bounds how far each unit is from the behaviour policy, and otherwise bounds nothing."""
    statistic: Callable[..., Tensor] | None = None
    """A function for a loss that is defined over episodes: it takes logp f32 [S] and units, like the loss
    with its arguments, that returns f32 [S]. The loss finds its mean over each unit's episode as
    `units["episode_mean"]`, and how many units that has as `units["episode_units"]`, whatever the packing:
    the value is that of the whole episode, and the gradient of a unit's mean goes to the unit's own log-prob;
    summed over the episode that is the gradient of the whole."""

    def proximal(
        self,
        objective: ObjectiveSection,
        advantage: ObjectivePart,
        correction: Correction,
        *,
        minibatches: int,
        max_staleness: int,
    ) -> str:
        """Return the source of proximal log-probs with these parts: `recompute`, `reuse`, `loglinear`, or
        `behaviour` for the log-probs of the behaviour policy. `auto` takes a pass if some part needs one;
        otherwise, for stale samples, the choice that this loss declares
        (docs/objectives.md#which-objective-to-choose has the measurements)."""
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
                ("trainer.minibatches",),
            )


@dataclass(frozen=True, kw_only=True)
class Correction(UnitPart):
    """A weight per unit for data that older weights sampled."""

    corrects: bool = True
    """Whether stale units may be trained with it; without, the job must say that it is meant."""
    of: Literal["unit", "step"] = "unit"
    """`step` if it compares units. It is then called once with the table of the whole step."""
    prox: Literal["", "behaviour"] = ""
    """`behaviour` where the loss takes its ratio against the behaviour policy instead of a proximal one."""

    def over_step(self, arguments: Mapping[str, Any]) -> bool:
        """Whether it is called once with the whole step; it may be with `level: sequence` alone."""
        return self.of == "step" or arguments.get("level") == "sequence"

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from super().check_job(job, arguments, field)
        if job.kind != "rl":
            return
        objective, bound = job.trainer.objective, job.buffer.max_staleness
        name, chosen, also = objective.correction, "trainer.objective.correction", "trainer.objective.loss"
        loss = LOSSES.known(objective.loss)
        weighs_itself = isinstance(loss, Loss) and loss.corrects
        if weighs_itself and (self.corrects or self.prox):
            weighs = f"the {objective.loss} loss weighs by the behaviour policy itself"
            yield Mistake(chosen, f"{weighs}, and `{name}` would do so again", "Set it to none", (also,))
        elif isinstance(loss, Loss) and self.prox and "prox" not in loss.columns:
            yield Mistake(
                chosen,
                f"`{name}` leaves it to the ratio of the loss to make up for stale samples, and the "
                f"{objective.loss} loss has none",
                "Set it to decoupled",
                (also,),
            )
        if bound > 0 and not (self.corrects or weighs_itself or objective.allow_uncorrected):
            yield Mistake(
                chosen,
                f"`{name}` with buffer.max_staleness = {bound} trains on stale units as if they were fresh",
                "Set it to decoupled, or max_staleness to 0, or trainer.objective.allow_uncorrected to true "
                "for an experiment",
                ("buffer.max_staleness", "trainer.objective.allow_uncorrected"),
            )
        if self.over_step(arguments) and objective.prox in ("reuse", "loglinear"):
            problem = (
                f"`{name}` compares the units of a whole step, which takes a pass over it first; "
                f"`{objective.prox}` saves that pass"
            )
            yield Mistake("trainer.objective.prox", problem, "Set it to auto", (chosen,))
        if self.prox and objective.prox != "auto":
            problem = f"`{name}` takes the behaviour policy for the proximal one"
            yield Mistake("trainer.objective.prox", problem, "Leave it out", (chosen,))


def _declares(
    kind: Callable[Concatenate[Callable[..., Any], P], K],
) -> Callable[P, Callable[[Callable[..., Any]], K]]:
    """Return the decorator that declares a part of a kind; it takes the kind's fields by name."""

    def declare(*args: P.args, **fields: P.kwargs) -> Callable[[Callable[..., Any]], K]:
        part: Any = kind(len, *args, **fields)  # refuses wrong fields where they stand
        return lambda function: replace(part, function=function)

    return declare


advantage = _declares(Advantage)
loss = _declares(Loss)
correction = _declares(Correction)


def with_figures(
    part: UnitPart, values: Tensor, units: UnitTable, arguments: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call the part and return its result and exactly the figures that it declares."""
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
    """Return the values, if they are a tensor of `count` numbers. Raises `ObjectiveError`."""
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
