"""`regex`: a pattern in Python's syntax matches the response.

Where a pattern goes back over a response again and again, looking ends after `BUDGET_S`: the answer is wrong.
The library `regex` is used for that limit; it reads the syntax of `re`.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Literal

import regex as patterns

from reward_service.sdk import Abstain, RewardInput, Score, reward
from reward_service.verifiers.answers import Where, answer_of
from reward_service.verifiers.exact_match import normalise
from reward_service.verifiers.truths import accepted

BUDGET_S = 2.0
"""CPU time."""


@reward
def regex(
    given: RewardInput,
    *,
    pattern: str | None = None,
    match: Literal["search", "start", "whole"] = "search",
    case: bool = True,
    multiline: bool = False,
    dot_all: bool = False,
    group: int | str | None = None,
    negate: bool = False,
    where: Where | None = None,
) -> float | Score | Abstain:
    """1 when the pattern matches, else 0; with `negate` the other way round.

    Without `pattern` the ground truth is the pattern. With `group`, what the last match holds in that group
    must be the ground truth, up to white space. `where`: look only at the answer there (see `answers.py`);
    where there is none, nothing matches. Component `too_costly`: 1, and there only when so, where
    it takes too long; the score is then 0, with `negate` too. Raises regex.error for a ground truth that is
    no pattern."""
    if given.ground_truth is None and (pattern is None or group is not None):
        return Abstain("the task has no ground truth")
    text = given.response if where is None else answer_of(given.response, where)
    compiled = _compiled(str(given.ground_truth) if pattern is None else pattern, case, multiline, dot_all)
    found = None
    if text is not None:
        try:
            if match == "search" and group is not None:
                found = next(iter(deque(compiled.finditer(text, timeout=BUDGET_S), maxlen=1)), None)
            else:
                how = {"search": compiled.search, "start": compiled.match, "whole": compiled.fullmatch}[match]
                found = how(text, timeout=BUDGET_S)
        except TimeoutError:
            return Score(0.0, {"too_costly": 1.0})
    right = found is not None
    if found is not None and group is not None:
        right = normalise(found[group] or "") in [normalise(text) for text in accepted(given.ground_truth)]
    return float(right is not negate)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str, case: bool, multiline: bool, dot_all: bool) -> patterns.Pattern[str]:
    flags = patterns.VERSION0
    for wanted, flag in (
        (not case, patterns.IGNORECASE),
        (multiline, patterns.MULTILINE),
        (dot_all, patterns.DOTALL),
    ):
        flags |= flag if wanted else patterns.VERSION0
    return patterns.compile(pattern, flags)
