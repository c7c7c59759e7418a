"""Two-digit arithmetic as a task file in the schema that public RL data sets use."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

OPERATORS = {"+": operator.add, "-": operator.sub}
OPERANDS = range(10, 100)


class Sum(NamedTuple):
    left: int
    sign: str
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.sign}{self.right}="

    @property
    def answer(self) -> str:
        return str(OPERATORS[self.sign](self.left, self.right))


def split_problems(seed: int, n_held_out: int, signs: Sequence[str]) -> tuple[list[Sum], list[Sum]]:
    """All problems over `signs`, shuffled by `seed` and cut into (train, held out), which share none."""
    problems = [Sum(a, sign, b) for sign in signs for a in OPERANDS for b in OPERANDS]
    random.Random(seed).shuffle(problems)
    return problems[n_held_out:], problems[:n_held_out]


def write_parquet(problems: Sequence[Sum], path: Path, split: str) -> None:
    """One row a problem: `data_source, prompt, ability, reward_model{style, ground_truth}, extra_info`."""
    rows = [
        {
            "data_source": "two_digit_arithmetic",
            "prompt": problem.prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
