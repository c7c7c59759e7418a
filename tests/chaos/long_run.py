"""The long chaos run: `python -m tests.chaos.long_run --kills 60 --seed 1`.

Four kinds of runs of a small real job, each judged by the history checker:
- `always`, `everysec`: kills at labelled failpoints and at random times, with short stops, until enough kills
- `cut`: Redis loses the end of its log, each other time together with the front
- `stopped`: each role stands still for 30 s
Everything is drawn from the seed; the machine decides what it hits. The status is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chaos.job import ROLES, Job, JobFailed, write_job
from tests.chaos.plan import Disturbance, cuts, disturbances, failpoints, long_stops
from tests.chaos.storm import Storm
from tests.waiting import deadline_s

KINDS = ("always", "everysec", "cut", "stopped")
CUT_ALLOWANCE_S = 2.0
RUN_LIMIT_S = deadline_s(1500)
STOP_S = 30.0


def main() -> int:
    options = _options()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="areal-chaos-"))
    begun_s = time.monotonic()
    runs = list(_runs(options, folder))
    total = _total(runs)
    result = {
        "what": "SIGKILL, SIGSTOP and cut logs in runs of a small real job; the history checker's verdict",
        "command": " ".join(["python -m tests.chaos.long_run", *sys.argv[1:]]),
        "total": total,
        "runs": sorted(runs, key=lambda run: KINDS.index(run["kind"])),
    }
    options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(total, indent=1), f"in {time.monotonic() - begun_s:.0f} s")
    if options.folder is None and not total["violations"]:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if total["violations"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=60, help="at least so many in the runs of both tiers")
    parser.add_argument("--steps", type=int, default=100, help="of each run with kills")
    parser.add_argument("--cuts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=KINDS, help="these kinds alone")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/chaos.json"))
    return parser.parse_args()


def _runs(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    kinds = options.only or KINDS
    for tier in ("always", "everysec"):
        rng = random.Random(f"{tier} {options.seed}")
        kills, number = 0, 0
        while tier in kinds and kills < options.kills / 2:
            seed = rng.randrange(1 << 16)
            plan = disturbances(random.Random(seed), 30, longest_gap_s=5.0)
            points = failpoints(random.Random(seed), 10)
            figures = _one(folder, f"{tier}-{number}", options.steps, seed, tier, plan, points=points)
            kills, number = kills + figures["kills"], number + 1
            yield figures
    if "cut" in kinds:
        plan = cuts(options.cuts, gap_s=4.0)
        yield _one(folder, "cut", options.steps, options.seed, "everysec", plan, lost_s=CUT_ALLOWANCE_S)
    if "stopped" in kinds:
        plan = long_stops(random.Random(options.seed), list(ROLES), STOP_S)
        yield _one(folder, "stopped", 10 * options.steps, options.seed, "always", plan)


def _one(
    folder: Path,
    name: str,
    steps: int,
    seed: int,
    tier: str,
    plan: Iterator[Disturbance],
    *,
    points: str = "",
    lost_s: float = 0.0,
) -> dict[str, Any]:
    job_file = write_job(folder, name, steps=steps, seed=seed, durability=tier)
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    storm = Storm(Job(job_file, points), limit_s=RUN_LIMIT_S, seed=seed)
    print(f"{name}: seed {seed}, failpoints {points or 'none'}", flush=True)
    head = {"run": name, "kind": name.partition("-")[0], "seed": seed, "failpoints": points}
    try:
        storm.run(plan)
        verdict = storm.judge(lost_s=lost_s)
    except JobFailed as error:
        print(f"{name}: {error}", flush=True)
        return head | {"failed": str(error)[:300], "kills": sum(storm.kills.values()), "violations": 1}
    for violation in verdict.violations:
        print(f"{name}: {violation}", flush=True)
    print(f"{name}: {json.dumps(verdict.figures)}", flush=True)
    return head | verdict.figures | {"broken": [str(violation) for violation in verdict.violations]}


def _total(runs: list[dict[str, Any]]) -> dict[str, Any]:
    def added(name: str, runs: list[dict[str, Any]] = runs) -> int:
        return sum(run.get(name, 0) for run in runs)

    def merged(name: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for run in runs:
            total.update(run.get(name, {}))
        return dict(sorted(total.items()))

    counted = ("kills", "logs_cut", "resumes", "steps", "steps_redone", "acknowledged_episodes")
    by_kind = ("kills_by_role", "kills_by_failpoint", "stops_by_role")
    cut = [run for run in runs if run.get("logs_cut")]
    return {
        **{name: added(name) for name in (*counted, "trained_twice", "violations")},
        **{name: merged(name) for name in by_kind},
        "lost_episodes_log_intact": added("lost_episodes") - added("lost_episodes", cut),
        "lost_episodes_log_cut": added("lost_episodes", cut),
        "lost_work_s": max((run.get("lost_work_s", 0.0) for run in runs), default=0.0),
        "max_staleness": max((run.get("max_staleness", 0) for run in runs), default=0),
        "wall_s": round(sum(run.get("wall_s", 0.0) for run in runs), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
