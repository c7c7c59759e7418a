"""Costs of the parts of a job: the file that `areal-async simulate --costs` reads."""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from areal_async.base.mistakes import ConfigError, Mistake, in_words, value_in_words
from areal_async.base.yaml_file import read_mapping
from areal_async.config.base import Section


class Spread(Section):
    """A quantity that varies: constant, lognormal with `sigma`, or as measured by `quantiles`."""

    mean: float | None = Field(default=None, ge=0)
    """Mean, before `most` cuts anything off."""
    sigma: float = Field(default=0.0, ge=0, le=5)
    """Standard deviation of the logarithm; 0 is constant."""
    most: float | None = Field(default=None, gt=0)
    """Largest length: a larger one is cut to this, as `rollout.sampling.max_new_tokens` cuts an answer."""
    quantiles: tuple[float, ...] = ()
    """Values at even shares from the smallest to the largest, used instead of a mean. Draws interpolate
    between them."""

    @model_validator(mode="after")
    def _is_given_once(self) -> Spread:
        if (self.mean is None) == (not self.quantiles):
            raise PydanticCustomError("spread", "needs either mean or quantiles")
        if len(self.quantiles) == 1 or list(self.quantiles) != sorted(self.quantiles):
            raise PydanticCustomError(
                "spread", "needs two quantiles at least, each no less than the one before"
            )
        return self

    def draw(self, rng: random.Random) -> float:
        """A value."""
        if self.quantiles:
            place = rng.random() * (len(self.quantiles) - 1)
            low = int(place)
            value = self.quantiles[low] + (place - low) * (self.quantiles[low + 1] - self.quantiles[low])
        else:
            assert self.mean is not None
            value = self.mean
            if self.sigma:
                value *= math.exp(rng.gauss(-0.5 * self.sigma**2, self.sigma))
        return value if self.most is None else min(value, self.most)

    def expected(self) -> float:
        """Return the mean of the drawn values. If `most` cuts a lognormal, it is the mean of many draws."""
        if not self.quantiles and (not self.sigma or self.most is None):
            assert self.mean is not None
            return self.mean if self.most is None else min(self.mean, self.most)
        rng = random.Random(0)
        return sum(self.draw(rng) for _ in range(10_000)) / 10_000


NOTHING = Spread(mean=0.0)


class EngineCosts(Section):
    """One engine, by continuous batching: a pass samples a token for each request that it runs, and takes
    `pass_s` + `request_s` · (requests that run)."""

    pass_s: float = Field(ge=0)
    """Seconds of a decode pass, however few requests run."""
    request_s: float = Field(ge=0)
    """Seconds that each running request adds to a pass; it grows with the length of its context."""
    prompt_token_s: float = Field(default=0.0, ge=0)
    """Seconds to compute one token of a prompt. The samples of a group share theirs."""
    prefill_s: float = Field(default=0.0, ge=0)
    """Seconds of a pass over prompts, besides its tokens."""
    episode_s: float = Field(default=0.0, ge=0)
    """Seconds of the worker's own work for each episode, one after the other: rendering, packing, sending."""
    recompute: bool = True
    """True if a weight update recomputes requests in flight (rollout.update_mode)."""

    @model_validator(mode="after")
    def _takes_time(self) -> EngineCosts:
        if not self.pass_s + self.request_s:
            raise PydanticCustomError("engine", "pass_s and request_s cannot both be 0")
        return self


class RewardCosts(Section):
    episode_s: Spread = NOTHING
    """Seconds to score one episode."""
    dropped_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups that their verdicts have dropped; `dynamic_filtering` drops such groups too."""
    computes: bool = True
    """Whether scoring takes a core (`cores`), as a function does, or waits for somebody else's machine."""


class TrainerCosts(Section):
    """A step takes `step_s` + `token_s` · (tokens of its episodes, prompts among them)."""

    step_s: float = Field(default=0.0, ge=0)
    """Seconds of a step, however small."""
    token_s: float = Field(ge=0)
    """Seconds for each token."""
    batch_s: float = Field(default=0.0, ge=0)
    """Seconds from asking for a batch that is there to having it: the trainer waits."""
    ranks: int = Field(default=1, ge=1)
    """Ranks that `token_s` is of; with k times as many a token takes 1/k of it."""


class PublicationCosts(Section):
    publish_s: float = Field(default=0.0, ge=0)
    """Seconds for which a publication keeps the trainer."""
    publication_s: float = Field(default=0.0, ge=0)
    """Seconds that it takes besides, while the next step is trained."""
    fetch_s: float = Field(default=0.0, ge=0)
    """Seconds from then until a worker has the weights and exchanges them."""
    pause_s: float = Field(default=0.0, ge=0)
    """Seconds for which the exchange keeps an engine."""


class MachineCosts(Section):
    """Cores that the services of a job share on one machine. Without it nobody slows down anybody."""

    cores: float | None = Field(default=None, gt=0)
    """Cores of the machine."""
    threads: int = Field(default=1, ge=1)
    """Cores that a training step keeps busy."""
    buffer_group_s: float = Field(default=0.0, ge=0)
    """CPU seconds of the buffer and Redis for each group: most of their work is for messages, and a group is
    one, whatever number of episodes it has."""
    reward_episode_s: float = Field(default=0.0, ge=0)
    """CPU seconds of the reward service for each episode, besides the scoring itself."""
    others: float = Field(default=0.0, ge=0)
    """Cores that everything else takes all the time."""


class Costs(Section):
    """The costs of a job's parts. Seconds are of the machine that it is to run on."""

    prompt_tokens: Spread
    """Tokens of a prompt."""
    answer_tokens: Spread
    """Tokens sampled in an episode."""
    engine: EngineCosts
    trainer: TrainerCosts
    reward: RewardCosts = RewardCosts()
    publication: PublicationCosts = PublicationCosts()
    machine: MachineCosts = MachineCosts()


def read_costs(path: Path) -> Costs:
    """Return the costs in a YAML file. Raises `ConfigError` with every mistake in it."""
    content = read_mapping(path)
    try:
        return Costs.model_validate(content)
    except ValidationError as error:
        raise ConfigError(str(path), in_words(error.errors(include_url=False), _mistake)) from None


def _mistake(detail: Mapping[str, Any]) -> Mistake:
    """Return one entry of `ValidationError.errors()` as a mistake of the file."""
    field, found = ".".join(map(str, detail["loc"])) or "the file", detail.get("input")
    section = _section(detail["loc"][:-1])
    if detail["type"] == "missing":
        info = section.model_fields.get(str(detail["loc"][-1])) if section else None
        about = " ".join((info.description or "").split()) if info else ""
        return Mistake(field, "this field is missing", f"Add it. {about}".rstrip(". "))
    if detail["type"] == "extra_forbidden" and section is not None:
        known = list(section.model_fields)
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Remove it; the fields here are {', '.join(known)}"
        return Mistake(field, "there is no such field", fix)
    if (words := value_in_words(detail)) is not None:
        return Mistake(field, f"{found!r} {words[0]}", words[1])
    if detail["type"] == "model_type":
        return Mistake(field, f"{found!r} is not a section", "Give indented `key: value` lines under it")
    return Mistake(field, f"it {detail['msg']}", "Correct it (docs/staleness.md#predict-a-job)")


def _section(location: tuple[int | str, ...]) -> type[Section] | None:
    """Return the section at a path in the file."""
    model: type[Section] = Costs
    for name in location:
        info = model.model_fields.get(str(name))
        kinds = (info.annotation, *get_args(info.annotation)) if info is not None else ()
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)
        if inner is None:
            return None
        model = inner
    return model
