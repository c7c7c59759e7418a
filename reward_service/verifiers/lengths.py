"""Rewards that shape length: `overlong`, `repetition` and `cosine_length`. The first two are meant as parts
of `weighted`.

`overlong` is DAPO's soft overlong punishment (Yu et al., 2025, eq. 13). With length y, limit L and buffer C:
0 for y <= L - C; ((L - C) - y) / C for L - C < y <= L; -1 for y > L.

`repetition`: with n-grams of words (or of characters) penalty * (1 - different / all), so 0 where none
repeats. The form used by open-r1 for the n-gram penalty of Yeo et al. (2025, "Demystifying Long
Chain-of-Thought Reasoning in LLMs"), which there is given to single tokens.

`cosine_length` is the cosine reward of Yeo et al. With length y and limit L, an answer is worth r_L + (r_0 -
r_L) * (1 + cos(pi * y / L)) / 2, which goes from r_0 at length 0 to r_L at L; right answers have the pair
(`right_short`, `right_long`), wrong ones (`wrong_short`, `wrong_long`). One that reaches L, or was cut off,
is worth `exceeded` whether right or wrong. The defaults are this project's own.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

from pydantic import Field, model_validator

from areal_async.config.base import Section
from areal_async.rpc.verdicts import Score, Verdict
from reward_service.sdk import RewardInput
from reward_service.verifiers import verifier
from reward_service.verifiers.composed import PartSection, outcome, prepare_parts

LengthIn = Literal["tokens", "words", "characters"]
MOST_WORDS = 200_000
"""Words looked at, from the start of the response: bounded work for one of any length."""


class OverlongArguments(Section):
    limit: int = Field(ge=1)
    """Length beyond which the penalty is -1."""
    buffer: int = Field(ge=1)
    """Length below the limit over which the penalty grows."""
    unit: LengthIn = "tokens"
    """What length is counted in."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongArguments:
        if self.buffer > self.limit:
            raise ValueError(f"buffer = {self.buffer} is above limit = {self.limit}")
        return self


@verifier(OverlongArguments)
def overlong(given: RewardInput, arguments: OverlongArguments) -> float:
    """A number from -1 to 0. An answer that was cut off at its length limit is longer than `limit`."""
    if given.truncated:
        return -1.0
    beyond = arguments.limit - arguments.buffer - length_of(given, arguments.unit)
    return min(0.0, max(-1.0, beyond / arguments.buffer))


class RepetitionArguments(Section):
    n: int = Field(default=4, ge=1, le=100)
    """Length of an n-gram."""
    penalty: float = Field(default=-1.0, le=0)
    """Reward of a response that only repeats itself."""
    unit: Literal["words", "characters"] = "words"
    """What an n-gram is made of."""


@verifier(RepetitionArguments)
def repetition(given: RewardInput, arguments: RepetitionArguments) -> Score:
    """A number from `penalty` to 0. Component `repeated`: the share of n-grams that were there before. A
    response shorter than n repeats nothing."""
    items = given.response.lower().split() if arguments.unit == "words" else list(given.response)
    items, n = items[:MOST_WORDS], arguments.n
    total = len(items) - n + 1
    if total < 1:
        return Score(0.0, {"repeated": 0.0})
    different = len({tuple(items[i : i + n]) for i in range(total)})
    repeated = 1 - different / total
    return Score(arguments.penalty * repeated, {"repeated": repeated})


class CosineLengthArguments(Section):
    of: PartSection
    """The reward that says what is right."""
    limit: int = Field(ge=1)
    """Length from which the reward is `exceeded`."""
    threshold: float = 1.0
    """Least score of what is right."""
    right_short: float = 2.0
    """Reward of a right answer of length 0."""
    right_long: float = 1.0
    """Reward of a right answer just below the limit."""
    wrong_short: float = -1.0
    """Reward of a wrong answer of length 0."""
    wrong_long: float = 0.0
    """Reward of a wrong answer just below the limit."""
    exceeded: float = -1.0
    """Reward of what reaches the limit, or was cut off."""
    unit: LengthIn = "tokens"
    """What length is counted in."""


@verifier(CosineLengthArguments, prepare=lambda arguments: prepare_parts([arguments.of]))
def cosine_length(given: RewardInput, arguments: CosineLengthArguments) -> Any:
    """A Score by rightness and length; where the reward `of` gives no score, its verdict. Components: `right`
    (0 or 1), `length` in `unit`, and that reward's score under its name. Raises PartFailed where that reward
    fails."""
    a = arguments
    judged = outcome(a.of, a.of.name, given)

    def shaped(found: Verdict) -> Verdict:
        if not isinstance(found, Score):
            return found
        right, length = found.value >= a.threshold, length_of(given, a.unit)
        short, long = (a.right_short, a.right_long) if right else (a.wrong_short, a.wrong_long)
        cut = given.truncated or length >= a.limit
        value = a.exceeded if cut else cosine(length / a.limit, short, long)
        components = {"right": float(right), "length": float(length), a.of.name: found.value}
        return Score(value, components, sandbox=found.sandbox)

    async def later() -> Verdict:
        return shaped(await judged)

    return later() if inspect.isawaitable(judged) else shaped(judged)


def cosine(share: float, short: float, long: float) -> float:
    """The value at `share`: from `short` at 0 to `long` at 1, along half a cosine."""
    return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


def length_of(given: RewardInput, unit: LengthIn) -> int:
    """Sampled tokens, words or characters. Raises ValueError for tokens of an input that has only texts."""
    if unit == "characters":
        return len(given.response)
    if unit == "words":
        return len(given.response.split())
    if given.response and not given.response_tokens:
        raise ValueError(
            "the number of tokens is not known of an input of texts: set unit to words or characters"
        )
    return given.response_tokens
