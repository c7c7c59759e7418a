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
        super().__init__(self._paragraph())

    def _paragraph(self) -> str:
        if len(self.mistakes) == 1:
            return f"{self.source}: {self.mistakes[0]}"
        lines = "".join(f"\n  - {mistake}" for mistake in self.mistakes)
        return f"{self.source} has {len(self.mistakes)} mistakes:{lines}"
