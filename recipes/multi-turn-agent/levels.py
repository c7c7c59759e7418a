"""Levels of the frozen lake for the sizes on GPUs: a task is a seed, of which the environment draws a map.

python recipes/multi-turn-agent/levels.py --out recipes/multi-turn-agent/data --seed 0
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from preparing import prepare_command, task_row, write_tasks

N_TRAIN, N_HELD_OUT = 4000, 200
ASKED = "Think in a sentence or two, and end with your move."


def levels(seeds: list[int]) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        row = task_row("frozenlake", ASKED, "", ability="planning", style="environment", extra={"seed": seed})
        yield {**row, "prompt": [{"role": "user", "content": ASKED}]}


def prepare(out: Path, seed: int) -> None:
    """Both files into `out`; a function of `seed` alone."""
    drawn = random.Random(seed).sample(range(1 << 30), N_TRAIN + N_HELD_OUT)
    write_tasks(out / "train.jsonl", levels(drawn[:N_TRAIN]))
    write_tasks(out / "held_out.jsonl", levels(drawn[N_TRAIN:]))


if __name__ == "__main__":
    prepare_command(__doc__, prepare)
