"""A pydantic error, in words that name the field, what is wrong and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_async.config.errors import Mistake
from areal_async.config.fields import job_fields, section_of, suggest

_BOUNDS = {
    "greater_than_equal": ("ge", "too small", "Give at least {}"),
    "greater_than": ("gt", "too small", "Give more than {}"),
    "less_than_equal": ("le", "too large", "Give at most {}"),
    "less_than": ("lt", "too large", "Give less than {}"),
}
_KINDS = {
    "int_": ("a whole number", "Give a whole number"),
    "float_": ("a number", "Give a number"),
    "bool_": ("true or false", "Give true or false"),
    "string_type": ("text", "Give text, in quotes if it looks like a number"),
    "path_type": ("a path", "Give the path as text"),
    "tuple_": ("a list", "Give a list: [a, b]"),
    "finite_number": ("a finite number", "Give a finite number"),
}


def explain(detail: Mapping[str, Any]) -> Mistake:
    """The mistake behind one entry of `ValidationError.errors()`."""
    location = [str(part) for part in detail["loc"]]
    field = ".".join(location)
    kind, context, found = detail["type"], detail.get("ctx", {}), detail.get("input")
    if kind == "missing":
        return Mistake(field, "this field is missing", f"Add it. {_about(field)}".rstrip(". "))
    if kind == "extra_forbidden":
        return _unknown(location)
    if kind == "literal_error":
        return Mistake(field, f"{found!r} is not a choice", f"Use {context['expected']}")
    if kind in _BOUNDS:
        name, problem, fix = _BOUNDS[kind]
        return Mistake(field, f"{found!r} is {problem}", fix.format(context[name]))
    if kind == "string_pattern_mismatch":
        return Mistake(field, f"{found!r} does not have the right form", _form(field, context["pattern"]))
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Mistake(
            field or "file", f"{found!r} is not a section", "Give indented `key: value` lines under it"
        )
    for prefix, (wanted, fix) in _KINDS.items():
        if kind.startswith(prefix):
            return Mistake(field, f"{found!r} is not {wanted}", fix)
    message = str(detail["msg"]).rstrip(".")
    return Mistake(field, f"{found!r} is refused: {message}", f"Correct it. {_about(field)}".rstrip(". "))


def _unknown(location: list[str]) -> Mistake:
    field, section, key = ".".join(location), ".".join(location[:-1]), location[-1]
    if key == "trust_remote_code":
        problem = "code that comes with a model is never run: it would have the rights of the job"
        return Mistake(field, problem, "Remove it, and give a model that transformers itself knows")
    suggestion = suggest(section, key)
    if suggestion is not None:
        return Mistake(field, "there is no such field", f"Did you mean {suggestion}?")
    model = section_of(section)
    known = ", ".join(model.model_fields) if model is not None else ""
    return Mistake(field, "there is no such field", f"Remove it; the fields here are {known}")


def _form(field: str, pattern: str) -> str:
    if field == "job":
        return "Use at most 48 lower-case letters, digits, - and _, starting with a letter or digit"
    if field.endswith("device"):
        return "Use cpu, cuda or cuda:N"
    return f"Match {pattern}"


def _about(field: str) -> str:
    known = job_fields().get(field)
    return " ".join(known.description.split()) if known is not None else ""
