"""What the reward pool gets out of its workers: calls per second beside what the functions alone would do.

    python benchmarks/reward.py [--only compute,batch,nothing,wait,dispatch] [--seconds 4] [--json FILE]

`share` is calls/s over the ideal: cores / t for functions that compute for t, workers / t for functions that
sleep for t, and for the batched one what it does when called in this process with full batches. `plain` is
calls/s over what as many processes without a pool reach in the same run, before and after: where others use
the machine too, `share` falls and `plain` does not. `pool µs` is the CPU time that the process of the pool
spends on a call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import reward_functions

from areal_async.base.verdicts import Score
from areal_async.config.reward import RewardSection
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput

FILE = Path(reward_functions.__file__)
CORES = os.cpu_count() or 1
PROMPT = "A farmer has 17 sheep and buys 25 more at the market. How many are there now? " * 4
RESPONSE = "Let us add: 17 + 25 = 42. The answer is \\boxed{42}. " * 16
PINGS = 500

Row = dict[str, Any]


def inputs(n: int, **extra: float) -> list[RewardInput]:
    """Texts as a maths task has them, about 1.2 KB."""
    given = RewardInput(prompt=PROMPT, response=RESPONSE, ground_truth="42", extra_info=dict(extra))
    return [given] * n


def section(function: str, workers: int) -> RewardSection:
    return RewardSection(name=f"{FILE}:{function}", workers=workers, timeout_s=60)


async def rate(function: str, workers: int, n: int, **extra: float) -> Row:
    """`n` calls at once, after every worker has had some."""
    async with LocalScorer(section(function, workers)) as scorer:
        await scorer.score(inputs(4 * workers, **extra))
        calls = inputs(n, **extra)
        cpu_s, began_s = time.process_time(), time.perf_counter()
        verdicts = await scorer.score(calls)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    assert all(isinstance(verdict, Score) for verdict in verdicts)
    return {
        "function": function,
        "workers": workers,
        "calls": n,
        "calls_per_s": n / wall_s,
        "pool_us": 1e6 * cpu_s / n,
    }


async def compute(seconds: float) -> list[Row]:
    """CPU-bound calls of 100, 10 and 1 ms on as many workers as there are cores."""
    rows = []
    for cpu_ms, least in ((100, 0.9), (10, None), (1, 0.5)):
        ideal = CORES / (cpu_ms / 1000)
        n = max(CORES * 8, int(ideal * seconds) // CORES * CORES)
        before = plain(cpu_ms / 1000, n // (2 * CORES))
        row = await rate("compute", CORES, n, cpu_s=cpu_ms / 1000)
        after = plain(cpu_ms / 1000, n // (2 * CORES))
        row["plain"] = row["calls_per_s"] / ((before + after) / 2)
        rows.append(row | shares(row, f"compute {cpu_ms} ms", ideal, least))
    return rows


def plain(cpu_s: float, n_each: int) -> float:
    """Calls per second of as many processes as there are cores, each of which computes `n_each` times."""
    pipe = subprocess.PIPE
    command = [sys.executable, str(FILE), str(cpu_s), str(n_each)]
    # As the pool's workers, each in a session of its own: Linux shares cores out between sessions.
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        for _ in range(CORES)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    began_s = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    return CORES * n_each / (time.perf_counter() - began_s)


async def nothing(seconds: float) -> list[Row]:
    """Calls that do nothing: what is left is the pool."""
    row = await rate("nothing", CORES, int(20_000 * seconds))
    return [row | {"case": "nothing"}]


async def batch(seconds: float) -> list[Row]:
    """Batches of up to 64, beside the same function called in this process."""
    full = inputs(64)
    until_s = time.perf_counter() + seconds / 4
    began_s, done = time.perf_counter(), 0
    while time.perf_counter() < until_s:
        reward_functions.like_a_model(full)
        done += len(full)
    bare = done / (time.perf_counter() - began_s)
    row = await rate("like_a_model", 1, int(bare * seconds) // 64 * 64)
    return [row | shares(row, "batches of 64", bare, None)]


async def wait(seconds: float) -> list[Row]:
    """Functions that sleep for 100 ms, on 1 to 64 workers."""
    rows = []
    for function in ("wait", "wait_async"):
        for workers in (1, 2, 4, 8, 16, 32, 64):
            ideal = workers / 0.1
            row = await rate(function, workers, max(10, int(10 * seconds)) * workers, sleep_s=0.1)
            rows.append(row | shares(row, f"sleep 100 ms, {workers} workers", ideal, 0.9))
    return rows


async def dispatch(seconds: float) -> list[Row]:
    """One call at a time to an idle pool: from handing it over to its verdict, less the call itself."""
    async with LocalScorer(section("nothing", CORES)) as scorer:
        await scorer.score(inputs(256))
        spent_ms = []
        for one in inputs(PINGS):
            began_s = time.perf_counter()
            ((_, elapsed_ms),) = await scorer.score_timed([one])
            spent_ms.append(1000 * (time.perf_counter() - began_s) - elapsed_ms)
    spent_ms.sort()
    median, p99 = spent_ms[PINGS // 2], spent_ms[int(PINGS * 0.99)]
    return [
        {
            "case": "dispatch",
            "function": "nothing",
            "workers": CORES,
            "calls": PINGS,
            "dispatch_p50_ms": median,
            "dispatch_p99_ms": p99,
            "most_ms": 1.0,
            "met": median <= 1.0,
        }
    ]


def shares(row: Row, case: str, ideal: float, least: float | None) -> Row:
    share = row["calls_per_s"] / ideal
    judged = {} if least is None else {"least": least, "met": share >= least}
    return {"case": case, "ideal_calls_per_s": ideal, "share": share, **judged}


CASES: dict[str, Callable[[float], Coroutine[Any, Any, list[Row]]]] = {
    "compute": compute,
    "batch": batch,
    "nothing": nothing,
    "wait": wait,
    "dispatch": dispatch,
}


def line(row: Row) -> str:
    start = f"{row['case']:26}{row['function']:>14}{row['workers']:>8}{row['calls']:>8}"
    if "dispatch_p50_ms" in row:
        return (
            f"{start}   {row['dispatch_p50_ms']:.2f} ms (p99 {row['dispatch_p99_ms']:.2f}){verdict(row):>6}"
        )
    share = f"{row['share']:.3f}" if "share" in row else "–"
    beside = f"{row['plain']:.3f}" if "plain" in row else "–"
    return f"{start}{row['calls_per_s']:>10.0f}{share:>8}{beside:>8}{row['pool_us']:>9.0f}{verdict(row):>7}"


def verdict(row: Row) -> str:
    return {True: "met", False: "NOT", None: "–"}[row.get("met")]


def measured(names: list[str], seconds: float) -> Iterator[Row]:
    for name in names:
        yield from asyncio.run(CASES[name](seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=4.0, help="about so long for each row")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if unknown := set(options.only) - set(CASES):
        parser.error(f"--only {','.join(sorted(unknown))}: the cases are {', '.join(CASES)}")
    print(
        f"{'case':26}{'function':>14}{'workers':>8}{'calls':>8}"
        f"{'calls/s':>10}{'share':>8}{'plain':>8}{'pool µs':>9}{'bar':>7}"
    )
    rows = []
    for row in measured(options.only, options.seconds):
        rows.append(row)
        print(line(row), flush=True)
        if options.json is not None:
            command = "python " + " ".join(["benchmarks/reward.py", *sys.argv[1:]])
            text = json.dumps({"command": command, "cores": CORES, "rows": rows}, indent=1)
            options.json.write_text(text + "\n")
    if any(row.get("met") is False for row in rows):
        sys.exit("a bar was not met")


if __name__ == "__main__":
    main()
