"""`reward.args` of the rewards that are models: `reward_model` and `judge`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from areal_async.config.base import Section

TEMPLATE = """\
Grade the answer to a task from 0 (wrong or useless) to 10 (right and complete).

Task:
{prompt}

Answer:
{response}

Reason briefly, then end with one line of this form and nothing after it:
Grade: <number from 0 to 10>"""
"""What a judge is asked unless the job says otherwise."""
GRADE = r"(?i)grade\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
"""Where its answer says the grade, to go with `TEMPLATE`."""
MODEL_START_LIMIT_S = 600.0
"""For loading a reward model, also where its process is started again."""
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|mps|xpu(:\d+)?")


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class RewardModelArguments(Section):
    """A sequence-classification model in a process of its own."""

    model: str = Field(min_length=1)
    """Directory of a Hugging Face model with a classification head, relative to the job file; or the name of
    one in the hub's cache. Only safetensors are read."""
    template: str = "{prompt}{response}"
    """What the model reads, with `{prompt}`, `{response}`, `{ground_truth}`, `{data_source}`, `{ability}` and
    `{extra_info.NAME}` filled in. `chat`: the chat template of the model's own tokenizer, with the prompt as
    the user's message and the response as the assistant's."""
    label: str | int | None = None
    """Which class is the reward, by name or index, where the model has several; its value is then a
    probability."""
    activation: Literal["none", "sigmoid"] = "none"
    """What is done to the number of a model with one output."""
    max_batch: int = Field(default=32, ge=1, le=65_536)
    """Most texts computed together."""
    max_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens computed together, padding included; a single longer text goes alone."""
    max_wait_ms: float = Field(default=5.0, ge=0)
    """How long an idle model waits for company for a text."""
    max_tokens: int = Field(default=4096, ge=1)
    """Longest text, in tokens of the reward model; less where the model can read less."""
    on_long: Literal["fail", "cut"] = "fail"
    """A longer text: `fail` gives the verdict `error`; `cut` reads its end, and says so in the component
    `cut_tokens`."""
    device: str = "auto"
    """`auto`: a GPU where there is one. Else `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, else what the model was saved in."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Of the computation on a CPU."""

    @field_validator("template")
    @classmethod
    def _shows_the_response(cls, value: str) -> str:
        if value != "chat" and "{response}" not in value:
            raise ValueError("the template has no {response}, so every response would score the same")
        return value

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str) -> str:
        if not DEVICE.fullmatch(value):
            raise ValueError("write auto, cpu, cuda or cuda:N")
        return value

    @model_validator(mode="after")
    def _one_output_or_several(self) -> RewardModelArguments:
        if self.label is not None and self.activation != "none":
            raise ValueError(
                "`label` is for models with several classes, `activation` for those with one output"
            )
        return self


class JudgeArguments(Section):
    """A language model behind an OpenAI-compatible server."""

    base_url: Annotated[tuple[str, ...], BeforeValidator(_several)] = Field(min_length=1)
    """Address of the server up to `/v1`, such as `http://127.0.0.1:8000/v1`; or a list of them, among which
    requests are balanced."""
    model: str = Field(min_length=1)
    """Name of the model, as the server knows it."""
    api: Literal["chat", "completions"] = "chat"
    """`/chat/completions`, or `/completions` for a model without a chat template."""
    template: str = TEMPLATE
    """What is asked, with `{prompt}`, `{response}`, `{ground_truth}`, `{data_source}`, `{ability}` and
    `{extra_info.NAME}` filled in; other braces stay as they are."""
    system: str = ""
    """System message of a chat; none where it is empty. Filled in as `template`."""
    parse: str = GRADE
    """Regular expression that finds the grade in the reply: its one group, or all that matches."""
    take: Literal["last", "first"] = "last"
    """Which match counts where there are several."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Grades that stand for the rewards 0 and 1; others follow in proportion, and a grade outside of them is
    none. The first may be the larger."""
    grades: dict[str, float] = Field(default_factory=dict)
    """Reward of each word that `parse` may find, in place of `scale`: `{yes: 1, no: 0}`. Upper and lower case
    count the same."""
    votes: int = Field(default=1, ge=1, le=64)
    """Requests for each response."""
    min_votes: int | None = Field(default=None, ge=1)
    """Fewest votes with a grade; below it the verdict is `error`. None: more than half."""
    aggregate: Literal["mean", "majority", "median"] = "mean"
    """What the reward is of the votes."""
    temperature: float = Field(default=0.0, ge=0)
    seed: int | None = None
    """Of the first vote; the following ones count up. None: none is sent, and a request that is repeated may
    be answered otherwise."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest reply."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request; a field set to null is left out."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Most requests begun in any 60 seconds by one scoring process; more wait."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Most tokens, prompt and reply, in any 60 seconds, estimated before a request and corrected after it."""
    max_in_flight: int = Field(default=16, ge=1, le=65_536)
    """Most requests under way."""
    retries: int = Field(default=4, ge=0, le=1000)
    """How often a request is repeated after 408, 409, 425, 429, a status of 500 and above or a broken
    connection, inside `reward.timeout_s`."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key."""
    cache_entries: int = Field(default=10_000, ge=0)
    """Replies that are kept; 0: none. The same request is then answered without the server."""
    cache_file: str = ""
    """File that keeps as many replies beyond the job; relative to the job file."""

    @field_validator("base_url")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is not an address: write http://HOST:PORT/v1 or https://HOST/v1")
            if parts.username or parts.password:
                raise ValueError(
                    "the address holds a password; name the variable with the key in api_key_env"
                )
            if parts.query or parts.fragment:
                raise ValueError(f"{url!r} must end with its path")
        return tuple(dict.fromkeys(url.rstrip("/") for url in value))

    @field_validator("template")
    @classmethod
    def _shows_the_response(cls, value: str) -> str:
        if "{response}" not in value:
            raise ValueError("the template has no {response}, so the judge would not see what it grades")
        return value

    @field_validator("parse")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        try:
            pattern = re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if pattern.groups > 1:
            raise ValueError(f"it has {pattern.groups} groups; keep one, and write the others as (?:…)")
        return value

    @field_validator("scale")
    @classmethod
    def _has_two_ends(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] == value[1]:
            raise ValueError("the grades for 0 and for 1 are the same")
        return value

    @model_validator(mode="after")
    def _votes_can_differ(self) -> JudgeArguments:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError("several votes at temperature 0 are all the same: set temperature above 0")
        if self.min_votes is not None and self.min_votes > self.votes:
            raise ValueError(f"min_votes = {self.min_votes} can never be reached with votes = {self.votes}")
        if self.system and self.api != "chat":
            raise ValueError("`system` is a message of a chat: remove it, or set api to chat")
        if self.cache_file and not self.cache_entries:
            raise ValueError("cache_file keeps cache_entries replies, and that is 0")
        return self
