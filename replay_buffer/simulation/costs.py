"""Costs of the parts of a job: the file for `areal-async simulate --costs`."""

from __future__ import annotations

import math
import random

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from areal_async.config.base import Section


class Spread(Section):
    """Distribution of a quantity: constant, lognormal with `sigma`, or given by measured `quantiles`."""

    mean: float | None = Field(default=None, ge=0)
    """Mean, before values are limited to `most`."""
    sigma: float = Field(default=0.0, ge=0, le=5)
    """Standard deviation of the logarithm; 0 means constant."""
    most: float | None = Field(default=None, gt=0)
    """Largest value: larger values are reduced to it, as `rollout.sampling.max_new_tokens` truncates an
    answer."""
    quantiles: tuple[float, ...] = ()
    """Quantiles at equally spaced shares, from the smallest to the largest value, instead of a mean. Values
    between them are interpolated."""

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
        """Return a random value."""
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
        """Return the mean of the drawn values. If `most` truncates a lognormal distribution, the mean is
        estimated from many draws."""
        if not self.quantiles and (not self.sigma or self.most is None):
            assert self.mean is not None
            return self.mean if self.most is None else min(self.mean, self.most)
        rng = random.Random(0)
        return sum(self.draw(rng) for _ in range(10_000)) / 10_000


NOTHING = Spread(mean=0.0)


class EngineCosts(Section):
    """One engine with continuous batching. A pass samples a token for each running request, and takes
    `pass_s` + `request_s` · (running requests)."""

    pass_s: float = Field(ge=0)
    """Seconds of a decode pass, independent of the running requests."""
    request_s: float = Field(ge=0)
    """Seconds that each running request adds to a pass; it grows with the length of its context."""
    prompt_token_s: float = Field(default=0.0, ge=0)
    """Seconds to compute one token of a prompt. The samples of a group share their prompt."""
    prefill_s: float = Field(default=0.0, ge=0)
    """Fixed seconds of a prefill pass, in addition to the seconds of its tokens."""
    episode_s: float = Field(default=0.0, ge=0)
    """Seconds of the worker's own work per episode, one episode after the other: rendering, packing, sending.
    On a shared machine (`cores`), the engine waits for a part of this work."""
    recompute: bool = True
    """Whether the KV cache of requests in flight is computed again after an exchange of weights
    (`rollout.update_mode`)."""

    @model_validator(mode="after")
    def _takes_time(self) -> EngineCosts:
        if not self.pass_s + self.request_s:
            raise PydanticCustomError("engine", "pass_s and request_s cannot both be 0")
        return self


class RewardCosts(Section):
    episode_s: Spread = NOTHING
    """Seconds to score one episode."""
    dropped_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups that are dropped because of their verdicts, including drops by
    `dynamic_filtering`."""
    pause_s: float = Field(default=0.0, ge=0)
    """Seconds that an episode waits for its claim and its verdict for the message to the buffer, as both are
    sent in groups."""
    computes: bool = True
    """Whether scoring uses a core of this machine (`cores`), as a reward function does. If not, it waits for
    another machine."""


class TrainerCosts(Section):
    """Costs of the trainer. A step takes `step_s` + `token_s` · (tokens of its episodes, including
    prompts)."""

    step_s: float = Field(default=0.0, ge=0)
    """Seconds of a step, independent of its size."""
    token_s: float = Field(ge=0)
    """Seconds for each token."""
    batch_s: float = Field(default=0.0, ge=0)
    """Seconds from the request for an available batch to its arrival, independent of its size. The trainer
    waits for this time."""
    batch_episode_s: float = Field(default=0.0, ge=0)
    """Further seconds of this wait, for each episode of the batch."""
    ranks: int = Field(default=1, ge=1)
    """Number of ranks for which `token_s` holds. With k times as many ranks, a token takes 1/k of it."""


class PublicationCosts(Section):
    publish_s: float = Field(default=0.0, ge=0)
    """Seconds for which a publication blocks the trainer."""
    publication_s: float = Field(default=0.0, ge=0)
    """Further seconds of a publication, while the next step is trained."""
    fetch_s: float = Field(default=0.0, ge=0)
    """Seconds from the end of a publication until a worker has the weights and begins the exchange."""
    pause_s: float = Field(default=0.0, ge=0)
    """Seconds for which the exchange pauses an engine."""


class MachineCosts(Section):
    """Cores that the services of a job share on one machine. Without `cores`, parts never slow each other
    down."""

    cores: float | None = Field(default=None, gt=0)
    """Cores of the machine."""
    threads: int = Field(default=1, ge=1)
    """Cores that a training step uses."""
    buffer_group_s: float = Field(default=0.0, ge=0)
    """CPU seconds of the buffer and Redis per group. Most of their work is per message, and a group is one
    message with any number of episodes."""
    reward_episode_s: float = Field(default=0.0, ge=0)
    """CPU seconds of the reward service per episode, without the scoring itself."""
    others: float = Field(default=0.0, ge=0)
    """Cores that all other work uses constantly."""


class Costs(Section):
    """Costs of a job's parts. Seconds are for the machine that will run it."""

    prompt_tokens: Spread
    """Tokens of a prompt."""
    answer_tokens: Spread
    """Tokens sampled in an episode."""
    engine: EngineCosts
    trainer: TrainerCosts
    reward: RewardCosts = RewardCosts()
    publication: PublicationCosts = PublicationCosts()
    machine: MachineCosts = MachineCosts()
