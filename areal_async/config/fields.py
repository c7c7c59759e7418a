"""The fields of a job file as a flat table, for suggestions and for the reference page."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from areal_async.config.base import Section
from areal_async.config.job import JobConfig


@dataclass(frozen=True)
class Field:
    """One leaf of the job file. `default` is what JSON would hold; `required` fields have none."""

    path: str
    description: str
    required: bool
    default: Any
    annotation: Any
    info: FieldInfo


@cache
def job_fields() -> dict[str, Field]:
    """Every leaf field of `JobConfig` by its dotted path, in file order."""
    return {field.path: field for field in _walk(JobConfig, "")}


def section_of(path: str) -> type[Section] | None:
    """The model of the section at a dotted path ("" is the whole file); None when it is no section."""
    model: type[Section] = JobConfig
    for name in path.split(".") if path else ():
        info = model.model_fields.get(name)
        inner = _section_type(info.annotation) if info is not None else None
        if inner is None:
            return None
        model = inner
    return model


def suggest(section: str, key: str) -> str | None:
    """The dotted path that an unknown `key` inside `section` was most likely meant to be."""
    model = section_of(section)
    prefix = f"{section}." if section else ""
    if model is not None:
        close = difflib.get_close_matches(key, list(model.model_fields), n=1, cutoff=0.65)
        if close:
            return prefix + close[0]
    elsewhere = [path for path in job_fields() if path.rpartition(".")[2] == key]
    if elsewhere:
        return elsewhere[0]
    by_last_name = {path.rpartition(".")[2]: path for path in reversed(job_fields())}
    close = difflib.get_close_matches(key, list(by_last_name), n=1, cutoff=0.75)
    return by_last_name[close[0]] if close else None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Field]:
    """Leaves of a section. Its defaults are those of its type, wherever it stands."""
    for name, info in model.model_fields.items():
        path = prefix + name
        inner = _section_type(info.annotation)
        if inner is not None:
            yield from _walk(inner, f"{path}.")
            continue
        default = info.get_default(call_default_factory=True)
        required = default is PydanticUndefined
        yield Field(
            path, info.description or "", required, None if required else default, info.annotation, info
        )


def _section_type(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
