"""The fields of a file that a `Section` describes: their paths, and pydantic's errors about them as readable
text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from areal_async.base.mistakes import (
    ADD_IT,
    ConfigError,
    Mistake,
    blank_after_colon,
    in_words,
    value_in_words,
)
from areal_async.base.yaml_file import read_mapping
from areal_async.config.base import Section

JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")  # The pattern of `JobConfig.job`
NO_FIELD = "there is no such field"
S = TypeVar("S", bound=Section)
NAME_FORM = "Use at most 48 lower-case letters, digits, - and _, starting with a letter or digit"


@dataclass(frozen=True)
class Field:
    """One leaf of a file. `default` is its JSON value. A `required` field has no default."""

    path: str
    description: str
    required: bool
    default: Any
    annotation: Any
    info: FieldInfo


@cache
def fields_of(root: type[Section], prefix: str = "") -> dict[str, Field]:
    """Return the leaf fields below a section by their dotted paths, in file order. The defaults are the
    defaults of the section's type."""
    found: dict[str, Field] = {}
    for name, info in root.model_fields.items():
        path, inner = prefix + name, _section_type(info.annotation)
        default = info.get_default(call_default_factory=True)
        required = default is PydanticUndefined
        about = info.description or ""
        leaf = Field(path, about, required, None if required else default, info.annotation, info)
        found |= {path: leaf} if inner is None else fields_of(inner, f"{path}.")
    return found


def section_of(root: type[Section], path: str) -> type[Section] | None:
    """Return the model of the section at a dotted path ("" is the whole file), or None if there is no
    section."""
    model: type[Section] | None = root
    for name in path.split(".") if path else ():
        if model is not None and not name.isdecimal():  # A number is an index in a list of sections
            info = model.model_fields.get(name)
            model = _section_type(info.annotation) if info is not None else None
    return model


def leaves_of(root: type[Section], content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaf fields of a resolved file by their dotted paths, with the file's values."""
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and section_of(root, path) is not None:
            yield from leaves_of(root, value, f"{path}.")
        else:
            yield path, value


def _section_type(annotation: Any) -> type[Section] | None:
    types = (each for each in (annotation, *get_args(annotation)) if isinstance(each, type))
    return next((each for each in types if issubclass(each, Section)), None)


def suggest(root: type[Section], section: str, key: str) -> str | None:
    """Return the dotted path that an unknown `key` inside `section` most likely means. If the section has
    `args` for the arguments of its part, only the section's own fields are suggested."""
    model, prefix = section_of(root, section), f"{section}." if section else ""
    own = list(model.model_fields) if model is not None else []
    fields = () if "args" in own else fields_of(root)
    paths = [*fields, *(path.rpartition(".")[0] for path in fields)]
    by_name = {path.rpartition(".")[2]: path for path in sorted(paths, key=len, reverse=True)}
    surely = difflib.get_close_matches(key, list(by_name), n=1, cutoff=0.85)
    beside = difflib.get_close_matches(key, own, n=1, cutoff=0.85 if key in by_name else 0.65)
    return prefix + beside[0] if beside else by_name[surely[0]] if surely else None


def numbers_or_words(details: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge the entries of `ValidationError.errors()`. A field that accepts a number or a word has two
    entries, which become one: the error of the number, with the possible words under `word`."""
    words = {detail["loc"][:-1]: detail["ctx"]["expected"] for detail in details if _in_union(detail)}
    return [
        {**detail, "loc": field, "word": words[field]} if (field := detail["loc"][:-1]) in words else detail
        for detail in details
        if not _in_union(detail)
    ]


def _in_union(detail: Mapping[str, Any]) -> bool:
    """Return whether an error is about the word of a field that accepts a number or a word."""
    return bool(detail["type"] == "literal_error" and str(detail["loc"][-1]).startswith("literal["))


def explain(root: type[Section], detail: Mapping[str, Any], within: str = "") -> Mistake:
    """Return the mistake for one entry of `ValidationError.errors()` of a file of type `root`. It suggests
    only fields with a path that begins with `within`."""
    location = [str(part) for part in detail["loc"]]
    field, kind, found = ".".join(location), detail["type"], detail.get("input")
    known = fields_of(root).get(field)
    about = " ".join(known.description.split()) if known is not None else ""
    is_section = kind in ("model_type", "model_attributes_type", "dict_type")
    if kind == "missing":
        return Mistake(field, "this field is missing", f"{ADD_IT}. {about}".rstrip(". "))
    if kind == "extra_forbidden":
        return _unknown(root, location, found, within)
    if kind == "url":
        return Mistake(field, detail["ctx"]["problem"], detail["ctx"]["fix"])
    if kind == "string_pattern_mismatch":
        fix = NAME_FORM if field in ("job", "cluster") else f"Match {detail['ctx']['pattern']}"
        fix = "Use cpu, cuda or cuda:N" if field.endswith("device") else fix
        return Mistake(field, f"{found!r} does not have the right form", fix)
    if is_section and found is None:
        return Mistake(field, "nothing stands under it", "Remove it, or indent its fields below it")
    if kind == "invalid_key":
        fix = "Write numbers with a point, 4.0e-4; a comma ends the value before it"
        return Mistake(".".join(location[:-1]), f"{found!r} is no name of a field", fix)
    if is_section:
        fix = "Give indented `key: value` lines under it, or write it as `{key: value}`"
        return Mistake(field or "file", f"{found!r} is not a section", fix)
    if (words := value_in_words(detail)) is not None:
        shown, fix = repr(found), words[1] + (f", or {detail['word']}" if "word" in detail else "")
        if isinstance(found, bool):
            shown, is_number = str(found).lower(), kind.startswith(("int_", "float_"))
            fix += "" if is_number else "; a yes, no, on or off needs quotation marks"
        elif found is None:
            shown, fix = "null", f"{fix}, or remove the field for its default"
        return Mistake(field, f"{shown} {words[0]}", fix)
    problem = f"{found!r} is refused: {str(detail['msg']).rstrip('.')}"
    return Mistake(field, problem, f"Correct it. {about}".rstrip(". "))


def _unknown(root: type[Section], location: list[str], found: Any, within: str) -> Mistake:
    field, section, key = ".".join(location), ".".join(location[:-1]), location[-1]
    if key == "trust_remote_code":
        problem = "code that comes with a model is never run: it would have the rights of the job"
        return Mistake(field, problem, "Remove it, and give a model that transformers itself knows")
    if (fix := blank_after_colon(key)) is not None:
        return Mistake(field, NO_FIELD, fix)
    suggestion = suggest(root, section, key)
    if suggestion is not None and suggestion.startswith(within):
        return Mistake(field, NO_FIELD, f"Did you mean {suggestion}?")
    model = section_of(root, section)
    known = ", ".join(model.model_fields) if model is not None else ""
    fix = "Remove it"
    if model is not None and "args" in model.model_fields:
        fix = f"Write {section}.args.{key} if the part takes it"
    return Mistake(field, NO_FIELD, f"{fix}; the fields here are {known}")


def read_section(kind: type[S], path: Path) -> S:
    """Read a YAML file with the fields of `kind`. Raises `ConfigError` with every mistake in it."""
    content = read_mapping(path)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise ConfigError(str(path), in_words(details, partial(explain, kind))) from None
