"""What is wrong with a job file, for the person who wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_async.errors import ArealError


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong: the dotted field it sits in, what is wrong, and what to do about it."""

    field: str
    problem: str
    fix: str
    involves: tuple[str, ...] = ()  # Other fields that the statement depends on

    def __str__(self) -> str:
        end = "" if self.fix.endswith(("?", ".")) else "."
        return f"{self.field}: {self.problem}. {self.fix}{end}"


class ConfigError(ArealError):
    """A job file that cannot be run. Holds every mistake that was found, not only the first."""

    def __init__(self, source: str, mistakes: Iterable[Mistake]) -> None:
        self.source = source
        self.mistakes = tuple(mistakes)
        text = f" has {len(self.mistakes)} mistakes:" + "".join(f"\n  - {each}" for each in self.mistakes)
        super().__init__(source + (text if len(self.mistakes) != 1 else f": {self.mistakes[0]}"))
