"""Hostile calls among good ones: does each get its verdict in time, and do the good ones notice?

    python benchmarks/hostile.py [--calls 10000] [--share 0.1] [--workers 2] [--out hostile.json]

Two parts, each run clean (good calls alone) and mixed (a share of hostile ones among the same good ones):
`functions` are reward functions that misbehave in the pool, `programs` are a model's programs in the sandbox
(`code_stdio`), in jails of bubblewrap. Measured: good
verdicts that differ between the two runs, how late the latest verdict of a hostile call came, p50 and p99 of
good calls, processes and files left behind. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from hostile_programs import PROGRAMS, orphans_of_jails
from hostile_rewards import HOSTILE

from areal_async.base.verdicts import Failure, Score, Timeout, Verdict
from areal_async.config.reward import RewardSection
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput

HERE = Path(__file__).parent
DEADLINE_S = {"functions": 1.0, "programs": 12.0}
PROGRAM_LIMITS = {"cpu_s": 0.4, "wall_s": 1.0, "memory_mb": 160, "processes": 8}
LATE_S = 1.0
MOST_SLOWER = 3.0
BLOCK = 500
"""Inputs handed over at a time: good calls are to wait for few others."""
WATCHED = ("/tmp", "/var/tmp", "/dev/shm", "/mnt", "/media", "/srv")


class Run(NamedTuple):
    verdicts: list[Verdict]
    elapsed_ms: list[float]
    wall_s: float


def sections() -> dict[str, RewardSection]:
    return {
        "functions": RewardSection(
            name=f"{HERE / 'hostile_rewards.py'}:mixed", timeout_s=DEADLINE_S["functions"]
        ),
        "programs": RewardSection(name="code_stdio", args=PROGRAM_LIMITS, timeout_s=DEADLINE_S["programs"]),
    }


def inputs(part: str, n: int, share: float, seed: int) -> list[tuple[str, RewardInput]]:
    """(what it does, the input): `good`, or the name of a misbehaviour. The good ones are those of any
    share."""
    rng = random.Random(seed)
    names = list(HOSTILE if part == "functions" else PROGRAMS)
    found: list[tuple[str, RewardInput]] = []
    for number in range(n):
        name = rng.choice(names)
        hostile = rng.random() < share
        if part == "functions":
            about = {"number": number, "hostile": name} if hostile else {"number": number}
            given = RewardInput(response="", extra_info=about)
        else:
            source = PROGRAMS[name].source if hostile else GOOD
            truth = {"inputs": [f"{number} {number % 7}\n"], "outputs": [f"{number + number % 7}\n"]}
            given = RewardInput(response=f"```python\n{source}\n```", ground_truth=truth)
        found.append((name if hostile else "good", given))
    return found


GOOD = "a, b = map(int, input().split())\nprint(a + b)"


async def run(section: RewardSection, given: list[RewardInput], workers: int) -> Run:
    verdicts: list[Verdict] = []
    elapsed_ms: list[float] = []
    async with LocalScorer(section, workers) as scorer:
        began_s = time.monotonic()
        for at in range(0, len(given), BLOCK):
            for verdict, took_ms in await scorer.score_timed(given[at : at + BLOCK]):
                verdicts.append(verdict)
                elapsed_ms.append(took_ms)
            print(f"  {len(verdicts)} of {len(given)} calls, {time.monotonic() - began_s:.0f} s", flush=True)
        wall_s = time.monotonic() - began_s
    return Run(verdicts, elapsed_ms, wall_s)


def left_behind() -> tuple[set[int], set[str]]:
    """(processes below this one, or in a jail whose launcher has gone; files that jails or programs left)."""
    processes = {process.pid for process in psutil.Process().children(recursive=True)}
    processes |= orphans_of_jails()
    files = {
        str(path)
        for folder in WATCHED
        if Path(folder).is_dir()
        for path in Path(folder).iterdir()
        if path.name.startswith(("areal-jail-", "areal-was-here"))
    }
    return processes, files


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def measure(part: str, n: int, share: float, workers: int, seed: int) -> dict[str, Any]:
    section = sections()[part]
    before = left_behind()
    mixed_inputs = inputs(part, n, share, seed)
    good = [index for index, (kind, _) in enumerate(mixed_inputs) if kind == "good"]
    print(f"{part}: clean", flush=True)
    clean = asyncio.run(run(section, [mixed_inputs[index][1] for index in good], workers))
    print(f"{part}: mixed", flush=True)
    mixed = asyncio.run(run(section, [given for _, given in mixed_inputs], workers))
    after = left_behind()

    differing = sum(mixed.verdicts[index] != clean.verdicts[place] for place, index in enumerate(good))
    hostile = [index for index, (kind, _) in enumerate(mixed_inputs) if kind != "good"]
    verdicts: dict[str, Counter[str]] = {}
    for index in hostile:
        verdicts.setdefault(mixed_inputs[index][0], Counter())[name_of(mixed.verdicts[index])] += 1
    clean_ms, mixed_ms = clean.elapsed_ms, [mixed.elapsed_ms[index] for index in good]
    return {
        "calls": n,
        "hostile": len(hostile),
        "good_verdicts_that_differ": differing,
        "latest_hostile_verdict_s": max((mixed.elapsed_ms[index] for index in hostile), default=0.0) / 1000,
        "deadline_s": section.timeout_s,
        "good_p50_ms": {"clean": quantile(clean_ms, 0.5), "mixed": quantile(mixed_ms, 0.5)},
        "good_p99_ms": {"clean": quantile(clean_ms, 0.99), "mixed": quantile(mixed_ms, 0.99)},
        "p99_ratio": quantile(mixed_ms, 0.99) / max(quantile(clean_ms, 0.99), 1e-9),
        "wall_s": {"clean": clean.wall_s, "mixed": mixed.wall_s},
        "processes_left": sorted(after[0] - before[0]),
        "files_left": sorted(after[1] - before[1]),
        "verdicts": {kind: dict(counts) for kind, counts in sorted(verdicts.items())},
    }


def name_of(verdict: Verdict) -> str:
    match verdict:
        case Score(value=value, sandbox=sandbox):
            return f"score {value:g}" + (f" ({sandbox})" if sandbox else "")
        case Failure(kind=kind):
            return f"error {kind}"
        case Timeout():
            return "timeout"
    return "abstain"


def missed(name: str, part: dict[str, Any]) -> list[str]:
    """The bars that a part does not meet."""
    found = []
    if part["good_verdicts_that_differ"]:
        found.append(f"{part['good_verdicts_that_differ']} good verdicts differ")
    if part["latest_hostile_verdict_s"] > part["deadline_s"] + LATE_S:
        found.append(f"a verdict took {part['latest_hostile_verdict_s']:.2f} s")
    if part["p99_ratio"] > MOST_SLOWER:
        found.append(f"p99 of good calls is {part['p99_ratio']:.1f} times that of the clean run")
    if part["processes_left"] or part["files_left"]:
        found.append(f"left behind: {part['processes_left']} {part['files_left']}")
    wrong = [
        f"{kind}: {verdict}"
        for kind, counts in part["verdicts"].items()
        for verdict in counts
        if name == "programs" and not verdict.startswith("score 0")
    ]
    return found + [f"a hostile program got {one}" for one in wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", choices=["functions", "programs"], action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="its entries of other parts and jails stay")
    options = parser.parse_args()
    record: dict[str, Any] = {}
    failed = False
    if options.out is not None and options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    for part in options.part or ["functions", "programs"]:
        record[part] = measure(part, options.calls, options.share, options.workers, options.seed)
        print(json.dumps(record[part], indent=2))
        for problem in missed(part, record[part]):
            failed = True
            print(f"{part}: NOT MET: {problem}")
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
