"""Countdown: make the target from the given numbers, each used once at most.

    workflow_args: {environment: examples/environments/countdown.py:Countdown, environment_args: {numbers: 4}}

The reward `countdown`, here too, reads the answer and judges it: 1 for the target, `wrong` for a proper
expression with another value, else 0. One turn. It suits other workflows as well:

    reward: {name: examples/environments/countdown.py:countdown, args: {use: some}}

`extra_info` of a task may give `nums` and `target`; otherwise both are drawn, and there is a solution.
"""

from __future__ import annotations

import operator
import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from expressions import ExpressionError, evaluate  # beside this file

from areal_async import Abstain, RewardInput, Score, Step, Task, answer_of, reward

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

DRAWS = 2_000
"""Tries to meet `highest_target`; far more than options that can be met need."""


class Countdown:
    blocking = False

    def __init__(
        self,
        numbers: int = 4,
        highest: int = 50,
        highest_target: int = 200,
        operators: str = "+-*/",
        wrong: float = 0.0,
        terse: bool = False,
    ) -> None:
        """`numbers` up to `highest` are given; `operators` are those of the solution; `wrong` is the reward
        of a proper expression with another value; `terse` says `3 5 7>22:` instead of words."""
        if not 2 <= numbers <= 6 or not 4 <= highest <= 1000 or highest_target < 4:
            raise ValueError("numbers is 2 to 6, highest 4 to 1000, highest_target at least 4")
        if not operators or set(operators) - set(OPERATORS):
            raise ValueError("operators are some of + - * /")
        self.count, self.highest, self.highest_target = numbers, highest, highest_target
        self.operators, self.wrong, self.terse = operators, wrong, terse
        self.numbers: list[int] = []
        self.target = 0
        self.solution = ""
        """An expression that makes the target, when both were drawn."""

    def reset(self, seed: int, task: Task) -> str:
        extra = task.extra_info
        if "nums" in extra and "target" in extra:
            self.numbers, self.target = [int(number) for number in extra["nums"]], int(extra["target"])
        else:
            self._draw(random.Random(extra.get("seed", seed)))
        given = " ".join(map(str, self.numbers))
        if self.terse:
            return f"{given}>{self.target}:"
        return (
            f"Numbers: {given}. Target: {self.target}. Write an expression with + - * / and brackets that "
            "equals the target and uses each number at most once.\n"
        )

    def state(self) -> str:
        return f"{self.numbers}>{self.target}"

    def step(self, action: str) -> Step:
        truth = {"target": self.target, "numbers": self.numbers}
        given = RewardInput(response=action, ground_truth=truth)
        judged = countdown(given, use="some", wrong=self.wrong)
        return Step("", judged.value if isinstance(judged, Score) else 0.0, True)

    def _draw(self, rng: random.Random) -> None:
        for _ in range(DRAWS):
            numbers = [rng.randint(1, self.highest) for _ in range(self.count)]
            text, value = str(numbers[0]), Fraction(numbers[0])
            for number in numbers[1:]:
                sign = rng.choice(self.operators)
                text, value = f"({text}){sign}{number}", OPERATORS[sign](value, number)
            if value.denominator == 1 and 1 <= value <= self.highest_target:
                rng.shuffle(numbers)
                self.numbers, self.target, self.solution = numbers, int(value), text
                return
        raise ValueError(
            f"no target up to {self.highest_target} was found from {self.count} numbers: raise "
            "highest_target, or allow more operators"
        )


# --- the reward ----------------------------------------------------------------------------------------


WRITTEN = re.compile(r"[0-9+*/() -]*")
SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": "", "×": "*", "÷": "/",
         "−": "-", "$": "", r"\(": "", r"\)": "", "{": "(", "}": ")", "[": "(", "]": ")"}  # fmt: skip


@reward
def countdown(given: RewardInput, *, use: str = "all", wrong: float = 0.0) -> Score | Abstain:
    """1 for an expression with the target's value that uses each number once (`use: some`: at most once),
    `wrong` for a proper expression with another value, else 0. Component `proper`: 1 for an expression of the
    given numbers, whatever its value. The task's ground truth or `extra_info` has `target` and `numbers` (or
    `nums`). Raises ValueError for a ground truth of another form."""
    task = _task(given)
    if task is None:
        return Abstain("the task has no target and numbers")
    target, numbers = task
    written = answer_of(given.spoken, "marked")
    if written is None or answer_of(given.spoken, "said") == written:
        written = answer_of(given.spoken, "last_line") or ""
    expression, equals, result = written.strip().rstrip(".").partition("=")
    found = _plain(expression)
    if found is None or not _uses(found[1], numbers, use):
        return Score(0.0, {"proper": 0.0})
    stated = _plain(result) if equals else (target, [])
    right = found[0] == target and stated is not None and stated[0] == target
    return Score(1.0 if right else wrong, {"proper": 1.0})


def _plain(text: str) -> tuple[Fraction, list[Fraction]] | None:
    """`evaluate` of whole numbers and LaTeX's signs; None for anything else."""
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    text = text.strip().strip("*`").strip()
    try:
        return evaluate(text) if WRITTEN.fullmatch(text) else None
    except ExpressionError:
        return None


def _task(given: RewardInput) -> tuple[Fraction, list[Fraction]] | None:
    truth: Any = given.ground_truth
    source = {**given.extra_info, **(truth if isinstance(truth, dict) else {})}
    target = source.get("target", None if isinstance(truth, dict) else truth)
    numbers = source.get("numbers", source.get("nums"))
    if target is None or numbers is None:
        return None
    try:
        return Fraction(str(target)), [Fraction(int(number)) for number in numbers]
    except (TypeError, ValueError):
        raise ValueError(
            f"the target {target!r:.40} and the numbers {numbers!r:.80} must be numbers"
        ) from None


def _uses(used: list[Fraction], numbers: list[Fraction], use: str) -> bool:
    if use == "all":
        return Counter(used) == Counter(numbers)
    return bool(used) and not Counter(used) - Counter(numbers)
