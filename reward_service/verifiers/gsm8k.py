"""`gsm8k`: the number after `####`, or in a box, is that of the ground truth.

The ground truth is a number, or a whole solution of the data set, which ends in `#### 42`. What follows the
last `####` of the response counts up to the end of its line, else what its last `\\boxed{}` holds. In it the
number may carry a currency sign in front, and a percent sign or words behind (`$1,250 dollars`). A second
number, also in words, another sign, or a word that denies it makes it no answer. Compared exactly, decimals
to 1e-6 where the ground truth is no integer.
"""

from __future__ import annotations

import re

from reward_service.sdk import Abstain, RewardInput, reward
from reward_service.verifiers.answers import answer_of
from reward_service.verifiers.arithmetic import NUMBER, parse_number, same_number
from reward_service.verifiers.hedges import hedged

DECORATION = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s?\{|\\[(){}\[\],;:! ]|\\(?=[$%])|[*{}]")
ANSWER = re.compile(rf"[\s($€£:=]*+({NUMBER})(?![\w.]*+\d)(.*)", re.DOTALL)
BEHIND = re.compile(r"[^\W\d_]{2,}.*|\s?[%$€£)\"'.,;:!?°].*|[mgsh](?![^\W\d_]).*|\s.*|", re.DOTALL)
PLAIN = re.compile(r"[^\W\d_]|[\s%$€£()\"'’.,;:!?°/²³-]")
LAST_NUMBER = re.compile(rf"(?<![\w.]){NUMBER}(?!\w)")
LAST_CHARACTERS = 4_000


@reward
def gsm8k(given: RewardInput, *, flexible: bool = False) -> float | Abstain:
    """1 when the number is right, else 0. `flexible`: a response without `####` and box answers with its last
    number. Raises ValueError for a ground truth without a number: the task is wrong."""
    if given.ground_truth is None:
        return Abstain("the task has no ground truth")
    stated = str(given.ground_truth).rpartition("####")[2]
    wanted = parse_number(stated.strip().lstrip("$"))
    if wanted is None:
        raise ValueError(f"the ground truth {given.ground_truth!r:.80} has no number (after ####)")
    answer = number_of(given.response, flexible=flexible)
    return float(answer is not None and same_number(answer, wanted))


def number_of(response: str, *, flexible: bool) -> str | None:
    tail = response[-LAST_CHARACTERS:].replace("−", "-").replace("{,}", ",")
    stated = answer_of(tail, "hash")
    if stated is None:
        stated = answer_of(tail, "boxed")
    if stated is None:
        numbers = LAST_NUMBER.findall(answer_of(tail, "whole") or "") if flexible else []
        return numbers[-1] if numbers else None
    match = ANSWER.fullmatch(DECORATION.sub("", stated).strip())
    return match[1] if match is not None and _names_a_unit(match[2]) else None


def _names_a_unit(behind: str) -> bool:
    """Whether what follows a number leaves it as it is: words, and signs that are no operators. One letter
    directly behind it, but for those of common units, makes another number of it: `5k`, `5x`."""
    return BEHIND.fullmatch(behind) is not None and all(map(PLAIN.match, behind)) and not hedged(behind)
