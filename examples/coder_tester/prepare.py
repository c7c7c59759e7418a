"""Data, two random models and the job files of the coder and the tester (CURE, arXiv:2506.03136).

    python examples/coder_tester/prepare.py --out runs/coder_tester-files --seed 0
    areal-async run runs/coder_tester-files/warm_coder.yaml
    areal-async run runs/coder_tester-files/warm_tester.yaml
    areal-async run runs/coder_tester-files/job.yaml

The warm starts show programs and tests of which half are those of another function; which ones are right is
not written down anywhere. In the job each program of a group is run against each test of it in the sandbox:
right programs are rewarded, and so are tests that tell right programs from wrong ones, each policy for its
own (`group_by: task_agent`). The last evaluation record in `metrics.jsonl` has both on held-out functions,
under `by_source`: the share of programs that pass the task's tests, and the share of tests that the right
program passes.
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
sys.path.insert(0, str(HERE.parents[1] / "recipes"))
from preparing import copy_files, prepare_command, task_row, write_tasks  # noqa: E402 - where the recipes are

N_SHOWN, N_HELD_OUT = 8000, 6
SHARE_FAULTY = 0.5
INPUTS = range(3)
WORDS = ("max", "min", "sum")
CHARACTERS = "0123456789+-=,:?()ab" + "".join(sorted(set("".join(WORDS))))
KINDS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "max": ("max(a,b)", max),
    "min": ("min(a,b)", min),
    "sum": ("a+b", lambda a, b: a + b),
}
Function = tuple[str, str, int]
"""What to take of two numbers, a sign, and the number behind it: `max+3`."""


def value(function: Function, a: int, b: int) -> int:
    kind, sign, number = function
    return KINDS[kind][1](a, b) + (number if sign == "+" else -number)


def body(function: Function) -> str:
    kind, sign, number = function
    return f"{KINDS[kind][0]}{sign}{number}"


def another(rng: random.Random, function: Function) -> Function:
    """One that differs in its kind or its sign."""
    kind, sign, number = function
    if rng.random() < 0.3:
        return kind, "-" if sign == "+" else "+", number
    return rng.choice([other for other in KINDS if other != kind]), sign, number


def test(rng: random.Random, function: Function) -> str:
    a, b = rng.choice(INPUTS), rng.choice(INPUTS)
    return f"{a},{b}={value(function, a, b)}"


def tests(function: Function) -> str:
    """The task's own: what a program must pass to be right. No other function of `KINDS` passes them."""
    return json.dumps([f"assert f({a}, {b}) == {value(function, a, b)}" for a, b in ((1, 2), (3, 1), (2, 2))])


def program(function: Function) -> str:
    return f"def f(a, b):\n    return {body(function)}\n"


def rows(
    functions: list[Function], source: str, truth: Callable[[Function], str] = tests
) -> list[dict[str, Any]]:
    return [task_row(source, "{}{}{}:".format(*one), truth(one), ability="code") for one in functions]


def prepare(out: Path, seed: int) -> None:
    """Everything into `out`; a function of `seed` alone."""
    rng = random.Random(seed)
    functions = [(kind, sign, number) for kind in KINDS for sign in "+-" for number in range(1, 6)]
    rng.shuffle(functions)
    held_out, train = functions[:N_HELD_OUT], functions[N_HELD_OUT:]
    write_tasks(out / "train.jsonl", rows(train, "both"))
    write_tasks(out / "held_out.jsonl", rows(held_out, "coder") + rows(held_out, "tester", program))
    shown: dict[str, list[dict[str, Any]]] = {"coder": [], "tester": []}
    for _ in range(N_SHOWN):
        function = rng.choice(train)
        said = another(rng, function) if rng.random() < SHARE_FAULTY else function
        name = "".join(map(str, function))
        shown["coder"].append(task_row("shown", f"{name}:", body(said), ability="code"))
        shown["tester"].append(task_row("shown", f"{name}?", test(rng, said), ability="code"))
    for number, (policy, examples) in enumerate(shown.items()):
        write_tasks(out / f"{policy}_shown.jsonl", examples)
        write_model(out / policy, seed + number, make_tokenizer(CHARACTERS, words=WORDS), positions=64)
    copy_files(HERE, out, "warm_coder.yaml", "warm_tester.yaml", "job.yaml", "duel.py", "judge.py")
    copy_files(HERE.parent / "rewards", out, "code_matrix.py")


if __name__ == "__main__":
    prepare_command(__doc__, prepare)
