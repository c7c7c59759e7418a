"""A sweep: one job for each combination of the values of some fields. Pure."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.yaml_file import dump_yaml, parse_yaml, syntax_problem
from areal_async.config.fields import suggest
from areal_async.config.job import JobConfig, job_fields

MOST_JOBS = 256  # Jobs that one sweep makes
LONGEST_NAME = 48
OPEN_FIELDS = re.compile(r"(_args|\.arguments|\.args|\.nodes)$")
"""Fields below which a job file may name what it likes."""


@dataclass(frozen=True)
class Combination:
    """One job of a sweep: what its name ends with, and its `key=value`."""

    suffix: str
    overrides: tuple[str, ...]


def combinations(sweeps: Sequence[str]) -> list[Combination]:
    """Every combination of `key=a,b …`, the last key changing fastest; without sweeps one, with no changes.

    A key may be the last part of a field's name where only one field is called so. Raises `ConfigError`."""
    mistakes: list[Mistake] = []
    axes: list[tuple[str, list[str]]] = []
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        field = _field(key.strip(), mistakes)
        values = _values(sweep, text, mistakes) if equals else []
        if not equals or not key.strip():
            mistakes.append(Mistake(sweep, "this is not key=a,b", "Write it as lr=1e-6,3e-6"))
        if field in dict(axes):
            mistakes.append(Mistake(sweep, f"{field} is swept twice", "Give all its values in one --sweep"))
        axes.append((field, values))
    count = math.prod(len(values) for _, values in axes)
    if count > MOST_JOBS:
        problem = f"the combinations are {count}, and one sweep makes at most {MOST_JOBS} jobs"
        mistakes.append(Mistake("--sweep", problem, "Sweep fewer values at a time"))
    if mistakes:
        raise ConfigError("the sweep", mistakes)
    return list(_product(axes))


def _product(axes: Sequence[tuple[str, Sequence[str]]]) -> Iterator[Combination]:
    for values in itertools.product(*(values for _, values in axes)):
        pairs = [(field, value) for (field, _), value in zip(axes, values, strict=True)]
        suffix = "-".join(f"{field.rpartition('.')[2]}-{value}" for field, value in pairs)
        yield Combination(suffix, tuple(f"{field}={value}" for field, value in pairs))


def named_jobs(name: str, suffixes: Sequence[str]) -> list[str]:
    """A name for each job of a sweep of job `name`: unlike each other, and of the form that a job file asks
    for."""
    found: list[str] = []
    for number, suffix in enumerate(suffixes):
        if not suffix:
            found.append(name)
            continue
        plain = re.sub(r"[^a-z0-9_-]+", "-", suffix.lower()).strip("-")
        wanted = f"{name}-{plain}".rstrip("-")
        numbered = (
            wanted[: LONGEST_NAME - len(tail)].rstrip("-") + tail
            for tail in map("-{}".format, itertools.count(number))
        )
        if len(wanted) > LONGEST_NAME or wanted in found:
            wanted = next(each for each in numbered if each not in found)
        found.append(wanted)
    return found


def _field(key: str, mistakes: list[Mistake]) -> str:
    """The dotted field that `key` names: of those whose last part it is, the one in the fewest sections."""
    fields = job_fields()
    if key in fields or any(OPEN_FIELDS.search(key[: match.start()]) for match in re.finditer(r"\.", key)):
        return key
    named = [path for path in fields if path.rpartition(".")[2] == key]
    outermost = [path for path in named if path.count(".") == min(each.count(".") for each in named)]
    if len(outermost) == 1:
        return outermost[0]
    if named:
        choice = ", ".join(named)
        mistakes.append(Mistake(key, f"several fields are called {key}", f"Write one of {choice}"))
    elif key:
        section, _, last = key.rpartition(".")
        meant = suggest(JobConfig, section, last)
        fix = f"Did you mean {meant}?" if meant else "The fields are listed in docs/job-file.md"
        mistakes.append(Mistake(key, "there is no such field", fix))
    return key


def _values(sweep: str, text: str, mistakes: list[Mistake]) -> list[str]:
    """The values of `a,b` or `[a, b]`, each as YAML on one line; simple ones as they were written."""
    try:
        if not set("[]{}\"'#&*!|>%@`") & set(text):
            pieces = [piece.strip() for piece in text.split(",")]
            if len({repr(parse_yaml(piece)) for piece in pieces}) == len(pieces) and all(pieces):
                return pieces
        found = parse_yaml(text if text.lstrip().startswith("[") else f"[{text}]")
    except yaml.YAMLError as error:
        problem = f"{text!r:.80} is no list of values ({syntax_problem(error)})"
        mistakes.append(Mistake(sweep, problem, "Write a,b or [a, b]"))
        return []
    if not isinstance(found, list) or not found:
        mistakes.append(Mistake(sweep, "it has no values", "Write it as lr=1e-6,3e-6"))
        return []
    written = [_on_one_line(value) for value in found]
    if len(set(written)) < len(written):
        mistakes.append(Mistake(sweep, "a value is given twice", "Give each value once"))
    return written


def _on_one_line(value: object) -> str:
    """As YAML that is read as the same value; simple ones as a person would write them."""
    if isinstance(value, bool | int | float) or value is None:
        return dump_yaml(value).removesuffix("...\n").strip()
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./:-]*", value) and parse_yaml(value) == value:
        return value
    return json.dumps(value)  # JSON is YAML on one line
