"""Data, a random model and the two job files of the small size.

    python recipes/tool-use/prepare.py --out runs/tool-use-files --seed 0
    areal-async run runs/tool-use-files/warm_start.yaml
    areal-async run runs/tool-use-files/tiny.yaml

A task is `47*83+59=`. A model of this size cannot multiply; it has to ask `calc(47*83)`, read `=3901;`, ask
`calc(3901+59)`, read `=3960;` and say `3960`. The warm start shows such turns, one a row, and is stopped
while most episodes still go wrong somewhere.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from areal_async import make_tokenizer, write_model

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from preparing import copy_files, prepare_command, task_row, write_tasks  # noqa: E402 - beside the recipes

N_TRAIN, N_SHOWN, N_HELD_OUT = 6000, 3000, 256
CHARACTERS = "0123456789+-*=;()Ecal"


def problems(rng: random.Random, n: int) -> list[tuple[int, int, str, int]]:
    """Different ones: a, b, sign and c of `a*b±c`."""
    found: dict[tuple[int, int, str, int], None] = {}
    while len(found) < n:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        found[(a, b, rng.choice("+-"), c)] = None
    return list(found)


def turns(a: int, b: int, sign: str, c: int) -> list[tuple[str, str]]:
    """(what the model has seen, what it should say) of each turn."""
    product = a * b
    total = product + c if sign == "+" else product - c
    first, second = f"{a}*{b}", f"{product}{sign}{c}"
    seen = f"{first}{sign}{c}="
    after_one = f"{seen}calc({first})={product};"
    after_two = f"{after_one}calc({second})={total};"
    return [(seen, f"calc({first})"), (after_one, f"calc({second})"), (after_two, str(total))]


def row(prompt: str, answer: str) -> dict[str, Any]:
    return task_row("calculator", prompt, answer, ability="math")


def prepare(out: Path, seed: int) -> None:
    """Everything into `out`; a function of `seed` alone."""
    rng = random.Random(seed)
    drawn = problems(rng, N_TRAIN + N_HELD_OUT)
    held_out, train = drawn[:N_HELD_OUT], drawn[N_HELD_OUT:]
    for name, chosen in (("held_out", held_out), ("train", train)):
        write_tasks(out / f"{name}.jsonl", [row(turns(*one)[0][0], turns(*one)[-1][1]) for one in chosen])
    for name, chosen in (("shown_held_out", held_out), ("shown", train[:N_SHOWN])):
        write_tasks(out / f"{name}.jsonl", [row(*turn) for one in chosen for turn in turns(*one)])
    write_model(out / "base", seed, make_tokenizer(CHARACTERS, words=("calc",)), positions=96)
    copy_files(HERE, out, "warm_start.yaml", "tiny.yaml", "tools.py")


if __name__ == "__main__":
    prepare_command(__doc__, prepare)
