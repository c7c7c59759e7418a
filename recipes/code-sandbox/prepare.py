"""Data, a random model and the two job files of the small size.

    python recipes/code-sandbox/prepare.py --out runs/code-sandbox-files --seed 0
    areal-async run runs/code-sandbox-files/warm_start.yaml
    areal-async run runs/code-sandbox-files/tiny.yaml

A task such as `sum*47:` asks for a Python program that reads numbers from standard input and prints the right
one: `print(sum(map(int,input().split()))*47)`. The warm start shows programs of which most have a fault: they
do not parse, they crash on text where a number is needed, or they print something else. Which ones work is
not written down anywhere: in the job each program is run in the sandbox against inputs, and that is the
reward.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_async import make_tokenizer, write_model

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from preparing import copy_files, prepare_command, task_row, write_tasks  # noqa: E402 - beside the recipes

N_TRAIN, N_SHOWN, N_HELD_OUT = 2000, 6000, 64
SHARE_FAULTY = 0.65
WORDS = ("print", "input", "split", "sum", "max", "min", "map", "int")
CHARACTERS = "0123456789+-*:(),." + "".join(sorted(set("".join(WORDS))))
KINDS: dict[str, Callable[[list[int]], int]] = {"sum": sum, "max": max, "min": min}
SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": lambda one, two: one + two,
    "-": lambda one, two: one - two,
    "*": lambda one, two: one * two,
}
Task = tuple[str, str, int]
"""What to take of the numbers, a sign, and the number behind it."""


def tasks(rng: random.Random, n: int) -> list[Task]:
    """Different ones."""
    every = [(kind, sign, number) for kind in KINDS for sign in SIGNS for number in range(2, 400)]
    return rng.sample(every, n)


def prompt(task: Task) -> str:
    kind, sign, number = task
    return f"{kind}{sign}{number}:"


def right(task: Task) -> str:
    kind, sign, number = task
    return f"print({kind}(map(int,input().split())){sign}{number})"


def faulty(rng: random.Random, task: Task) -> str:
    """The right program with one fault."""
    kind, sign, number = task
    other = rng.choice([one for one in KINDS if one != kind])
    return rng.choice(
        [
            f"print({kind}(input().split()){sign}{number})",  # numbers as text
            f"print({kind}(map(int,input())){sign}{number})",  # characters instead of numbers
            f"print({kind}(map(int,input().split()){sign}{number})",  # a parenthesis is missing
            f"print({other}(map(int,input().split())){sign}{number})",
            f"print({kind}(map(int,input().split())))",
        ]
    )


def cases(rng: random.Random, task: Task) -> dict[str, list[str]]:
    """Two inputs with their outputs, as the reward `code_stdio` reads them."""
    kind, sign, number = task
    inputs = [[rng.randint(-99, 99) for _ in range(rng.randint(3, 6))] for _ in range(2)]
    outputs = [SIGNS[sign](KINDS[kind](numbers), number) for numbers in inputs]
    return {
        "inputs": [" ".join(map(str, numbers)) + "\n" for numbers in inputs],
        "outputs": [f"{output}\n" for output in outputs],
    }


def row(task: Task, ground_truth: str) -> dict[str, Any]:
    return task_row("code", prompt(task), ground_truth, ability="code")


def prepare(out: Path, seed: int) -> None:
    """Everything into `out`; a function of `seed` alone."""
    rng = random.Random(seed)
    drawn = tasks(rng, N_TRAIN + N_HELD_OUT)
    held_out, train = drawn[:N_HELD_OUT], drawn[N_HELD_OUT:]
    for name, chosen in (("held_out", held_out), ("train", train)):
        write_tasks(out / f"{name}.jsonl", [row(one, json.dumps(cases(rng, one))) for one in chosen])
    shown = []
    for _ in range(N_SHOWN):
        task = rng.choice(train)
        shown.append(row(task, faulty(rng, task) if rng.random() < SHARE_FAULTY else right(task)))
    write_tasks(out / "shown.jsonl", shown)
    write_tasks(out / "shown_held_out.jsonl", [row(one, right(one)) for one in held_out])
    write_model(out / "base", seed, make_tokenizer(CHARACTERS, words=WORDS), positions=64)
    copy_files(HERE, out, "warm_start.yaml", "tiny.yaml")


if __name__ == "__main__":
    prepare_command(__doc__, prepare)
