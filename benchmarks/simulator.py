"""Six real jobs on this machine, predicted before they are run.

    python benchmarks/simulator.py [--job JOB.YAML] [--steps 80] [--runs DIR] [--out FILE] [--only NAME...]

Needs a warm start: run `make quickstart` first. Two calibration runs, at settings that none of the six has,
give the costs; `replay_buffer/simulation/` predicts the six from them, and the predictions are written
(`--out`, with the time) before the first of the six is started. Then they are run and compared: steps per
second and mean staleness within 10 % (staleness below 1 within 0.1), the shares of time in which trainer
and engines idle within 10 points. Ends with status 1 where one is not. Two cores, about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_async.config.load import load_job
from areal_async.launch.run_handle import find_run
from replay_buffer.simulation.costs import Costs
from replay_buffer.simulation.world import simulated
from replay_buffer.tools.advise import seen_in
from replay_buffer.tools.measured import Window, measured

CALIBRATION = {
    "cal-large": ("buffer.max_staleness=2", "buffer.batch_groups=64"),
    "cal-small": ("buffer.max_staleness=2", "buffer.batch_groups=24"),
}
JOBS = {
    "eta-0": ("buffer.max_staleness=0",),
    "eta-1-full": ("buffer.max_staleness=1", "buffer.pacing=full"),
    "eta-4-full": ("buffer.max_staleness=4", "buffer.pacing=full"),
    "eta-4-fresh-wide": ("buffer.max_staleness=4", "buffer.batch_groups=32", "rollout.group_size=16"),
    "short-answers": ("buffer.max_staleness=4", "rollout.sampling.max_new_tokens=3"),
    "two-workers": ("buffer.max_staleness=1", "rollout.workers=2", "rollout.max_concurrent=96"),
}
ALWAYS = (
    "tasks.evaluation=null",
    "checkpoint.every_steps=1000",
    "buffer.max_groups=8192",  # no checkpoint frees any
    "observe.metrics_port=0",
)
RELATIVE, POINTS, STALENESS = 0.10, 0.10, 0.10
SHARES = ("trainer_idle", "rollout_idle")
COMPARED = ("steps_per_s", "staleness_mean", *SHARES)


def overrides(name: str, changes: tuple[str, ...], runs: Path, steps: int) -> list[str]:
    return [f"job=sim-{name}", f"run_dir={runs.resolve()}", f"trainer.steps={steps}", *ALWAYS, *changes]


def run(job_file: Path, given: list[str]) -> None:
    """Run a job to its end."""
    command = [sys.executable, "-m", "areal_async.cli.main", "run", str(job_file), *given]
    done = subprocess.run([*command, "--plain", "--overwrite"], stdout=subprocess.DEVNULL, timeout=900)
    if done.returncode:
        raise SystemExit(f"{given[0]} failed: see its logs in {given[1]}")


def predict(job_file: Path, given: list[str], costs: Costs) -> dict[str, Any]:
    return asdict(simulated(load_job(job_file, given, files=False), costs, steps=150))


def missed(name: str, predicted: float, seen: float) -> bool:
    """Whether a prediction is outside its bar."""
    if name in SHARES:
        return abs(predicted - seen) > POINTS
    if name == "staleness_mean" and abs(predicted - seen) <= STALENESS:
        return False
    return abs(predicted - seen) > RELATIVE * abs(seen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", type=Path, default=Path("runs/quickstart-files/train.yaml"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "simulator.json")
    parser.add_argument("--only", nargs="*", default=list(JOBS), choices=list(JOBS), metavar="NAME")
    options = parser.parse_args()
    given = {
        name: overrides(name, changes, options.runs, options.steps)
        for name, changes in (CALIBRATION | {name: JOBS[name] for name in options.only}).items()
    }
    for name in CALIBRATION:
        run(options.job, given[name])
    costs = measured([find_run(options.runs / f"sim-{name}") for name in CALIBRATION])
    record: dict[str, Any] = {
        "predicted_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "calibration": {
            name: seen_in(Window.of(find_run(options.runs / f"sim-{name}"))) for name in CALIBRATION
        },
        "costs": costs.model_dump(),
        "predicted": {name: predict(options.job, given[name], costs) for name in options.only},
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"predictions are in {options.out}; now the runs", flush=True)
    record["seen"], misses = {}, []
    print(f"{'job':<18}" + "".join(f"{name:>26}" for name in COMPARED))
    for name in options.only:
        run(options.job, given[name])
        seen = record["seen"][name] = seen_in(Window.of(find_run(options.runs / f"sim-{name}")))
        cells = []
        for figure in COMPARED:
            pair = record["predicted"][name][figure], seen[figure]
            if missed(figure, *pair):
                misses.append(f"{name} {figure}: predicted {pair[0]:.3f}, seen {pair[1]:.3f}")
            cells.append(f"{pair[0]:.3f} → {pair[1]:.3f}")
        print(f"{name:<18}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
    record["misses"] = misses
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    if misses:
        raise SystemExit("outside the bar:\n  " + "\n  ".join(misses))
    print("all are within the bar")


if __name__ == "__main__":
    main()
