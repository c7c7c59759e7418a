"""The reward `judge`, as a job file asks for it: a language model behind OpenAI-compatible servers grades the
responses."""

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
    """Address of the server up to `/v1`, such as `http://127.0.0.1:8000/v1`; or a list of them, among which
    requests are balanced."""
    model: str = Field(min_length=1)
    """Name of the model, as the server knows it."""
    template: Annotated[str, AfterValidator(check_template)] = TEMPLATE
    """The question, with `{prompt}`, `{response}`, `{ground_truth}`, `{data_source}`, `{ability}` and
    `{extra_info.NAME}` filled in; other braces stay as they are. Without `parse` a sentence about the form of
    the grade follows."""
    quote: Literal["tags", "json", "none"] = "tags"
    """The way in which the response is put in. `tags`: between tags whose name it cannot contain, with a
    sentence that says not to obey it. `json`: as one JSON text. `none`: bare, so that it may pass for a part
    of the template."""
    system: str = ""
    """System message of a chat; none if it is empty. Its placeholders are filled in as in `template`."""
    parse: Annotated[str, AfterValidator(_pattern)] = ""
    """Regular expression that must match the whole last line of the reply. The grade is its one group, or the
    line. If empty, the grade is a JSON field if the servers take a schema (`response_format`), else the last
    line is `Grade: <grade>`. The rest of the reply is ignored, and with a second such line there is no
    grade."""
    scale: Annotated[tuple[float, float], AfterValidator(_scale)] = (0.0, 10.0)
    """Grades that stand for the rewards 0 and 1; others follow in proportion, and a grade outside of them is
    none. The first may be the larger."""
    grades: dict[str, float] = Field(default_factory=dict)
    """Reward of each word that may be the grade, in place of `scale`: `{yes: 1, no: 0}`. Upper and lower case
    count the same."""
    votes: int = Field(default=1, ge=1, le=64)
    """Requests for each response. Without a grade from more than half of them there is no score, or that of
    `reward.on_fault` where the judge grades another answer to the same task."""
    aggregate: Literal["mean", "majority", "median"] = "mean"
    """The reward that several votes give."""
    temperature: float = Field(default=0.0, ge=0)
    seed: int | None = None
    """Seed of the first vote; each further vote adds 1. With None no seed is sent, and a repeated request may
    get another reply."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest reply."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request; a field set to null is left out."""
    max_in_flight: int = Field(default=16, ge=1, le=65_536)
    """Most requests under way."""
    retries: int = Field(default=4, ge=0, le=1000)
    """Repetitions of a request after 408, 409, 425, 429, a status of 500 and above or a broken
    connection, inside `reward.timeout_s`."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key."""

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
        """Return the extra time of a call. A failure on an answer is followed by a try with a neutral answer,
        which shows who was at fault."""
        return timeout_s
