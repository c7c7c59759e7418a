"""Countdown: make the target from the given numbers, each used once at most.

    workflow_args: {environment: examples/environments/countdown.py:Countdown, environment_args: {numbers: 4}}

The answer is the text between the last `<answer>` and `</answer>`, else the last line that is not empty; what
follows an `=` in it is ignored. 1 for the target, else 0, or `wrong`. One turn.

`extra_info` of a task may give `nums` and `target`; otherwise both are drawn, and there is a solution.
"""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

from areal_async import Step, Task
from areal_async.expressions import ExpressionError, evaluate

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
        if not operators or set(operators) - set("+-*/"):
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
        try:
            value, used = evaluate(answer_of(action))
        except ExpressionError as error:
            return Step("", 0.0, True, {"problem": str(error)})
        if Counter(used) - Counter(map(Fraction, self.numbers)):
            return Step("", 0.0, True, {"problem": "a number that was not given, or one used too often"})
        return Step("", 1.0 if value == self.target else self.wrong, True)

    def _draw(self, rng: random.Random) -> None:
        for _ in range(DRAWS):
            numbers = [rng.randint(1, self.highest) for _ in range(self.count)]
            text = str(numbers[0])
            for number in numbers[1:]:
                text = f"({text}){rng.choice(self.operators)}{number}"
            value, _ = evaluate(text)
            if value.denominator == 1 and 1 <= value <= self.highest_target:
                rng.shuffle(numbers)
                self.numbers, self.target, self.solution = numbers, int(value), text
                return
        raise ValueError(
            f"no target up to {self.highest_target} was found from {self.count} numbers: raise "
            "highest_target, or allow more operators"
        )


def answer_of(text: str) -> str:
    """The expression in what a model said."""
    _, opened, inside = text.rpartition("<answer>")
    if opened:
        text = inside.partition("</answer>")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].partition("=")[0].strip() if lines else ""
