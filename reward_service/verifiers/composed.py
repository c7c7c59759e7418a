"""Rewards that are composed of other values: `environment` uses the rewards that the workflow recorded, and
`weighted` uses other rewards.

    reward:
      name: weighted
      args:
        parts:
          - {name: math, weight: 1.0}
          - {name: format_tags, weight: 0.2, args: {tags: [think, answer]}}
          - {name: overlong, weight: 1.0, args: {limit: 4096, buffer: 512}}

The score of `weighted` is the sum of weight * score. The components are the scores of the parts by name, and
the parts' own components as `part.component`. If a part has no score, `weighted` has none either and returns
the part's verdict. If a part cannot judge the answer and this is the answer's fault, that part counts 0.
Rewards of segments, agents or units that parts return are weighted and added too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from areal_async.base.mistakes import Mistake
from areal_async.base.verdicts import Abstain, Failure, Parts, Score, Verdict, settled
from areal_async.config.base import Section
from areal_async.config.registry import REWARDS, WORKFLOWS, PartError
from reward_service.checking import as_verdict, describe
from reward_service.sdk import MARK, Mark, RewardInput, RewardLoadError, load_reward
from reward_service.verifiers import NoArguments, verifier

if TYPE_CHECKING:
    from areal_async.config.job import JobConfig

ENVIRONMENT_REWARD = "reward"


@verifier(NoArguments)
def environment(given: RewardInput, _: NoArguments) -> Score | Abstain:
    """Return the episode's own reward (`ctx.reward(value)`), or the sum of its segments' rewards.

    The sum is used if the workflow recorded only rewards of segments. Rewards with other names become
    components. The text of the answer is not judged. An episode without any reward gets an `Abstain`, not a
    score of 0.
    """
    episode = given.episode
    named = dict(episode.header.rewards)
    of_segments = [value for value in episode.segments.reward.tolist() if not math.isnan(value)]
    if ENVIRONMENT_REWARD in named:
        return Score(named.pop(ENVIRONMENT_REWARD), named)
    if of_segments:
        return Score(math.fsum(of_segments), named)
    if not named:
        return Abstain("the workflow recorded no reward (ctx.reward)")
    names = ", ".join(sorted(named))
    return Abstain(f"the workflow recorded {names}, but no reward called {ENVIRONMENT_REWARD!r}")


def _check_environment(job: JobConfig, _: Mapping[str, Any], field: str) -> Iterator[Mistake]:
    """Yield a mistake if it is certain that the job's workflow records no reward."""
    workflow, arguments = job.rollout.workflow, job.rollout.workflow_args
    records = getattr(WORKFLOWS.known(workflow), "records_reward", None)
    if records is not None and not records(arguments):
        problem = f"`environment` is the reward that the workflow records, and {workflow} records none here"
        fix = "Set it to another reward, or give the workflow an environment"
        yield Mistake(f"{field.removesuffix('args')}name", problem, fix)


environment.check_job = _check_environment  # type: ignore[attr-defined]


# --- a weighted sum ----------------------------------------------------------------------------------


def _runs_in_the_pool(name: str) -> str:
    elsewhere = False
    with contextlib.suppress(PartError):  # the check of its arguments reports an unknown name
        elsewhere = ".py:" not in name and isinstance(REWARDS.find(name), type)
    if elsewhere:
        raise ValueError(f"`{name}` cannot be a part: it is not computed in the pool")
    return name


class WeightedPart(Section):
    """A reward that is part of another."""

    name: Annotated[str, AfterValidator(_runs_in_the_pool)]
    """A built-in reward that runs in the pool, or `path.py:name`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the part's reward, by name, like `reward.args`."""
    weight: float = 1.0
    """Factor of the part's score in the sum."""
    label: str | None = Field(default=None, min_length=1)
    """Name of the part among the components. It is required if two parts use the same reward."""

    @property
    def known_as(self) -> str:
        """Return the label, or else the name of the reward, which is `f` for `path.py:f`."""
        return self.label or self.name.rpartition(":")[2]

    def load(self) -> Callable[[RewardInput], Any]:
        """Return the reward with its arguments, ready for one input. Raises `RewardLoadError`."""
        return _loaded(self.name, json.dumps(self.args, sort_keys=True))


class WeightedArguments(Section):
    parts: tuple[WeightedPart, ...] = Field(min_length=1)
    """Parts of the sum."""

    @model_validator(mode="after")
    def _can_be_told_apart(self) -> WeightedArguments:
        labels = [part.known_as for part in self.parts]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two parts are called {twice[0]!r}: give each a `label` of its own")
        return self

    @staticmethod
    def rewards_inside(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield the place, name and arguments of each reward inside arguments that are not checked yet."""
        parts = arguments.get("parts")
        for index, part in enumerate(parts if isinstance(parts, list | tuple) else ()):
            given = part.get("args", {}) if isinstance(part, Mapping) else None
            if isinstance(given, Mapping) and isinstance(part.get("name"), str):
                yield f"parts.{index}", part["name"], given


def _load_parts(arguments: WeightedArguments) -> None:
    for part in arguments.parts:
        part.load()


@verifier(WeightedArguments, prepare=_load_parts)
async def weighted(given: RewardInput, arguments: WeightedArguments) -> Verdict:
    """Return the weighted sum as a `Score`, or the first verdict of a part without a score.

    If a part raises an error, the result is the same as for that reward alone.
    """
    scores: list[tuple[WeightedPart, Score]] = []
    for part in arguments.parts:
        verdict = await _verdict_of(part, given)
        if not isinstance(verdict, Score):
            return verdict
        scores.append((part, verdict))
    components = {part.known_as: score.value for part, score in scores}
    for part, score in scores:
        components |= {f"{part.known_as}.{name}": value for name, value in score.components.items()}
    value = sum(part.weight * score.value for part, score in scores)
    sandbox = next((score.sandbox for _, score in scores if score.sandbox), "")
    valued = [(part.weight, score.parts) for part, score in scores if score.parts]
    detail = "; ".join(f"{part.known_as}: {score.detail}" for part, score in scores if score.detail)
    return Score(value, components, _sum_of_parts(valued), sandbox, detail)


async def _verdict_of(part: WeightedPart, given: RewardInput) -> Verdict:
    """Call the part with `given`. If the result is not a score, the message of this verdict names the
    part."""
    label, function = part.known_as, part.load()
    try:
        result = function(given)
        verdict = as_verdict(await result if inspect.isawaitable(result) else result, given)
    except Exception as error:
        verdict = Failure("exception", describe(error))
    match verdict := settled(verdict, 0.0):
        case Abstain(reason, sandbox):
            return Abstain(f"{label}: {reason}" if reason else label, sandbox)
        case Failure(kind, message, sandbox):
            return Failure(kind, f"{label}: {message}", sandbox)
    return verdict


@functools.lru_cache(maxsize=64)
def _loaded(name: str, args_text: str) -> Callable[[RewardInput], Any]:
    function: Any = load_reward(name)
    if getattr(function, MARK, Mark()).takes_list:
        raise RewardLoadError(f"the reward {name!r} takes a list of inputs; a part must take one")
    args = json.loads(args_text)
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        raise RewardLoadError(f"the arguments of {name!r} as a part: {error}") from None
    if (preload := getattr(function, "preload", None)) is not None:
        preload(**args)
    return functools.partial(function, **args)


def _sum_of_parts(valued: Sequence[tuple[float, Parts]]) -> Parts | None:
    """Return the weighted sum of the parts' rewards of segments, agents and units.

    The list of units is as long as the longest list of a part. The pool checks the length of this list
    against the episode.
    """
    if not valued:
        return None
    segments: defaultdict[int, float] = defaultdict(float)
    agents: defaultdict[str, float] = defaultdict(float)
    units = [0.0] * max(len(parts.units) for _, parts in valued)
    for weight, parts in valued:
        for index, value in parts.segments.items():
            segments[index] += weight * value
        for name, value in parts.agents.items():
            agents[name] += weight * value
        for at, value in enumerate(parts.units):
            units[at] += weight * value
    return Parts(dict(segments), dict(agents), units)
