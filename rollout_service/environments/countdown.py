"""`countdown`: make the target from the given numbers, each used once at most.

The answer is the text between the last `<answer>` and `</answer>`, else the last line that is not empty; what
follows an `=` in it is ignored. Right is 1; see `Countdown.Arguments` for the rest. One turn.

`extra_info` of a task may give `nums` and `target`; otherwise both are drawn, and there is a solution.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from fractions import Fraction
from typing import Any

from pydantic import Field

from areal_async.config.base import Section
from areal_async.rpc.schema import Task
from rollout_service.environments import EnvironmentFailure, Step, level_seed

LONGEST = 200
"""Most characters of an expression."""
MOST_DIGITS = 60
"""Most digits of a value on the way: products of long numbers end there."""
NUMBERS = frozenset("0123456789.")


class ExpressionError(ValueError):
    """What was written has no value; the text says why, in words a model can read."""


def evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """(value, the numbers used in order) of an expression of `+ - * /`, brackets and decimals.

    Raises `ExpressionError`."""
    if len(text) > LONGEST:
        raise ExpressionError(f"longer than {LONGEST} characters")
    text = text.strip().replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("not an expression") from None
    used: list[Fraction] = []
    return _value(tree.body, used, text), used


def written(value: Fraction, decimals: int = 10) -> str:
    """A whole number as such, else a decimal, rounded to so many places."""
    if value.denominator == 1:
        return str(value.numerator)
    digits = f"{abs(round(value * 10**decimals)):0{decimals + 1}d}"
    whole, part = digits[:-decimals], digits[-decimals:].rstrip("0")
    sign = "-" if value < 0 and (whole != "0" or part) else ""
    return f"{sign}{whole}.{part}" if part else f"{sign}{whole}"


def _value(node: ast.expr, used: list[Fraction], text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            # As it was written: 0.1 is a tenth here, not the float next to it.
            source = ast.get_source_segment(text, node) or ""
            exact = Fraction(source) if source and set(source) <= NUMBERS else Fraction(number)
            used.append(_bounded(exact))
            return exact
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            value = _value(inner, used, text)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_apply(operator, _value(left, used, text), _value(right, used, text)))
    raise ExpressionError("only numbers, + - * / and brackets are understood")


def _apply(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            if right == 0:
                raise ExpressionError("division by zero")
            return left / right
    raise ExpressionError("only + - * / are understood")


def _bounded(value: Fraction) -> Fraction:
    limit = 10**MOST_DIGITS
    if abs(value.numerator) >= limit or value.denominator >= limit:
        raise ExpressionError("the numbers are too long")
    return value


DRAWS = 2_000
"""Tries to meet `highest_target`; far more than options that can be met need."""


class Countdown:
    blocking = False

    class Arguments(Section):
        """Make a number from some others, each used once at most."""

        numbers: int = Field(default=4, ge=2, le=6)
        """How many numbers are given."""
        highest: int = Field(default=50, ge=4, le=1000)
        """Largest given number."""
        highest_target: int = Field(default=200, ge=4)
        """Largest target number."""
        operators: str = Field(default="+-*/", pattern=r"^[-+*/]+$")
        """Operators that the expression may use."""
        wrong: float = 0.0
        """Reward of a proper expression with another value."""
        terse: bool = False
        """`3 5 7>22:` instead of words, for models of a few characters."""

    def __init__(self, **options: Any) -> None:
        self.options = self.Arguments(**options)
        self.numbers: list[int] = []
        self.target = 0

    def reset(self, seed: int, task: Task) -> str:
        if "nums" in task.extra_info and "target" in task.extra_info:
            self.numbers = [int(number) for number in task.extra_info["nums"]]
            self.target = int(task.extra_info["target"])
        else:
            self.numbers, self.target, _ = draw(level_seed(seed, task), self.options)
        given = " ".join(map(str, self.numbers))
        if self.options.terse:
            return f"{given}>{self.target}:"
        return (
            f"Numbers: {given}. Target: {self.target}. Write an expression with + - * / and brackets that "
            "equals the target and uses each number at most once.\n"
        )

    def state(self) -> str:
        return f"{self.numbers}>{self.target}"

    def step(self, action: str) -> Step:
        expression = answer_of(action)
        try:
            value, used = evaluate(expression)
        except ExpressionError as error:
            return Step("", 0.0, True, {"problem": str(error)})
        spare = Counter(map(Fraction, self.numbers))
        spare.subtract(used)
        if min(spare.values(), default=0) < 0:
            return Step("", 0.0, True, {"problem": "a number that was not given, or one used too often"})
        return Step("", 1.0 if value == self.target else self.options.wrong, True)


def answer_of(text: str) -> str:
    """The expression in what a model said."""
    _, opened, inside = text.rpartition("<answer>")
    if opened:
        text = inside.partition("</answer>")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition("=")[0].strip() if lines else ""


def draw(seed: int, options: Countdown.Arguments) -> tuple[list[int], int, str]:
    """(numbers, target, an expression of them that equals it). Raises `EnvironmentFailure` for options that
    leave nothing to draw."""
    rng = random.Random(seed)
    for _ in range(DRAWS):
        numbers = [rng.randint(1, options.highest) for _ in range(options.numbers)]
        value, text = Fraction(numbers[0]), str(numbers[0])
        for number in numbers[1:]:
            operator = rng.choice(options.operators)
            text = f"({text}){operator}{number}"
            value, _ = evaluate(text)
        if value.denominator == 1 and 1 <= value <= options.highest_target:
            shuffled = numbers[:]
            rng.shuffle(shuffled)
            return shuffled, int(value), text
    raise EnvironmentFailure(
        f"countdown: no target up to {options.highest_target} was found from {options.numbers} numbers: "
        "raise highest_target, or allow more operators"
    )
