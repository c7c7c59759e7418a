"""Arguments of the reward `judge`: a language model behind OpenAI-compatible servers grades the responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from areal_async.config.base import Section
from reward_service.backends import BackendReward, check_template, check_url

TEMPLATE = """\
Grade the answer to a task from 0 (wrong or useless) to 10 (right and complete).

Task:
{prompt}

Answer:
{response}"""


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _addresses(urls: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(check_url(url, "api_key_env") for url in urls)


def _pattern(value: str) -> str:
    try:
        pattern = re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    if pattern.groups > 1:
        raise ValueError(f"it has {pattern.groups} groups; keep one, and write the others as (?:…)")
    return value


def _scale(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] == value[1]:
        raise ValueError("the grades for 0 and for 1 are the same")
    return value


class JudgeArguments(Section):
    """A language model behind an OpenAI-compatible server."""

    base_url: Annotated[tuple[str, ...], BeforeValidator(_several), AfterValidator(_addresses)] = Field(
        min_length=1
    )
    """Address of the server up to `/v1`, such as `http://127.0.0.1:8000/v1`, or a list of addresses. Requests
    are balanced among them."""
    model: str = Field(min_length=1)
    """Name of the model at the server."""
    template: Annotated[str, AfterValidator(check_template)] = TEMPLATE
    """The question to the judge. The placeholders `{prompt}`, `{response}`, `{ground_truth}`,
    `{data_source}`, `{ability}` and `{extra_info.NAME}` are replaced, and other braces stay. Without `parse`,
    a sentence about the form of the grade is appended."""
    quote: Literal["tags", "json", "none"] = "tags"
    """Form of the response in the question. `tags`: the response is between tags with a name that the
    response cannot contain, and a sentence tells the judge not to obey the response. `json`: the response is
    one JSON text. `none`: the response has no marks, so it may imitate a part of the template."""
    system: str = ""
    """System message of a chat, filled in like `template`. If it is empty, there is no system message."""
    parse: Annotated[str, AfterValidator(_pattern)] = ""
    """Regular expression that must match the whole last line of the reply. The grade is the text of the
    expression's group, or the whole line if the expression has no group. If `parse` is empty and the servers
    accept a schema (`response_format`), the grade is a field of a JSON reply. If the servers accept no
    schema, the last line must be `Grade: <grade>`. The rest of the reply is ignored, but a reply with two
    lines that match has no grade."""
    scale: Annotated[tuple[float, float], AfterValidator(_scale)] = (0.0, 10.0)
    """The grades that correspond to the rewards 0 and 1. Grades between these two are converted in
    proportion, and other grades are invalid. The first grade may be the larger one."""
    grades: dict[str, float] = Field(default_factory=dict)
    """Reward for each word that may be the grade, such as `{yes: 1, no: 0}`, instead of `scale`. Case does
    not matter."""
    votes: int = Field(default=1, ge=1, le=64)
    """Requests for each response. More than half of them must return a grade. Otherwise the episode has no
    score. But if the judge grades a neutral answer to the same task, the episode gets the score
    `reward.on_fault.score`."""
    aggregate: Literal["mean", "majority", "median"] = "mean"
    """Rule that combines several votes into one reward."""
    temperature: float = Field(default=0.0, ge=0)
    seed: int | None = None
    """Seed of the first vote. Further votes count up. None: no seed is sent, so a repeated request may get
    another answer."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest reply in tokens."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request. A field set to null is left out."""
    max_images: int = Field(default=8, ge=0, le=64)
    """Most images of an episode that the judge sees. If there are more, it sees the first and the last ones.
    With 0, it reads only texts."""
    max_in_flight: int = Field(default=16, ge=1, le=65_536)
    """Largest number of requests in flight."""
    retries: int = Field(default=4, ge=0, le=1000)
    """Retries of a request after status 408, 409, 425, 429, 500 or above, or a broken connection, within
    `reward.timeout_s`."""
    api_key_env: str = ""
    """Name of the environment variable with the key."""

    @model_validator(mode="after")
    def _votes_can_differ(self) -> JudgeArguments:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError("several votes at temperature 0 are all the same: set temperature above 0")
        return self


class JudgeReward(BackendReward):
    """The part `judge`."""

    Arguments = JudgeArguments
    implementation = "reward_service.backends.judge.backend:Judge"

    @classmethod
    def patience_s(cls, arguments: Mapping[str, Any], timeout_s: float) -> float:
        """Return the time for a second request. After a reply without a grade, the judge is asked to grade a
        neutral answer. The result shows whether the response or the judge is at fault."""
        return timeout_s
