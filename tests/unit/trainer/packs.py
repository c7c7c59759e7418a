"""Packs of synthetic steps: groups with a common prompt, and answers of lognormal lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.unit.trainer.conftest import plain_row
from trainer_service.data.flops import RowCost
from trainer_service.data.microbatch import deal_rows, plan_passes
from trainer_service.data.rows import TrainingRow


@dataclass(frozen=True)
class Lengths:
    """Lengths of one kind of job: (median, sigma, most) of prompts and answers, in tokens."""

    groups: int
    samples: int
    prompt: tuple[int, float, int]
    answer: tuple[int, float, int]
    budget: int
    cost: RowCost
    ranks: int = 1


SMALL = RowCost(2 * 1_400_000_000, 2 * 28 * 2048, 2 * 2048 * 151_936)
LARGE = RowCost(2 * 7_000_000_000, 2 * 36 * 4096, 2 * 4096 * 151_936)
LENGTHS = {
    "gsm8k 64x8": Lengths(64, 8, (110, 0.35, 400), (220, 0.5, 1024), 6144, SMALL),
    "8k 32x8": Lengths(32, 8, (300, 0.6, 2000), (2500, 0.8, 7168), 10_240, SMALL),
    "8B 32k 32x16, one of 4 ranks": Lengths(32, 16, (400, 0.6, 4000), (7000, 0.9, 30_000), 32_768, LARGE, 4),
}


class _Ranks:
    """A rank that asks no other."""

    def __init__(self, world: int) -> None:
        self.world = world

    def largest(self, number: int) -> int:
        return number


def passes_of_step(case: str, step: int) -> list[list[TrainingRow]]:
    """Return the rows of each micro-batch of a step, on the first rank."""
    of = LENGTHS[case]
    rng = np.random.default_rng([step, 7])

    def lengths(median: int, sigma: float, most: int, count: int) -> Any:
        return np.minimum(np.exp(rng.normal(np.log(median), sigma, count)).astype(int) + 1, most)

    rows, groups = [], []
    for group, n_prompt in enumerate(lengths(*of.prompt, of.groups)):
        prompt = rng.integers(0, 50_000, n_prompt)
        for n_answer in lengths(*of.answer, of.samples):
            ids = np.concatenate([prompt, rng.integers(0, 50_000, n_answer)])
            rows.append(plain_row(ids, slice(n_prompt, None), episode=len(rows)))
            groups.append(group)
    if of.ranks > 1:
        costs = [[of.cost.of(row.packed_length, len(row.position))] for row in rows]
        rows = [rows[episode] for episode in deal_rows(costs, of.ranks, groups)[0]]
    ranks: Any = _Ranks(of.ranks)
    return plan_passes(rows, ranks, of.budget, of.cost, groups=np.array(groups))
