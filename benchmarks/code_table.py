"""Labelled responses to code tasks: how often `code_stdio` and `code_tests` agree with the labels.

    python benchmarks/code_table.py [--workers 2] [--out code_table.json]

The programs are in `tables/`. To these come responses around one program (fences, prose, several blocks).
Needs no training and no network; a few minutes on two slow cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from areal_async.base.verdicts import Score, Verdict
from areal_async.config.reward import RewardSection
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput

TABLES = Path(__file__).parent / "tables"
QUICK = {"cpu_s": 2, "wall_s": 3}
SUM_TRUTH = {"inputs": ["1 2\n", "-5 5\n"], "outputs": ["3\n", "0\n"]}
SUM = "a, b = map(int, input().split())\nprint(a + b)"
WRONG = "print(3)"

AROUND = {
    "plain fence": (f"```python\n{SUM}\n```", 1),
    "prose before and after": (f"Let me think.\n\n```python\n{SUM}\n```\n\nThis adds both numbers.", 1),
    "no language": (f"```\n{SUM}\n```", 1),
    "py": (f"```py\n{SUM}\n```", 1),
    "capitals": (f"```Python\n{SUM}\n```", 1),
    "attributes of the fence": (f"```python title=main.py\n{SUM}\n```", 1),
    "tildes": (f"~~~python\n{SUM}\n~~~", 1),
    "four marks": (f"````python\n{SUM}\n````", 1),
    "never closed": (f"Here it is:\n```python\n{SUM}", 1),
    "the last block counts, right": (f"```python\n{WRONG}\n```\nBetter:\n```python\n{SUM}\n```", 1),
    "the last block counts, wrong": (f"```python\n{SUM}\n```\nOr simply:\n```python\n{WRONG}\n```", 0),
    "an empty block last": (f"```python\n{SUM}\n```\n```\n```", 1),
    "thinking first": (f"<think>```python\n{WRONG}\n```</think>\n```python\n{SUM}\n```", 1),
    "line ends of Windows": (f"```python\n{SUM}\n```".replace("\n", "\r\n"), 1),
    "accents and signs": (f"Voilà, ça marche → ✓\n```python\n# été ✓\n{SUM}\n```", 1),
    "a fence in a text of the program": (f"```python\nmark = '```'\n{SUM}\n```", 1),
    "no fence": (SUM, 0),
    "nothing": ("", 0),
    "prose alone": ("The answer is to add both numbers.", 0),
    "an opening fence alone": ("```python", 0),
    "marks inside a line": (f"`{SUM}`", 0),
    "output instead of a program": ("```\n3\n0\n```", 0),
    "a session instead of a program": (f"```python\n>>> {SUM}\n```", 0),
    "indented as a whole": ("```python\n    a, b = map(int, input().split())\n    print(a + b)\n```", 0),
}


class Row(NamedTuple):
    category: str
    reward: str
    given: RewardInput
    label: int
    args: dict[str, Any]


def fenced(program: str, language: str = "python") -> str:
    return f"```{language}\n{program}\n```"


def table() -> list[Row]:
    rows = []
    for reward in ("code_stdio", "code_tests"):
        for task in yaml.safe_load((TABLES / f"{reward}.yaml").read_text(encoding="utf-8")):
            truth = task.get("truth") or {
                "inputs": [one for one, _ in task["cases"]],
                "outputs": [two for _, two in task["cases"]],
            }
            for label, name in ((1, "right"), (0, "wrong")):
                for program in task[name]:
                    given = RewardInput(
                        response=fenced(program), ground_truth=truth, data_source=task["task"]
                    )
                    args = QUICK | task.get("args", {})
                    rows.append(Row(f"{reward}: {name}", reward, given, label, args))
    for name, (response, label) in AROUND.items():
        given = RewardInput(response=response, ground_truth=json.dumps(SUM_TRUTH), data_source=name)
        rows.append(Row("around the program", "code_stdio", given, label, QUICK))
    return rows


async def verdicts_of(rows: list[Row], workers: int) -> list[Verdict]:
    """By the same pool as the service, one reward and set of arguments after the other."""
    found: dict[int, Verdict] = {}
    by_reward: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_reward[json.dumps([row.reward, row.args], sort_keys=True)].append(index)
    for indices in by_reward.values():
        first = rows[indices[0]]
        section = RewardSection(name=first.reward, args=first.args, timeout_s=120)
        async with LocalScorer(section, workers) as scorer:
            verdicts = await scorer.score([rows[index].given for index in indices])
        found.update(zip(indices, verdicts, strict=True))
    return [found[index] for index in range(len(rows))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = table()
    verdicts = asyncio.run(verdicts_of(rows, options.workers))
    right: dict[str, list[bool]] = defaultdict(list)
    for row, verdict in zip(rows, verdicts, strict=True):
        agrees = isinstance(verdict, Score) and verdict.value == row.label
        right[row.category].append(agrees)
        if not agrees:
            print(f"  {row.category}, {row.given.data_source}: label {row.label}, {verdict}")
            print(row.given.response)
    print(f"{'category':28} {'cases':>6} {'right':>6}")
    for category, marks in right.items():
        print(f"{category:28} {len(marks):6} {sum(marks):6}")
    n, agreed = len(rows), sum(map(sum, right.values()))
    print(f"{'all':28} {n:6} {agreed:6}  accuracy {agreed / n:.4f}")
    if options.out is not None:
        record = {
            "cases": n,
            "right": agreed,
            "accuracy": agreed / n,
            "categories": {name: {"cases": len(marks), "right": sum(marks)} for name, marks in right.items()},
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
