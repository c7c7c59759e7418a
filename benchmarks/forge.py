"""Adversarial search: does any program that computes nothing right pass a code task?

    python benchmarks/forge.py [--each 1] [--workers 2] [--out forge.json]

Every program of `forgeries.py` is tried on every task of `forge_tasks.py`, and every right program on its own
task. `--each n` tries one pair of n, but more of those in which the program replaces what the task's tests
name. Exit status 1 when one of the first passes, or one of the second does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_tasks import TASKS
from forgeries import forgeries

from areal_async.base.verdicts import Score, Verdict
from areal_async.config.reward import RewardSection
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput

ARGS = {"cpu_s": 1.0, "wall_s": 2.0, "budget_s": 3.0, "memory_mb": 192}
BLOCK = 400


def right_ones() -> Iterator[tuple[str, str, RewardInput]]:
    """(task, shape, input)."""
    for name, task in TASKS.items():
        yield name, task.shape, given(task.right, task.truth)


def forged_ones(each: int) -> Iterator[tuple[str, str, str, RewardInput]]:
    """(kind and name of the forgery, task, shape, input)."""
    by_entry = {task.entry: list(forgeries(task.entry)) for task in TASKS.values()}
    number = 0
    for name, task in TASKS.items():
        words = set(re.findall(r"\w+", str(task.truth)))
        for kind, what, program in by_entry[task.entry]:
            aimed = kind in ("names", "files") and not words.isdisjoint(re.findall(r"^\w+", what))
            number += 40 if aimed else 1 if kind in ("names", "files") else 4
            if number >= 4 * each:
                number -= 4 * each
                yield f"{kind}: {what}", name, task.shape, given(program, task.truth)


def given(program: str, truth: Any) -> RewardInput:
    return RewardInput(response=f"~~~~~~python\n{program}\n~~~~~~", ground_truth=json.dumps(truth))


async def judged(inputs: list[RewardInput], workers: int, args: dict[str, Any]) -> list[Verdict]:
    section = RewardSection(name="code_tests", args=args, timeout_s=30)
    found: list[Verdict] = []
    began_s = time.monotonic()
    async with LocalScorer(section, workers) as scorer:
        for at in range(0, len(inputs), BLOCK):
            found += await scorer.score(inputs[at : at + BLOCK])
            print(f"  {len(found)} of {len(inputs)}, {time.monotonic() - began_s:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    right, forged = list(right_ones()), list(forged_ones(options.each))
    began_s = time.monotonic()
    inputs = [*(one[-1] for one in right), *(one[-1] for one in forged)]
    verdicts = asyncio.run(judged(inputs, options.workers, ARGS))
    refused = [
        f"{task}: {verdict}"
        for (task, _, _), verdict in zip(right, verdicts[: len(right)], strict=True)
        if not (isinstance(verdict, Score) and verdict.value == 1)
    ]
    passed, unscored = [], []
    kinds: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    for (what, task, shape, _), verdict in zip(forged, verdicts[len(right) :], strict=True):
        kinds[what.partition(":")[0]] += 1
        shapes[shape] += 1
        if not isinstance(verdict, Score):
            unscored.append(f"{task} / {what}: {verdict}")
        elif verdict.value > 0:
            passed.append(f"{task} / {what}")
    record = {
        "programs": len({what for what, _, _, _ in forged}),
        "tasks": len(TASKS),
        "tried": len(forged),
        "passed": passed,
        "without_a_score": unscored,
        "right_programs": len(right),
        "right_programs_refused": refused,
        "tried_by_kind": dict(kinds),
        "tried_by_shape": dict(shapes),
        "wall_s": round(time.monotonic() - began_s),
    }
    print(json.dumps(record, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(passed or refused or unscored))


if __name__ == "__main__":
    main()
