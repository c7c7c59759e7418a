"""`math`: the answer is mathematically equal to the ground truth.

`answers.py` defines the places of the answer (`where`), and `equality.py` defines equality. In a response
without a marked answer, the last formula or number counts. An answer is wrong (score 0) if it cannot be read,
is too large to compute, or takes longer than `budget_s` to compare. A comparison takes about 1 ms for numbers
and some tens of milliseconds for formulas.
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

LONGEST_ANSWER = 2_000  # characters; a longer text is not an answer
LAST_CHARACTERS = 20_000  # characters at the end of a response that are searched for the answer


class MathArguments(Section):
    where: Where = "any"
    """Place of the answer."""
    tolerance: float = Field(default=5e-6, ge=0, lt=1)
    """Relative difference that two numbers may have if one of them is a decimal."""
    budget_s: float = Field(default=2.0, gt=0, le=60)
    """CPU time for comparing, in seconds. An answer that needs more is wrong. The budget must be below the
    reward's `timeout_s`, after which the whole call is a timeout."""


@verifier(MathArguments, prepare=lambda _: preload(), needs_truth=True)
def math(given: RewardInput, arguments: MathArguments) -> Score | Abstain:
    """Return 1 if the answer is right, else 0.

    The component `answered` is 1 if there was an answer. The component `too_costly` is 1 if the answer was
    not compared with every ground truth, because that would exceed `budget_s` or the size limit of numbers.
    Otherwise this component is absent. If the ground truth is a list, an answer is right if it equals any of
    its texts. Raises `ValueError` for an empty list, and for a ground truth of another type, because then the
    task is wrong, not the model.
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
    """Return the answer in a response, in the notation of `latex.py`, or None if there is none."""
    tail = spoken(response)[-LAST_CHARACTERS:]
    last = last_match(BOX, tail)
    if last is not None and tail[last.end()] == "{" and closing(tail, last.end()) is None:
        return None  # the last box has no end, so its content is unknown
    marked = answer_of(tail, "marked" if where == "any" else where)
    if marked is not None and where in ("any", "marked", "said") and marked == answer_of(tail, "said"):
        marked = said_maths(marked)
    if marked is None and where == "any":
        marked = last_maths(tail) or answer_of(tail, "last_line")
    if marked is None or not 0 < len(marked) <= LONGEST_ANSWER:
        return None
    return tidy(marked) or None
