"""Mistakes in a job file, as texts for its author."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from areal_async.base.errors import ArealError

MOST_MISTAKES = 100
"""Largest number of mistakes of one file that are reported."""
MOST_CHARS = 2000
"""Longest text of a mistake, because it may quote any value."""
ADD_IT = "Add it"  # the fix for a missing field
WHOLE_FILE = "file"
"""Field of a mistake that concerns a whole file."""
Detail = TypeVar("Detail", bound=Mapping[str, Any])

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


def value_in_words(detail: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the problem with a value, such as "is too small", and the fix, for an entry of
    `ValidationError.errors()`.

    Returns None for a kind of error without a text of its own.
    """
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        return "is not a choice", f"Use {context['expected']}"
    if kind in _BOUNDS:
        name, problem, fix = _BOUNDS[kind]
        return f"is {problem}", fix.format(context[name])
    for prefix, (wanted, fix) in _KINDS.items():
        if kind.startswith(prefix):
            return f"is not {wanted}", fix
    return None


def blank_after_colon(key: str) -> str | None:
    """Return the fix for an unknown key such as `rank:8`, which YAML reads as a name, or None for other
    keys."""
    name, colon, value = key.partition(":")
    return f"YAML wants a blank after the colon: `{name}: {value}`" if name and colon and value else None


def in_words(
    details: Sequence[Detail], explain: Callable[[Detail], Mistake], field: str = "file"
) -> Iterator[Mistake]:
    """Yield the mistakes behind the first `MOST_MISTAKES` entries of `ValidationError.errors()`.

    A last mistake, in `field`, states how many entries remain. The limit is needed because each explanation
    compares the mistake with all fields, which takes minutes if a file has very many mistakes.
    """
    yield from map(explain, details[:MOST_MISTAKES])
    if (more := len(details) - MOST_MISTAKES) > 0:
        yield Mistake(field, f"there are {more} more mistakes in it", "Correct these first")


@dataclass(frozen=True)
class Mistake:
    """One mistake: the dotted field, the problem and the fix, each cut at `MOST_CHARS`."""

    field: str
    problem: str
    fix: str
    """Advice; empty for a note, which is a warning that asks for nothing."""
    warns: bool = False
    """Whether the mistake is only a warning, so that the job can still run."""

    def __post_init__(self) -> None:
        for name in ("field", "problem", "fix"):
            if len(text := getattr(self, name)) > MOST_CHARS:
                object.__setattr__(self, name, f"{text[: MOST_CHARS // 2]} … {text[-MOST_CHARS // 4 :]}")

    def __str__(self) -> str:
        where = "" if self.field == WHOLE_FILE else f"{self.field}: "
        end = "" if not self.fix or self.fix.endswith(("?", ".")) else "."
        return f"{where}{self.problem}. {self.fix}{end}".rstrip()


def as_typed(mistakes: Iterable[Mistake], form: Callable[[str], str]) -> Iterator[Mistake]:
    """Yield the mistakes. If a fix asks for a missing field, it shows the syntax of the current command for
    this field, `form(field)`."""
    for each in mistakes:
        added = each.fix == ADD_IT or each.fix.startswith(f"{ADD_IT}. ")
        yield replace(each, fix=f"Add {form(each.field)}{each.fix.removeprefix(ADD_IT)}") if added else each


class ConfigError(ArealError):
    """A job file that cannot be run, with its mistakes. The text lists about the first `MOST_MISTAKES`
    mistakes and gives their total number."""

    def __init__(self, source: str, mistakes: Iterable[Mistake], *, then: str = "") -> None:
        self.source = source
        found = iter(mistakes)
        self.mistakes = tuple(islice(found, MOST_MISTAKES + 1))
        number, those = len(self.mistakes), ""
        if more := sum(1 for _ in found):
            number, those = number + more, f", of which these are the first {number}"
        text = f" has {number} mistakes{those}:" + "".join(f"\n  - {each}" for each in self.mistakes)
        text = text if len(self.mistakes) != 1 else f": {self.mistakes[0]}"
        before = "\n" if len(self.mistakes) != 1 else " "
        super().__init__(source + text + (f"{before}{then}" if then else ""))
