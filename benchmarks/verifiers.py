"""Accuracy of the maths verifier on the labelled table, and what fuzzed answers do to every verifier.

    python benchmarks/verifiers.py [--fuzz 10000] [--seed 0] [--json FILE]

Exits 1 when a fuzzed answer makes a verifier raise, or keeps it busy for longer than `--limit` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from reward_service.sdk import Abstain, RewardInput, Score, load_reward
from reward_service.verifiers.equality import preload
from reward_service.verifiers.math import math

TABLE = Path(__file__).parents[1] / "tests" / "golden" / "maths_answers.yaml"
BLIND = TABLE.with_name("maths_answers_blind.yaml")
"""Written after the verifier, and judged by it unseen; see docs/rewards.md#use-built-in-rewards."""
EXAMPLES = TABLE.parents[2] / "examples"
INSTRUCTIONS, JSON_SCHEMA, F1, REPETITION = (
    f"{EXAMPLES}/rewards/{name}"
    for name in (
        "instructions.py:instructions",
        "json_schema.py:json_schema",
        "texts.py:f1",
        "texts.py:repetition",
    )
)
COUNTDOWN = f"{EXAMPLES}/environments/countdown.py:countdown"
REASONING_GYM = f"{EXAMPLES}/environments/of_reasoning_gym.py:reasoning_gym"
SIGNS = r"""
\boxed{ \frac{ \frac \sqrt{ \sqrt[ \left( \right) \text{ \pi \infty \begin{pmatrix} \end{pmatrix} \cup \pm \le
\log \sin \binom{ \int \sum_ \overline{ \circ \% \{ \} { } ( ) [ ] $ $$ & \\ \ ^ _ + - * / = < > ! | , . : ;
" ' 0 1 2 7 57 1000000 99999999999 3.14 x y n i e f(x) cm and or a B null NaN __import__('os') é 𝟓 ٣ − ½ ∞
#### <answer> </answer> </think> <think> because ```json ```
"""
PIECES = [*SIGNS.split(), " ", "\n", "\x00", "\ufffd", "The answer is "]
SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
RULES = [{"id": "length_constraints:number_words", "num_words": 3}, {"id": "detectable_format:json_format"}]
VERIFIERS: dict[str, dict[str, Any]] = {
    "math": {},
    "gsm8k": {"flexible": True},
    COUNTDOWN: {},
    "choice": {},
    "exact_match": {"where": "any", "case": False, "punctuation": False, "articles": False},
    "arithmetic": {},
    F1: {},
    "regex": {"pattern": r"(\d+)\s*$", "group": 1},
    "format_tags": {"partial": True},
    JSON_SCHEMA: {"schema": SCHEMA},
    INSTRUCTIONS: {"rules": RULES},
    REPETITION: {},
    "weighted": {"parts": [{"name": "math"}, {"name": F1}]},
    REASONING_GYM: {"dataset": "countdown"},
}  # fmt: skip
TRUTHS: dict[str, Any] = {
    COUNTDOWN: {"target": 10, "numbers": [1, 2, 7]},
    "choice": "B",
    REASONING_GYM: {"answer": "1 + 2 + 7", "metadata": {"numbers": [1, 2, 7], "target": 10}},
}
MATHS_TRUTHS = ["57", r"\frac{1}{2}", "(1,2)", r"\{1,2\}", "x^2+1", "x>3", r"2\sqrt{3}", r"12\text{ cm}"]


def accuracy(table: Path) -> list[dict[str, Any]]:
    """A row per category of the table, with the cases that were judged wrongly."""
    rows = []
    for category, cases in yaml.safe_load(table.read_text(encoding="utf-8")).items():
        began_s = time.perf_counter()
        wrong = [case for case in cases if judged(case[0], case[1]) != case[2]]
        elapsed_ms = (time.perf_counter() - began_s) * 1000 / len(cases)
        rows.append({"category": category, "cases": len(cases), "wrong": wrong, "mean_ms": elapsed_ms})
    return rows


def judged(truth: str, response: str) -> float:
    verdict = math(RewardInput(ground_truth=truth, response=response))
    assert isinstance(verdict, Score)
    return verdict.value


def fuzzed_answers(rng: random.Random, count: int) -> Iterator[str]:
    """A third is made of pieces of answers, half of these inside a box; two thirds are answers of the table
    of which some pieces were replaced, taken out or doubled."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    known = [case[1] for cases in table.values() for case in cases]
    for _ in range(count):
        if rng.random() < 1 / 3:
            body = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, rng.choice((4, 12, 60)))))
            yield rf"\boxed{{{body}}}" if rng.random() < 0.5 else body
        else:
            yield mutated(rng, rng.choice(known))


def mutated(rng: random.Random, answer: str) -> str:
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(answer))
        end = min(len(answer), start + rng.choice((0, 1, 1, 2, 5)))
        put = rng.choice((rng.choice(PIECES), "", answer[start:end] * 2))
        answer = answer[:start] + put + answer[end:]
    return answer


def fuzz(count: int, seed: int, names: list[str] | None = None) -> list[dict[str, Any]]:
    """A row per verifier: what `count` fuzzed answers came to. `crashes` holds (answer, error)."""
    rows = []
    for name in names or list(VERIFIERS):
        rng, function = random.Random(seed), load_reward(name)
        kinds: Counter[str] = Counter()
        crashes, slowest_s, slowest = [], 0.0, ""
        for answer in fuzzed_answers(rng, count):
            truth = rng.choice(MATHS_TRUTHS) if name in ("math", "weighted") else TRUTHS.get(name, "57")
            given = RewardInput(response=answer, ground_truth=truth, response_tokens=len(answer))
            began_s = time.process_time()
            try:
                kinds[kind(function(given, **VERIFIERS[name]))] += 1
            except Exception as error:
                crashes.append((answer, f"{type(error).__name__}: {error}"))
            elapsed_s = time.process_time() - began_s
            if elapsed_s > slowest_s:
                slowest_s, slowest = elapsed_s, answer
        rows.append(
            {"verifier": name, "answers": count, "verdicts": dict(kinds), "crashes": crashes}
            | {"slowest_s": slowest_s, "slowest": slowest}
        )
    return rows


def kind(result: Any) -> str:
    """`right`, `wrong`, `part` or `abstain`; raises for what is no verdict."""
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if isinstance(result, Abstain):
        return "abstain"
    value = result.value if isinstance(result, Score) else result
    return {0.0: "wrong", 1.0: "right"}.get(float(value), "part")


def show(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"{name:36} right  of   mean ms")
    for row in rows:
        right = row["cases"] - len(row["wrong"])
        print(f"{row['category']:36} {right:5} {row['cases']:3} {row['mean_ms']:9.1f}")
        for case in row["wrong"]:
            print(f"    judged wrongly: {case}")
    cases, wrong = sum(row["cases"] for row in rows), sum(len(row["wrong"]) for row in rows)
    print(f"{'all':36} {cases - wrong:5} {cases:3}   accuracy {(cases - wrong) / cases:.4f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fuzz", type=int, default=10_000, help="answers for each verifier")
    parser.add_argument("--verifiers", nargs="*", help="which to fuzz (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that one answer may take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    preload()
    tables = {path.stem: accuracy(path) for path in (TABLE, BLIND)}
    for name, rows in tables.items():
        show(name, rows)
    fuzzed = []
    for name in (options.verifiers or list(VERIFIERS)) if options.fuzz else ():
        fuzzed += (rows := fuzz(options.fuzz, options.seed, [name]))
        row = rows[0]
        print(
            f"{name:16} {row['answers']} answers, {len(row['crashes'])} crashes, {row['verdicts']}, ", end=""
        )
        print(f"slowest {row['slowest_s']:.2f} s", flush=True)
        for answer, error in row["crashes"][:5]:
            print(f"    {error}: {answer!r}")
        if row["slowest_s"] > 1:
            print(f"    {row['slowest']!r}")
    if options.json:
        options.json.write_text(
            json.dumps({"accuracy": tables, "fuzz": fuzzed}, indent=1) + "\n", encoding="utf-8"
        )
    sys.exit(any(row["crashes"] or row["slowest_s"] > options.limit for row in fuzzed))


if __name__ == "__main__":
    main()
