"""How long a code reward takes: p50 and p99 of one call, by the form of its tests.

    python benchmarks/code_latency.py [--calls 200] [--against CHECKOUT] [--out code_latency.json]

One worker, right programs, calls one after the other. With `--against`, another checkout of this project is
measured in the same run: the two take turns, `BLOCK` calls each, so that both meet the machine as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hostile import quantile

from areal_async.base.verdicts import Score
from areal_async.config.reward import RewardSection
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 25
ADD = "def add(a, b):\n    return a + b"
CHECK = "def check(candidate):\n    for n in range(100):\n        assert candidate(n, n) == 2 * n"
FORMS: dict[str, tuple[str, Any]] = {
    "stdio, 2 cases": (
        "a, b = map(int, input().split())\nprint(a + b)",
        {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]},
    ),
    "calls, 3 cases": (ADD, {"fn_name": "add", "inputs": [[1, 2], [0, 0], [5, 6]], "outputs": [3, 0, 11]}),
    "assertions, 3 cases": (
        ADD,
        ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(5, 6) == 11"],
    ),
    "check, 100 calls": (ADD, {"test": CHECK, "entry_point": "add"}),
}


async def block(n: int) -> dict[str, list[float]]:
    """Milliseconds of each call, by form."""
    found: dict[str, list[float]] = {}
    async with LocalScorer(RewardSection(name="code_tests", timeout_s=30), 1) as scorer:
        for form, (program, truth) in FORMS.items():
            given = RewardInput(response=f"```python\n{program}\n```", ground_truth=truth)
            timed = await scorer.score_timed([given] * (n + 1))
            if not all(isinstance(one, Score) and one.value == 1 for one, _ in timed):
                raise SystemExit(f"{form}: {timed[0][0]}")
            found[form] = [took_ms for _, took_ms in timed[1:]]  # the first call makes the sandbox
    return found


def block_of(checkout: Path) -> dict[str, list[float]]:
    """The same, by the code of a checkout."""
    command = [sys.executable, __file__, "--block", str(BLOCK)]
    environment = os.environ | {"PYTHONPATH": f"{checkout}:{Path(__file__).parent}"}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--block", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.block:
        print(json.dumps(asyncio.run(block(options.block))))
        return
    checkouts = {"this": ROOT} | ({"against": options.against.resolve()} if options.against else {})
    took: dict[str, dict[str, list[float]]] = {name: {form: [] for form in FORMS} for name in checkouts}
    for _ in range(max(1, options.calls // BLOCK)):
        for name, checkout in checkouts.items():
            for form, values in block_of(checkout).items():
                took[name][form] += values
    record = {
        form: {
            name: {"calls": len(values[form]), "p50_ms": round(quantile(values[form], 0.5), 1)}
            | {"p99_ms": round(quantile(values[form], 0.99), 1)}
            for name, values in took.items()
        }
        for form in FORMS
    }
    print(json.dumps(record, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
