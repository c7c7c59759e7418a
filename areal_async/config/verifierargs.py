"""What the built-in verifiers take (`reward.args`). Each is described in docs/verifiers.md."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from areal_async.config.base import Section

Where = Literal["whole", "boxed", "tag", "hash", "said", "last_line", "marked", "any"]
"""Where in a response the answer stands."""
LengthIn = Literal["tokens", "words", "characters"]

OUTSIDE_THE_POOL = ("remote", "judge", "reward_model")
"""Rewards that no process of the pool can compute, so that they cannot be parts of another."""


class MathArguments(Section):
    where: Where = "any"
    """Where the answer stands."""
    tolerance: float = Field(default=5e-6, ge=0, lt=1)
    """Relative difference that two numbers may have when one of them is a decimal."""
    budget_s: float = Field(default=2.0, gt=0, le=60)
    """CPU time for comparing, in seconds; an answer that needs more is wrong. It has to end before the
    reward's `timeout_s`, past which the whole call is a timeout."""


class Gsm8kArguments(Section):
    flexible: bool = False
    """Whether a response without `####` and box answers with its last number."""


class CountdownArguments(Section):
    use: Literal["all", "some"] = "all"
    """Whether each number must be used."""
    wrong: float = 0.0
    """Reward of a proper expression with another value."""


class ChoiceArguments(Section):
    letters: str = Field(default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,26}$")
    """Those of the options."""


class ExactMatchArguments(Section):
    where: Where | None = None
    """Where the answer stands; by default it is the whole response, thinking included."""
    case: bool = True
    """Whether upper and lower case differ."""
    punctuation: bool = True
    """Whether punctuation counts."""
    articles: bool = True
    """Whether `a`, `an` and `the` count."""
    any_of: bool = False
    """Whether a ground truth that is a list holds texts of which any is right."""


class F1Arguments(Section):
    where: Where = "whole"
    """Where the answer stands."""


class RegexArguments(Section):
    pattern: str | None = None
    """In the syntax of Python; by default the ground truth is the pattern."""
    match: Literal["search", "start", "whole"] = "search"
    """Where it must match."""
    case: bool = True
    """Whether upper and lower case differ."""
    multiline: bool = False
    """Whether `^` and `$` match at every line."""
    dot_all: bool = False
    """Whether `.` matches the end of a line too."""
    group: int | str | None = None
    """The group whose text must be the ground truth."""
    negate: bool = False
    """Whether it must not match."""
    where: Where | None = None
    """Where the answer stands; by default it is the whole response, thinking included."""

    @model_validator(mode="after")
    def _compiles(self) -> RegexArguments:
        if self.pattern is None:
            return self
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        if isinstance(self.group, int) and not 0 <= self.group <= compiled.groups:
            raise ValueError(f"the pattern has {compiled.groups} groups, and no group {self.group}")
        if isinstance(self.group, str) and self.group not in compiled.groupindex:
            raise ValueError(f"the pattern has no group called {self.group!r}")
        return self


class FormatTagsArguments(Section):
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")], ...] = Field(
        default=("think", "answer"), min_length=1
    )
    """Their names, in order."""
    outside: bool = False
    """Whether text may stand outside of them."""
    empty: bool = False
    """Whether a tag may hold nothing."""
    opened_by_prompt: bool = False
    """Whether the prompt ends with the first tag."""
    partial: bool = False
    """Whether the score is the share of the tags that are there."""


class JsonSchemaArguments(Section):
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    """The schema; by default the ground truth is."""
    where: Literal["whole", "fenced", "tag", "any"] = "any"
    """The whole response, its last fenced block or its last `<answer>`; `any`: tag, block, else whole."""

    @field_validator("schema_")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any] | bool | None) -> dict[str, Any] | bool | None:
        if schema is not None:
            # Imported here: no other job pays for it.
            import jsonschema
            from jsonschema.validators import validator_for

            try:
                validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
            except jsonschema.SchemaError as error:
                raise ValueError(f"this is no JSON schema: {error.message:.200}") from None
        return schema


class InstructionsArguments(Section):
    rules: tuple[dict[str, Any], ...] = ()
    """Instructions for every task, each `{id, …}`; the task's own come on top."""
    partial: bool = False
    """Whether the score is the share of the instructions that were followed."""

    @field_validator("rules")
    @classmethod
    def _have_names(cls, rules: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if not all(isinstance(rule.get("id"), str) for rule in rules):
            raise ValueError("each rule needs an `id`, for example `length_constraints:number_words`")
        return rules


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


class RepetitionArguments(Section):
    n: int = Field(default=4, ge=1, le=100)
    """Length of an n-gram."""
    penalty: float = Field(default=-1.0, le=0)
    """Reward of a response that only repeats itself."""
    unit: Literal["words", "characters"] = "words"
    """What an n-gram is made of."""


class PartSection(Section):
    """A reward that is part of another."""

    name: str
    """A built-in reward that runs in the pool, or `path.py:name`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """As `reward.args`."""

    @field_validator("name")
    @classmethod
    def _runs_in_the_pool(cls, name: str) -> str:
        if name in OUTSIDE_THE_POOL:
            raise ValueError(f"`{name}` cannot be a part: it is not computed in the pool")
        return name


class WeightedPart(PartSection):
    weight: float = 1.0
    """What its score is multiplied by."""
    label: str | None = Field(default=None, min_length=1)
    """Its name among the components, where two parts have the same reward."""


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


class WeightedArguments(Section):
    parts: tuple[WeightedPart, ...] = Field(min_length=1)
    """What is added up."""

    @model_validator(mode="after")
    def _can_be_told_apart(self) -> WeightedArguments:
        labels = [part.label or part.name.rpartition(":")[2] for part in self.parts]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two parts are called {twice[0]!r}: give each a `label` of its own")
        return self


class ReasoningGymArguments(Section):
    dataset: str | None = None
    """Its name there; by default what the task says."""
    dataset_args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the data set, without `seed` and `size`."""
    where: Where = "tag"
    """Where the answer stands; with `tag` a response without one is the answer as a whole."""


VERIFIER_ARGUMENTS: dict[str, type[Section]] = {
    "math": MathArguments,
    "gsm8k": Gsm8kArguments,
    "countdown": CountdownArguments,
    "choice": ChoiceArguments,
    "exact_match": ExactMatchArguments,
    "f1": F1Arguments,
    "regex": RegexArguments,
    "format_tags": FormatTagsArguments,
    "json_schema": JsonSchemaArguments,
    "instructions": InstructionsArguments,
    "overlong": OverlongArguments,
    "repetition": RepetitionArguments,
    "cosine_length": CosineLengthArguments,
    "weighted": WeightedArguments,
    "reasoning_gym": ReasoningGymArguments,
}
"""Verifier → its arguments."""
