"""The base of every configuration section."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from areal_async.base.secrecy import types_of

LARGEST = 1_000_000_000
"""Upper bound of numbers that have no other upper bound. Larger numbers of seconds or tokens are mistakes."""


Overrides = str | Mapping[str, Any] | Sequence[str]
"""Fields to change: one `key=value`, several of them, or a mapping of dotted fields to values."""


Dtype = Literal["auto", "float32", "bfloat16"]
"""Value of a field `dtype`. `dtype_on` resolves `auto`."""


def dtype_on(device: str, dtype: str = "auto") -> str:
    """Return `dtype`, or the default number type of a device if it is `auto`: `float32` on a CPU, else
    `bfloat16`."""
    return ("float32" if device == "cpu" else "bfloat16") if dtype == "auto" else dtype


class Section(BaseModel):
    """An immutable section that refuses unknown keys. The docstring under a field is its description in
    errors and on the reference page. Every number has an upper bound."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            raise AttributeError(
                f"{name} cannot be set: a job does not change. `load_job(job, {{'section.{name}': value}})` "
                "makes one that differs, and checks it."
            )
        super().__setattr__(name, value)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_word_that_yaml_reads_as_true(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool):
            kinds = {*types_of(cls.model_fields[info.field_name or ""].annotation)}
            if bool not in kinds and Any not in kinds and kinds & {int, float}:
                raise PydanticCustomError("int_type" if int in kinds else "float_type", "a number is needed")
        return value

    @field_validator("*")
    @classmethod
    def _is_a_number_that_can_be_meant(cls, value: Any, info: ValidationInfo) -> Any:
        own = cls.model_fields[info.field_name or ""].metadata
        if not any(isinstance(bound, annotated_types.Le | annotated_types.Lt) for bound in own) and any(
            abs(number) > LARGEST for number in _numbers(value)
        ):
            raise PydanticCustomError(
                "less_than_equal", "Input should be less than or equal to {le}", {"le": LARGEST}
            )
        return value


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers in the value of a field. The value may be a tuple or a mapping."""
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
    yield from (each for each in values if isinstance(each, int | float) and not isinstance(each, bool))


def refuse_password(url: str, instead: str) -> None:
    """Raise ValueError if a URL contains a login, because logs, metrics and verdicts show addresses."""
    scheme, _, rest = url.partition("://")
    if scheme != "ipc" and "@" in re.split("[/?#]", rest, maxsplit=1)[0]:
        raise ValueError(f"the address holds a password; use {instead}")
