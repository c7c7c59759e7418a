"""`math`: the answer is mathematically the same as the ground truth.

`answers.py` finds the answer (`where`). If a response marks no answer, its last formula or number counts.
`equality.py` defines equality. The score is 0 if the answer cannot be read, is too large to be computed, or
takes longer to compare than `budget_s`. Comparing takes a millisecond for numbers and some tens for formulas.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from pydantic import Field

from areal_async.config.base import Section
from areal_async.models.answers import spoken
from reward_service.sdk import Abstain, RewardInput, Score
from reward_service.verifiers import TooCostly, verifier, within
from reward_service.verifiers.answers import BOX, Where, accepted, answer_of, closing, last_match
from reward_service.verifiers.equality import preload, same
from reward_service.verifiers.latex import last_maths, said_maths, tidy

LONGEST_ANSWER = 2_000  # Characters; a longer one is no answer
LAST_CHARACTERS = 20_000  # The answer is looked for in so many characters at the end


class MathArguments(Section):
    where: Where = "any"
    """Place of the answer."""
    tolerance: float = Field(default=5e-6, ge=0, lt=1)
    """Relative difference that two numbers may have when one of them is a decimal."""
    budget_s: float = Field(default=2.0, gt=0, le=60)
    """CPU time for comparing, in seconds; an answer that needs more is wrong. It has to end before the
    reward's `timeout_s`, past which the whole call is a timeout."""


@verifier(MathArguments, prepare=lambda _: preload(), needs_truth=True)
def math(given: RewardInput, arguments: MathArguments) -> Score | Abstain:
    """Return 1 if the answer is right, else 0. The component `answered` is 1 if there was an answer. The
    component `too_costly` is present, with the value 1, only if the answer was not compared with every ground
    truth, because that would take more than `budget_s` seconds of CPU time or too much memory.

    A ground truth may be a list of texts, each of them right. Raises ValueError for an empty one, and for one
    that is neither text nor number: the task is wrong, not the model.
    """
    stated = given.ground_truth if isinstance(given.ground_truth, list) else [given.ground_truth]
    truths = [tidy(text) for truth in stated for text in accepted(truth)]
    if not truths:
        return Abstain("the task has no ground truth")
    if not all(truths):
        raise ValueError("the ground truth is empty: give the answer as a text")
    answer = find(given.spoken, arguments.where)
    if answer is None:
        return Score(0.0, {"answered": 0.0})
    costly = False
    for truth in truths:
        try:
            compare = partial(same, truth, answer, Fraction(arguments.tolerance))
            if within(arguments.budget_s / len(truths), compare):
                return Score(1.0, {"answered": 1.0})
        except TooCostly:
            costly = True
    return Score(0.0, {"answered": 1.0, "too_costly": 1.0} if costly else {"answered": 1.0})


def find(response: str, where: Where = "any") -> str | None:
    """Return the tidied answer in a response; None if there is none."""
    tail = spoken(response)[-LAST_CHARACTERS:]
    last = last_match(BOX, tail)
    if last is not None and tail[last.end()] == "{" and closing(tail, last.end()) is None:
        return None  # the last box is never closed: what it would have held is not known
    marked = answer_of(tail, "marked" if where == "any" else where)
    if marked is not None and where in ("any", "marked", "said") and marked == answer_of(tail, "said"):
        marked = said_maths(marked)
    if marked is None and where == "any":
        marked = last_maths(tail) or answer_of(tail, "last_line")
    if marked is None or not 0 < len(marked) <= LONGEST_ANSWER:
        return None
    return tidy(marked) or None
