"""Pairs of sums, a right one and one with an arithmetic slip, for the small size.

    areal-async quickstart trainer.steps=1
    python recipes/dpo/prepare.py --out runs/dpo-files --seed 1
    areal-async run runs/dpo-files/tiny.yaml

The first makes the tasks and a model that answers 42 to 45 % of the held-out ones.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from preparing import copy_files, prepare_command, write_tasks  # noqa: E402 - beside the recipes

SLIPS = (-100, -20, -10, -2, -1, 1, 2, 10, 20, 100)


def wrong(answer: int, rng: random.Random) -> int:
    """Another number that looks like the answer: one digit or the carry is off."""
    return max(1, answer + rng.choice(SLIPS))


def prepare(out: Path, seed: int) -> None:
    """Everything into `out`; a function of `seed` and of the quickstart's tasks, which lie beside it."""
    rng = random.Random(seed)
    for name in ("train", "held_out"):
        text = (out.parent / "quickstart-files" / f"{name}.jsonl").read_text(encoding="utf-8")
        pairs = []
        for task in map(json.loads, text.splitlines()):
            answer = task["reward_model"]["ground_truth"]
            other = str(wrong(int(answer), rng))
            pairs.append({"prompt": task["prompt"], "chosen": answer, "rejected": other})
        write_tasks(out / f"{name}.jsonl", pairs)
    copy_files(HERE, out, "tiny.yaml")


if __name__ == "__main__":
    prepare_command(__doc__, prepare)
