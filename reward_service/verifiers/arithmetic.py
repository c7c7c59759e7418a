"""Verifiers of one number: `arithmetic` reads the end of the response and `gsm8k` reads a marked number.

docs/rewards.md#use-built-in-rewards has their rules. A number is an integer, a decimal or a fraction `a/b`,
with an optional sign, thousands commas and exponent. Integers and fractions compare exactly (`6/8` is `3/4`
is `0.75`). If the ground truth is not an integer and either side is a decimal, a relative difference of 1e-6
is allowed.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from areal_async.config.base import Section
from reward_service.sdk import RewardInput
from reward_service.verifiers import NoArguments, verifier
from reward_service.verifiers.answers import answer_of, folded, hedged

NUMBER = (
    r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"  # sign, digits, decimals
    r"(?:[eE][-+]?[0-9]{1,3})?(?:/[0-9]+)?"
)
ANSWER = re.compile(rf"(?:^|[\s=:(\[{{$])({NUMBER})\.?\Z")
BEFORE_OPERAND = re.compile(r"[-+*/^×÷][ \t]*\Z")
BEFORE_SIGNED_OPERAND = re.compile(r"[0-9)\]][ \t]*\Z")
BEFORE_OTHERS = re.compile(
    r"(?:[<>!~≤≥≠≈±¬]=?|\\[a-zA-Z]+|[0-9][,;]?|\b(?:or|nor|not|to|than))[ \t]*[(\[{$]?[ \t]*\Z", re.I
)
ENDS_IN_EQUALS = re.compile(r"=\s*(?:<[^<>]*>\s*(?:assistant\s*)?)*\Z")
"""Pattern for a prompt that ends with an open equation (`… =`). Tokens of a chat template may follow."""
LONGEST_NUMBER = 80  # characters; a longer run of digits is not an answer to arithmetic
LAST_CHARACTERS = 200
"""Number of characters at the end of a response that are searched, so that the work is bounded."""
TOLERANCE = Fraction(1, 10**6)


@verifier(NoArguments, needs_truth=True)
def arithmetic(given: RewardInput, _: NoArguments) -> float:
    """Return 1 if the answer equals the ground truth, else 0, by the rule of the module.

    Raises `ValueError` if the ground truth is not a number, because then the task is wrong, not the model.
    """
    wanted = parse_number(str(given.ground_truth).strip())
    if wanted is None:
        raise ValueError(f"the ground truth {given.ground_truth!r:.80} is not a number; use exact_match")
    leaves_open = ENDS_IN_EQUALS.search(given.prompt[-LAST_CHARACTERS:])
    if leaves_open and given.spoken.lstrip().startswith(("=", "＝")):
        return 0.0  # the equation would have two signs
    answer = final_number(given.spoken)
    return float(answer is not None and same_number(answer, wanted))


def final_number(response: str) -> str | None:
    """Return the text of the number at the end of the response, or None."""
    tail = folded(response.rstrip()[-LAST_CHARACTERS:])
    match = ANSWER.search(tail)
    if match is None:
        return None
    before, number = tail[: match.start(1)], match.group(1)
    behind = [BEFORE_OPERAND, BEFORE_OTHERS, *([BEFORE_SIGNED_OPERAND] if number[0] in "-+" else [])]
    return None if any(pattern.search(before) for pattern in behind) else number


def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """Return the exact value and whether it was written as a decimal, or None if the text is not a number."""
    text = folded(text)
    return None if len(text) > LONGEST_NUMBER else _number(text)


@lru_cache(maxsize=4096)  # the answers of a group, and its ground truth, are the same few numbers
def _number(text: str) -> tuple[Fraction, bool] | None:
    if not re.fullmatch(NUMBER, text):
        return None
    top, _, bottom = text.replace(",", "").partition("/")
    try:
        value = Fraction(top) / int(bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None
    return value, any(mark in top for mark in ".eE")


def same_number(answer: str, wanted: tuple[Fraction, bool]) -> bool:
    given = parse_number(answer)
    if given is None:
        return False
    (left, left_decimal), (right, right_decimal) = given, wanted
    rounded = right.denominator > 1 and (left_decimal or right_decimal)
    slack = TOLERANCE * max(abs(left), abs(right)) if rounded else 0
    return abs(left - right) <= slack


DECORATION = re.compile(
    r"\\(?:f?boxed|fbox|text|mathrm|mathbf|textbf)\s?\{|\\[(){}\[\],;:! ]|\\(?=[$%])|[*{}]"
)
STATED = re.compile(rf"[\s($€£:=]*+({NUMBER})(?![\w.]*+\d)(.*)", re.DOTALL)
BEHIND = re.compile(
    r"(?!\s?\.\.)(?:[^\W\d_]{2,}.*|\s?[%$€£)\"'.,;:!?°].*|[mgsh](?![^\W\d_]).*|\s.*|)", re.DOTALL
)
PLAIN = re.compile(r"[^\W\d_]|[\s%$€£()\"'’.,;:!?°/²³-]")
LAST_NUMBER = re.compile(rf"(?<![\w.]){NUMBER}(?!\w)")
GSM8K_CHARACTERS = 4_000


class Gsm8kArguments(Section):
    flexible: bool = False
    """Whether, in a response without `####` and without a box, the last number is the answer."""


@verifier(Gsm8kArguments, needs_truth=True)
def gsm8k(given: RewardInput, arguments: Gsm8kArguments) -> float:
    """Return 1 if the number is right, else 0.

    Raises `ValueError` for a ground truth without a number, because then the task is wrong, not the model.
    """
    stated = str(given.ground_truth).rpartition("####")[2]
    wanted = parse_number(stated.strip().lstrip("$"))
    if wanted is None:
        raise ValueError(f"the ground truth {given.ground_truth!r:.80} has no number (after ####)")
    answer = number_of(given.spoken, flexible=arguments.flexible)
    return float(answer is not None and same_number(answer, wanted))


def number_of(response: str, *, flexible: bool) -> str | None:
    tail = folded(response[-GSM8K_CHARACTERS:]).replace("{,}", ",")
    stated = answer_of(tail, "hash")
    if stated is None:
        stated = answer_of(tail, "boxed")
    if stated is None:
        numbers = LAST_NUMBER.findall(answer_of(tail, "whole") or "") if flexible else []
        return numbers[-1] if numbers else None
    match = STATED.fullmatch(DECORATION.sub("", stated).strip())
    return match[1] if match is not None and _names_a_unit(match[2]) else None


def _names_a_unit(behind: str) -> bool:
    """Return whether the text after a number leaves its value unchanged: words, and signs that are not
    operators.

    A single letter directly after the number changes its value (`5k`, `5x`), except for common units. A sign
    that is itself a number (`½`, `²`, `万`) also changes the value.
    """
    if not all(PLAIN.match(sign) and unicodedata.category(sign) not in ("No", "Nl") for sign in behind):
        return False
    counts = unicodedata.numeric(behind.lstrip()[:1] or " ", None) is not None
    return BEHIND.fullmatch(behind) is not None and not counts and not hedged(behind)
