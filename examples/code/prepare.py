"""Data, a random model and the two job files of the code example.

    python examples/code/prepare.py --out runs/code-files --seed 0
    areal-async run runs/code-files/warm_start.yaml
    areal-async run runs/code-files/job.yaml

A task such as `sum*47:` asks for a Python program that reads numbers from standard input and prints the right
one: `print(sum(map(int,input().split()))*47)`. The warm start shows programs of which most have a fault: they
do not parse, they crash on text where a number is needed, or they print something else. Which ones work is
not written down anywhere: in the job each program is run in the sandbox against inputs, and that is the
reward.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_async import make_tokenizer, write_model

HERE = Path(__file__).parent
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
    return {
        "data_source": "code",
        "prompt": prompt(task),
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


def prepare(out: Path, seed: int) -> None:
    """Everything into `out`; a function of `seed` alone."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    drawn = tasks(rng, N_TRAIN + N_HELD_OUT)
    held_out, train = drawn[:N_HELD_OUT], drawn[N_HELD_OUT:]
    for name, chosen in (("held_out", held_out), ("train", train)):
        write(out / f"{name}.jsonl", [row(one, json.dumps(cases(rng, one))) for one in chosen])
    shown = []
    for _ in range(N_SHOWN):
        task = rng.choice(train)
        shown.append(row(task, faulty(rng, task) if rng.random() < SHARE_FAULTY else right(task)))
    write(out / "shown.jsonl", shown)
    write(out / "shown_held_out.jsonl", [row(one, right(one)) for one in held_out])
    write_model(out / "base", seed, make_tokenizer(CHARACTERS, words=WORDS), positions=64)
    for name in ("warm_start.yaml", "job.yaml"):
        shutil.copyfile(HERE / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare(options.out, options.seed)


if __name__ == "__main__":
    main()
