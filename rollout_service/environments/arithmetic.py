"""`arithmetic`: compute a chain of whole numbers, `47*83+59=`. One turn; 1 for the right number, else 0.

Meant for `tool_use` with the tool `calc`: then the model may compute before it answers. The answer is the
number at the very end of what it said last. `extra_info.expression` of a task gives the chain.
"""

from __future__ import annotations

import random
import re
from typing import Any

from pydantic import Field

from areal_async.config.base import Section
from areal_async.rpc.schema import Task
from rollout_service.environments import Step, level_seed
from rollout_service.environments.expression import evaluate

LAST_NUMBER = re.compile(r"(-?[0-9]{1,40})[\s.]*\Z")


class Arithmetic:
    blocking = False

    class Arguments(Section):
        """A chain of whole numbers to compute."""

        operands: int = Field(default=3, ge=2, le=10)
        """How many numbers."""
        digits: int = Field(default=2, ge=1, le=9)
        """Digits of each number."""
        operators: str = Field(default="+-*", pattern=r"^[-+*]+$")
        """Operators that are drawn from; `*` binds as usual."""

    def __init__(self, **options: Any) -> None:
        self.options = self.Arguments(**options)
        self.expression = ""

    def reset(self, seed: int, task: Task) -> str:
        self.expression = str(task.extra_info.get("expression") or draw(level_seed(seed, task), self.options))
        return f"{self.expression}="

    def state(self) -> str:
        return self.expression

    def step(self, action: str) -> Step:
        found = LAST_NUMBER.search(action[-80:])
        right = found is not None and int(found[1]) == evaluate(self.expression)[0]
        return Step("", float(right), True)


def draw(seed: int, options: Arithmetic.Arguments) -> str:
    """A chain; a function of its arguments alone."""
    rng = random.Random(seed)
    lowest = 10 ** (options.digits - 1) if options.digits > 1 else 0
    numbers = [rng.randint(lowest, 10**options.digits - 1) for _ in range(options.operands)]
    return str(numbers[0]) + "".join(f"{rng.choice(options.operators)}{number}" for number in numbers[1:])
