"""Countdown: make the target from the given numbers, each used once at most.

    workflow_args: {environment: examples/environments/countdown.py:Countdown, environment_args: {numbers: 4}}

The built-in reward `countdown` reads the answer and judges it: 1 for the target, `wrong` for a proper
expression with another value, else 0. One turn.

`extra_info` of a task may give `nums` and `target`; otherwise both are drawn, and there is a solution.
"""

from __future__ import annotations

import operator
import random
from fractions import Fraction
from typing import Any

from areal_async import RewardInput, Step, Task, load_reward

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
        self.judge: Any = load_reward("countdown")
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
        return Step("", self.judge(given, use="some", wrong=self.wrong).value, True)

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
