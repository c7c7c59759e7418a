"""Six real jobs on this machine, predicted before they are run.

    python benchmarks/simulator.py [--job JOB.YAML] [--steps 80] [--runs DIR] [--out FILE] [--only NAME...]

The benchmark needs a warm start: run `make quickstart` first. Two calibration runs, at settings that none of
the six has, give the costs. `replay_buffer/simulation/` predicts the six from them, and the predictions are
written (`--out`, with the time) before the first of the six is started. Then they are run and compared: steps
per second and mean staleness within 10 % (staleness below 1 within 0.1), the shares of time in which trainer
and engines idle within 5 points. The script exits with status 1 if a figure is outside these limits. It takes
about ten minutes of two cores.

The speed of a shared machine drifts during these minutes. A probe, a fixed computation on every core, runs
before and after each job. The seen steps per second are multiplied by the job's probe seconds over those of
the calibration runs, which gives the speed at the time of the calibration. The result has both figures.

With `--again`, nothing runs. The runs in `--runs` are predicted by the present simulation, after the fact:
use it to improve the simulation. The speed then comes from the CPU time of the trainer's steps, over the CPU
time that the costs give them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from replay_buffer.tools.measured import OF_TRAINER, Window, measured

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
RELATIVE, POINTS, STALENESS = 0.10, 0.05, 0.10
SHARES = ("trainer_idle", "rollout_idle")
COMPARED = ("steps_per_s", "staleness_mean", *SHARES)


PROBE = """
import time, numpy
matrix = numpy.random.default_rng(0).random((64, 64))
begun_s = time.perf_counter()
for _ in range(12):
    sum(i * i % 7 for i in range(200_000))
    for _ in range(2_000):
        matrix @ matrix
print(time.perf_counter() - begun_s)
"""


def probe() -> float:
    """Return the seconds of a fixed computation, as the mean over processes on all cores at once."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    each = [
        subprocess.Popen([sys.executable, "-c", PROBE], stdout=subprocess.PIPE, env=environment)
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    return statistics.fmean(float(process.communicate()[0]) for process in each)


def overrides(name: str, changes: tuple[str, ...], runs: Path, steps: int) -> list[str]:
    return [f"job=sim-{name}", f"run_dir={runs.resolve()}", f"trainer.steps={steps}", *ALWAYS, *changes]


def run(job_file: Path, given: list[str]) -> float:
    """Run a job to its end. Return the mean seconds of the probes before and after it."""
    before_s = probe()
    command = [sys.executable, "-m", "areal_async.cli.main", "run", str(job_file), *given]
    done = subprocess.run([*command, "--plain", "--overwrite"], stdout=subprocess.DEVNULL, timeout=900)
    if done.returncode:
        raise SystemExit(f"{given[0]} failed: see its logs in {given[1]}")
    return (before_s + probe()) / 2


def predict(job_file: Path, given: list[str], costs: Costs) -> dict[str, Any]:
    return asdict(simulated(load_job(job_file, given, files=False), costs, steps=150))


def slowness(window: Window, costs: Costs) -> float:
    """Return the CPU seconds of a step of the trainer, over those that the costs give it."""
    each, episodes = costs.trainer, window.mean("episodes")
    fetched_s = OF_TRAINER * (each.batch_s + each.batch_episode_s * episodes)
    expected_s = each.step_s + each.token_s * window.mean("units") + fetched_s
    return window.used("trainer", "cpu_s") / window.steps_done / expected_s


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
    parser.add_argument("--again", action="store_true", help="predict the runs that are there")
    options = parser.parse_args()
    given = {
        name: overrides(name, changes, options.runs, options.steps)
        for name, changes in (CALIBRATION | {name: JOBS[name] for name in options.only}).items()
    }
    probes_s = {name: run(options.job, given[name]) for name in CALIBRATION if not options.again}
    calibrated_s = statistics.fmean(probes_s.values() or [1.0])
    costs = measured([find_run(options.runs / f"sim-{name}") for name in CALIBRATION])
    record: dict[str, Any] = {
        "predicted_at": "after the runs"
        if options.again
        else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "calibration": {
            name: seen_in(Window.of(find_run(options.runs / f"sim-{name}"))) for name in CALIBRATION
        },
        "costs": costs.model_dump(),
        "predicted": {name: predict(options.job, given[name], costs) for name in options.only},
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"predictions are in {options.out}", flush=True)
    record["seen"], misses = {}, []
    print(f"{'job':<18}" + "".join(f"{name:>26}" for name in COMPARED))
    for name in options.only:
        if not options.again:
            probes_s[name] = run(options.job, given[name])
        window = Window.of(find_run(options.runs / f"sim-{name}"))
        seen = record["seen"][name] = seen_in(window)
        seen["steps_per_s_as_timed"] = seen["steps_per_s"]
        seen["steps_per_s"] *= slowness(window, costs) if options.again else probes_s[name] / calibrated_s
        cells = []
        for figure in COMPARED:
            pair = record["predicted"][name][figure], seen[figure]
            if missed(figure, *pair):
                misses.append(f"{name} {figure}: predicted {pair[0]:.3f}, seen {pair[1]:.3f}")
            cells.append(f"{pair[0]:.3f} → {pair[1]:.3f}")
        print(f"{name:<18}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
    record["probes_s"], record["misses"] = probes_s, misses
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    if misses:
        raise SystemExit("outside the bar:\n  " + "\n  ".join(misses))
    print("all are within the bar")


if __name__ == "__main__":
    main()
