"""`countdown`: an expression of the given numbers that equals the target.

The ground truth is `{target: 24, numbers: [1, 2, 3, 4]}` (`nums` is read too); either may instead stand in
`extra_info`. The answer is the text of the last `<answer>`, else of the last box, else the last line. What
stands behind an `=` in it must be the target. Only whole numbers, `+ - * /` and brackets are read, signs like
`×` and `\\times` too; everything is computed exactly, nothing is run.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from fractions import Fraction
from typing import Any, Literal

from areal_async.config.base import Section
from reward_service.sdk import Abstain, RewardInput, Score
from reward_service.verifiers import verifier
from reward_service.verifiers.answers import answer_of

LONGEST = 200
"""Characters of an expression."""
WRITTEN = re.compile(r"[0-9+*/() -]*")
MOST_BITS = 256
"""Size of a value on the way."""
SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": "", "×": "*", "÷": "/",
         "−": "-", "$": "", r"\(": "", r"\)": "", "{": "(", "}": ")", "[": "(", "]": ")"}  # fmt: skip


class CountdownArguments(Section):
    use: Literal["all", "some"] = "all"
    """Whether each number must be used."""
    wrong: float = 0.0
    """Reward of a proper expression with another value."""


@verifier(CountdownArguments)
def countdown(given: RewardInput, arguments: CountdownArguments) -> Score | Abstain:
    """1 for an expression with the target's value that uses each number once (`some`: at most once), `wrong`
    for a proper expression with another value, else 0. Component `proper`: 1 for an expression of the given
    numbers, whatever its value. Raises ValueError for a ground truth of another form."""
    task = _task(given)
    if task is None:
        return Abstain("the task has no target and numbers")
    target, numbers = task
    written = answer_of(given.response, "marked")
    if written is None or answer_of(given.response, "said") == written:
        written = answer_of(given.response, "last_line") or ""
    expression, equals, result = written.strip().rstrip(".").partition("=")
    found = evaluate(expression)
    if found is None or not _uses(found[1], numbers, arguments.use):
        return Score(0.0, {"proper": 0.0})
    stated = evaluate(result) if equals else (target, [])
    right = found[0] == target and stated is not None and stated[0] == target
    return Score(1.0 if right else arguments.wrong, {"proper": 1.0})


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """(value, the numbers used) of a written expression; None for anything else."""
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    text = text.strip().strip("*`").strip()
    if not text or len(text) > LONGEST or not WRITTEN.fullmatch(text):
        return None
    try:
        used: list[int] = []
        return _value(parsed(text), used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def parsed(text: str) -> ast.expr:
    """The syntax tree of an expression. Raises what `ast.parse` does; its warnings about bad style are for
    people who write programs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def _task(given: RewardInput) -> tuple[Fraction, list[int]] | None:
    truth: Any = given.ground_truth
    source = {**given.extra_info, **(truth if isinstance(truth, dict) else {})}
    target = source.get("target", None if isinstance(truth, dict) else truth)
    numbers = source.get("numbers", source.get("nums"))
    if target is None or numbers is None:
        return None
    try:
        return Fraction(str(target)), [int(number) for number in numbers]
    except (TypeError, ValueError):
        raise ValueError(
            f"the target {target!r:.40} and the numbers {numbers!r:.80} must be numbers"
        ) from None


def _uses(used: list[int], numbers: list[int], use: str) -> bool:
    if use == "all":
        return Counter(used) == Counter(numbers)
    return bool(used) and not Counter(used) - Counter(numbers)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            used.append(number)
            return _bounded(Fraction(number))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, used)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, used)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _bounded(_value(left, used) + _value(right, used))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _bounded(_value(left, used) - _value(right, used))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _bounded(_value(left, used) * _value(right, used))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _bounded(_value(left, used) / _value(right, used))
    raise ValueError("not an expression of numbers")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("the numbers are too long")
    return value
