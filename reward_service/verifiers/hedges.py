"""Words beside an answer that make it another answer, or none: a second one, a denial, a multiple."""

from __future__ import annotations

import re

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
SECOND = "or nor and either neither maybe perhaps possibly probably alternatively versus vs to until between"
DENIED = "not no never isn't wrong incorrect false except unless but if than minus plus"
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety half "
    "halves quarter quarters third thirds dozen dozens hundred hundreds thousand thousands million "
    "millions billion billions trillion trillions"
)
HEDGES = frozenset(f"{SECOND} {DENIED} {NUMBERS}".split())


def hedged(words: str) -> bool:
    """Whether words that stand beside a number are more than its unit, as `or six` or `dozen` are."""
    return any(word.replace("’", "'") in HEDGES for word in WORD.findall(words.lower()))
