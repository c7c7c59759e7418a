"""What asynchrony buys: steps per second at max_staleness η against 0, on the same tasks and machine.

    python benchmarks/asynchrony.py [--eta 4] [--steps 80] [--pairs 2] [--out FILE.json]

Needs a warm start: run `make quickstart` first. The trainer is pinned to one core, the rollout worker to
another; the small services run wherever there is room. Runs alternate η, 0, η, 0, … and the first steps of
each are left out. Asynchrony creates no throughput by itself: with U the busy share of the busier role in
the synchronous run, the speedup is at most 1 / U; reported is the share of that ideal that was reached.

That ideal supposes a core for every process. If there are fewer, no run can do more than fill them all with
the step's mathematics: the engine's forward passes, and forward, backward and optimizer of the trainer. Their
seconds are measured in the plain loop (`plain_loop.py`), with one thread and with all. The result has the
steps per second that the cores allow by that measure, and the share of them that was reached. The CPU of
everything else is not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from against_trl_report import least_of, mathematics_of
from against_trl_runs import CORES, run_rival
from metered import CpuMeter, Run, Setting

from areal_async.base.processes import RUN_VARIABLE
from areal_async.config.load import load_job
from areal_async.service.record import read_run_log

WARMUP_STEPS = 10
FIGURES = (
    "steps_per_s",
    "trainer_busy",
    "rollout_busy",
    "core_s_per_step",
    "max_staleness_seen",
    "episodes_dropped",
)
PINNED = {"trainer": 0, "rollout-0": 1}


def pin(run_lock: Path, limit_s: float = 120.0) -> None:
    """Give each pinned role its core as soon as its process exists."""
    missing, deadline_s = dict(PINNED), time.monotonic() + limit_s
    cores = sorted(os.sched_getaffinity(0))
    while missing and time.monotonic() < deadline_s:
        time.sleep(0.2)
        try:
            run_id = json.loads(run_lock.read_text())["run_id"]
        except (OSError, ValueError):
            continue
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(RUN_VARIABLE) == run_id
                for name in [name for name in missing if ours and name in process.cmdline()]:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, {cores[missing[name] % len(cores)]})
                    del missing[name]
            except (psutil.Error, ProcessLookupError):
                continue
    if missing:
        raise SystemExit(f"these processes did not start: {', '.join(missing)}")


def measure(job_file: Path, eta: int, steps: int) -> dict[str, Any]:
    """Run the job once and return its figures after the warm-up steps."""
    name = f"asynchrony-{eta}"
    overrides = [
        f"job={name}",
        f"buffer.max_staleness={eta}",
        f"trainer.steps={steps}",
        "tasks.evaluation=null",
        "checkpoint.every_steps=50",
        "observe.metrics_port=0",
    ]
    command = [sys.executable, "-m", "areal_async.cli.main", "run", str(job_file), *overrides]
    run_dir = job_file.parent.parent / name
    process = subprocess.Popen([*command, "--plain", "--overwrite"], stdout=subprocess.DEVNULL)
    meter = CpuMeter(process.pid, "launcher")
    meter.start()
    try:
        pin(run_dir / "run.lock")
        if process.wait(600):
            raise SystemExit(f"the run at η={eta} failed: see {run_dir}/logs")
    finally:
        meter.end()
        process.kill()
    records = [record for record in read_run_log(run_dir / "metrics.jsonl") if record["kind"] == "step"]
    counted = records[WARMUP_STEPS:]
    begun_s, ended_s = records[WARMUP_STEPS - 1]["time_s"], counted[-1]["time_s"]
    wall_s = ended_s - begun_s
    used = meter.between(begun_s, ended_s)
    del used["machine"]
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "eta": eta,
        "steps_per_s": len(counted) / wall_s,
        "trainer_busy": sum(record["busy_s"] + record["publish_s"] for record in counted) / wall_s,
        "rollout_busy": summary["rollout_busy"],
        "core_s_per_step": sum(used.values()) / len(counted),
        "max_staleness_seen": summary["max_staleness_seen"],
        "episodes_dropped": summary["episodes_dropped"],
    }


def mathematics(job_file: Path, steps: int) -> list[dict[str, Any]]:
    """Measure the mathematics of a step of the plain loop with one thread and with all."""
    setting = Setting(job_file.resolve(), Path("runs/asynchrony").resolve(), steps, steps, WARMUP_STEPS)
    rate = load_job(job_file).trainer.optimizer.lr
    runs = [run_rival(setting, Run("plain", 0, rate), {"threads": n})[0] for n in sorted({1, CORES})]
    return [mathematics_of(run) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--job", type=Path, default=Path("runs/quickstart-files/train.yaml"))
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = [
        measure(options.job, eta, options.steps) for _ in range(options.pairs) for eta in (options.eta, 0)
    ]
    figures = {}
    for eta in (options.eta, 0):
        mine = [run for run in runs if run["eta"] == eta]
        figures[eta] = {key: statistics.median(run[key] for run in mine) for key in FIGURES}
    sync, ahead = figures[0], figures[options.eta]
    u_sync = max(sync["trainer_busy"], sync["rollout_busy"])
    speedup = ahead["steps_per_s"] / sync["steps_per_s"]
    alone = mathematics(options.job, max(WARMUP_STEPS + 1, options.steps // 2))
    least_s, least_core_s = (each * alone[0]["tokens"] for each in least_of(alone, CORES))
    most_per_s = 1 / least_s
    result = {
        "runs": runs,
        "median": figures,
        "speedup": speedup,
        "u_sync": u_sync,
        "ideal_speedup": 1 / u_sync,
        "share_of_ideal": speedup * u_sync,
        "cores": CORES,
        "mathematics": alone,
        "most_steps_per_s": most_per_s,
        "share_of_cores": ahead["steps_per_s"] / most_per_s,
        "share_of_mathematics": least_core_s / ahead["core_s_per_step"],
    }
    print("  η  steps/s  trainer  rollout  core-s/step  staleness  dropped")
    for run in runs:
        print(
            f"{run['eta']:>3} {run['steps_per_s']:>8.2f} {run['trainer_busy']:>8.0%} "
            f"{run['rollout_busy']:>8.0%} {run['core_s_per_step']:>12.3f} "
            f"{run['max_staleness_seen']:>10} {run['episodes_dropped']:>8}"
        )
    print(
        f"speedup {speedup:.2f}; ideal 1/U_sync {1 / u_sync:.2f}; share of the ideal {speedup * u_sync:.2f}\n"
        f"{CORES} cores allow {most_per_s:.2f} steps/s; share of them {result['share_of_cores']:.2f}; "
        f"share of mathematics of the CPU {result['share_of_mathematics']:.2f}"
    )
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
