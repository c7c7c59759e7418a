"""What a judge's replies are worth: from texts to votes, from votes to a verdict. Pure."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from areal_async.rpc.verdicts import Abstain, Failure, Score, Timeout, Verdict

Aggregate = Literal["mean", "majority", "median"]

LONGEST_REPLY = 20_000
"""Characters at the end of a reply in which the grade is looked for."""
WORDS = 120
"""Characters of a reply that an error repeats."""


class NoGrade(ValueError):
    """A reply that holds no grade: never a grade of 0."""


class Parser:
    """`Parser(pattern, take, scale, grades)(reply)` is the vote in a reply; see `JudgeArguments`."""

    def __init__(
        self,
        pattern: str,
        take: Literal["last", "first"],
        scale: tuple[float, float],
        grades: Mapping[str, float],
    ) -> None:
        self._pattern = re.compile(pattern)
        self._last = take == "last"
        self._low, self._high = scale
        self._grades = {word.strip().lower(): value for word, value in grades.items()}

    def __call__(self, reply: str) -> float:
        """Raises `NoGrade`."""
        matches = list(self._pattern.finditer(reply[-LONGEST_REPLY:]))
        if not matches:
            raise NoGrade(f"the reply holds no grade: {_clip(reply)}")
        match = matches[-1 if self._last else 0]
        found = (match.group(1) if self._pattern.groups else match.group()) or ""
        if self._grades:
            if (word := found.strip().lower()) not in self._grades:
                raise NoGrade(f"the grade {_clip(found)} is none of {', '.join(self._grades)}")
            return self._grades[word]
        try:
            number = float(found)
        except ValueError:
            raise NoGrade(f"the grade {_clip(found)} is not a number") from None
        share = (number - self._low) / (self._high - self._low)
        if not (math.isfinite(share) and 0 <= share <= 1):
            raise NoGrade(
                f"the grade {_clip(found)} is not on the scale from {self._low:g} to {self._high:g}"
            )
        return share


def verdict_of(
    votes: Sequence[float], lost: Sequence[Failure | Timeout], needed: int, how: Aggregate
) -> Verdict:
    """The verdict of `votes`, beside which some were `lost`.

    Fewer votes than `needed`: what became of the lost ones, a broken server before a reply without a grade. A
    majority that is none, because two grades have equally many votes, is an `Abstain`. With several votes the
    components say how many counted and how far apart they lie."""
    asked = len(votes) + len(lost)
    if len(votes) < needed:
        return _lost(len(votes), asked, needed, lost)
    match how:
        case "mean":
            value = math.fsum(votes) / len(votes)
        case "median":
            value = statistics.median(votes)
        case "majority":
            (value, most), *others = Counter(votes).most_common(2)
            if others and others[0][1] == most:
                return Abstain(f"no majority: {most} votes each for {value:g} and {others[0][0]:g}")
    if asked == 1:
        return Score(value)
    return Score(value, {"votes": float(len(votes)), "spread": max(votes) - min(votes)})


def _lost(n: int, asked: int, needed: int, lost: Sequence[Failure | Timeout]) -> Verdict:
    worst = next((v for v in lost if not (isinstance(v, Failure) and v.kind == "judge")), lost[0])
    if isinstance(worst, Timeout) or asked == 1:
        return worst
    return Failure(worst.kind, f"{n} of {asked} votes have a grade, and {needed} are needed: {worst.message}")


def _clip(text: str) -> str:
    short = " ".join(text.split())
    return repr(short if len(short) <= WORDS else "…" + short[-WORDS:])
