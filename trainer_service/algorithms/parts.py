"""Declaring an advantage, a loss or a correction, built in or of your own.

    from areal_async import advantage

    @advantage(needs_group=2)
    def centred(rewards, groups, *, scale=1.0):
        ...

A job file then names `path.py:centred`, or an installed package declares it as an entry point (see
`areal_async.registry`). Keyword-only parameters are the part's arguments (`advantage_args`, `loss_args`,
`correction_args`, `normaliser_args` under `trainer.objective`); `arguments=` of the decorator may name a
`Section` that says what they may be. What the decorator declares is checked against the job when its file is
read; of a part in a file of yours, which is not run then, before the job starts. A function without a
decorator declares nothing.

| part | called with | returns |
|---|---|---|
| advantage | rewards float [E], groups i64 [E] | f32 [E] |
| loss | logp f32 [S] (gradients flow through it), units `UnitTable` | f32 [S], or that and named shares |
| correction | weight f32 [S] (exp(prox - behaviour)), units `UnitTable` | f32 [S], or that and named shares |
| normaliser | mask bool [S], episode i64 [S], units_of_episode i64 [E] | f32 [S] |

E episodes are those of the step, S units those of one micro-batch. Where the mask is off, columns are 0 and
`weight` is 1. A named share is a bool [S] whose mean is logged with each step as `<name>_share`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_async.config.errors import Mistake

if TYPE_CHECKING:
    from torch import Tensor

    from areal_async.config.base import Section
    from areal_async.config.job import JobConfig

COLUMNS = ("behaviour", "version", "episode", "group", "advantage", "prox")
"""Columns of the unit table that a part can need. `prox` is a computed one, `units["prox"]`: it may cost a
forward pass over the step."""
OUTCOMES = ("on_timeout", "on_error", "on_abstain")


@dataclass(frozen=True)
class ObjectivePart:
    """A function with what it declares. It is called like the function."""

    function: Callable[..., Any]
    Arguments: type[Section] | None = field(default=None, kw_only=True)
    """What its arguments may be; without, they are its keyword-only parameters."""

    def __call__(self, *inputs: Any, **arguments: Any) -> Any:
        return self.function(*inputs, **arguments)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function, whose signature `inspect.signature` gives for the part."""
        return self.function

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """What is wrong with a job that uses this part with `arguments`, which stand in `field`."""
        yield from ()


@dataclass(frozen=True)
class Advantage(ObjectivePart):
    """One number per episode, from the rewards of whole groups."""

    needs_group: int = 1
    """Fewest episodes of a group that say anything."""

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        least, name = self.needs_group, job.trainer.objective.advantage
        chosen, fix = "trainer.objective.advantage", f"Set it to {least} or more"
        size, group, reward = job.rollout.group_size, job.buffer.group, job.reward
        if size < least:
            problem = (
                f"the {name} advantage of a group of {_episodes(size)} is always zero, so nothing is learned"
            )
            yield Mistake("rollout.group_size", problem, fix, (chosen,))
            return
        if group.policy == "deadline_partial" and group.min_samples < least:
            problem = (
                f"the {name} advantage of a group cut down to {_episodes(group.min_samples)} is zero, so "
                "nothing is learned of it"
            )
            yield Mistake("buffer.group.min_samples", problem, fix, ("buffer.group.policy", chosen))
        masking = [f"reward.{name}.then" for name in OUTCOMES if getattr(reward, name).then == "mask"]
        if masking and reward.min_scored < least:
            problem = (
                f"the {name} advantage of a group of which {_episodes(reward.min_scored)} is left is "
                "zero, so nothing is learned"
            )
            yield Mistake("reward.min_scored", problem, fix, ("rollout.group_size", chosen, *masking))


@dataclass(frozen=True)
class UnitPart(ObjectivePart):
    """A part that works on units: a loss or a correction."""

    columns: tuple[str, ...] = ()
    """Columns of the unit table that it reads."""
    shares: tuple[str, ...] = ()
    """Names of the shares that it returns."""


@dataclass(frozen=True)
class Loss(UnitPart):
    """One number per unit, from its log-prob."""

    supervised: bool = False
    """Whether it learns from the units themselves, whoever wrote them: without rewards and a behaviour
    policy."""

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        objective = job.trainer.objective
        if job.kind != "rl":
            return  # supervised training chooses its own
        if self.supervised:
            problem = f"`{objective.loss}` ignores rewards, so an rl job would learn from wrong answers too"
            fix = "Set it to ppo, or `kind` to sft"
            yield Mistake("trainer.objective.loss", problem, fix, ("kind",))
        if "prox" in self.columns and objective.prox == "reuse" and job.trainer.minibatches > 1:
            yield Mistake(
                "trainer.objective.prox",
                f"`reuse` is wrong with trainer.minibatches = {job.trainer.minibatches}: after the first "
                "update the current policy is no longer the one the step started from",
                "Set it to recompute, or trainer.minibatches to 1",
                ("trainer.minibatches",),
            )


@dataclass(frozen=True)
class Correction(UnitPart):
    """A weight per unit for data that older weights sampled."""

    corrects: bool = True
    """Whether stale units may be trained with it; without, the job must say that it is meant."""

    def check_job(self, job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        objective, bound = job.trainer.objective, job.buffer.max_staleness
        if bound > 0 and not self.corrects and not objective.allow_uncorrected:
            yield Mistake(
                "trainer.objective.correction",
                f"`{objective.correction}` with buffer.max_staleness = {bound} trains on stale units as if "
                "they were fresh",
                "Set it to decoupled, or max_staleness to 0, or trainer.objective.allow_uncorrected to true "
                "for an experiment",
                ("buffer.max_staleness", "trainer.objective.allow_uncorrected"),
            )


def advantage(
    *, needs_group: int = 1, arguments: type[Section] | None = None
) -> Callable[[Callable[..., Tensor]], Advantage]:
    """Declare an advantage; `needs_group` is how many episodes of a group it compares at least."""
    return lambda function: Advantage(function, needs_group, Arguments=arguments)


def loss(
    *,
    columns: tuple[str, ...] = (),
    shares: tuple[str, ...] = (),
    supervised: bool = False,
    arguments: type[Section] | None = None,
) -> Callable[[Callable[..., Any]], Loss]:
    """Declare a loss; see the fields of `Loss`."""
    return lambda function: Loss(function, columns, shares, supervised, Arguments=arguments)


def correction(
    *,
    columns: tuple[str, ...] = (),
    shares: tuple[str, ...] = (),
    corrects: bool = True,
    arguments: type[Section] | None = None,
) -> Callable[[Callable[..., Any]], Correction]:
    """Declare a correction; see the fields of `Correction`."""
    return lambda function: Correction(function, columns, shares, corrects, Arguments=arguments)


def _episodes(count: int) -> str:
    return "one episode" if count == 1 else f"{count} episodes"
