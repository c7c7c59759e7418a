"""Seconds, CPU-seconds and memory of a whole job from its command to its first trained step, by process.

    python -m benchmarks.start_cost [--runs 3] [--steps 60] [--engine local]
        [--out benchmarks/results/start_cost.json]

The job is the quickstart's RL job on its random model: buffer with Redis, reward service, one worker on the
chosen engine, evaluator, trainer. Its services are forks of a fork server, as a user's are. A process's
CPU-seconds include those of its children that have exited. Memory is the proportional set size (PSS), which
counts shared pages once; its peak is of all processes together, up to `--steps` trained steps. A server of
SGLang or vLLM is called `server` and left out of the totals. `validate` is timed on the same job: first with
an empty cache, then again. Measure on an idle machine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from areal_async.cli.quickstart.main import prepare
from areal_async.service.fork_server import MODULE

CLI = ("-m", "areal_async.cli.main")
LIMIT_S = 900.0
LOOK_S = 0.5  # Time between two looks at the memory, which cost some milliseconds
BEFORE = {"first_step_s": 18.2, "cpu_s": 25.5, "peak_pss_mib": 1595}
"""Figures of the same job when every service was started by command and did its own imports."""
JOB_NAME = "start-cost"
SERVER = "server"
ENGINES = Path(__file__).parents[1] / ".engines"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps over which memory is watched")
    parser.add_argument("--engine", default="local", help="local, sglang or vllm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), options.engine)
        environment = os.environ | {"AREAL_ASYNC_CACHE": f"{folder}/cache"}
        validations = [timed_validation(job, environment) for _ in range(3)]
        runs = [measured_run(job, options.steps, environment) for _ in range(options.runs)]
    found = {
        "command": " ".join(["python -m benchmarks.start_cost", *sys.argv[1:]]),
        "cores": len(os.sched_getaffinity(0)),
        "before": BEFORE,
        "first_step_s": [round(run.first_step_s, 1) for run in runs],
        "cpu_s": summed([run.cpu_s for run in runs]),
        "peak_pss_mib": summed([run.pss_mib for run in runs]),
        "validate_first": validations[0],
        "validate_again": validations[-1],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def summed(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the total of each run and the median of each process."""
    names = sorted({name for run in runs for name in run})
    return {
        "totals": [round(sum(run.values()) - run.get(SERVER, 0.0), 1) for run in runs],
        "medians": {name: round(statistics.median(run.get(name, 0.0) for run in runs), 2) for name in names},
    }


def write_job(folder: Path, engine: str) -> Path:
    """Write the quickstart's files and the job to measure; return the path of its job file."""
    prepare(folder, seed=1)
    job = yaml.safe_load((folder / "train.yaml").read_text()) | {
        "job": JOB_NAME,
        "model": "base",
        "run_dir": ".",
    }
    job["rollout"] |= {"engine": engine}
    job |= {"observe": {"metrics_port": 0}}
    path = folder / f"{JOB_NAME}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def timed_validation(job: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Run `areal-async validate` once; return its wall and CPU seconds, children included."""
    begun_s = time.monotonic()
    process = psutil.Popen(
        [sys.executable, *CLI, "validate", str(job)], env=dict(environment), stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - begun_s
    if status != 0:
        raise SystemExit(f"validate exits with status {status}")
    return {"wall_s": round(wall_s, 2), "cpu_s": round(usage.ru_utime + usage.ru_stime, 2)}


@dataclass
class Measured:
    """One run: the time of its first step, CPU-seconds by process at that time, and memory by process at the
    peak of all together."""

    first_step_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    pss_mib: dict[str, float] = field(default_factory=dict)


def measured_run(job: Path, steps: int, environment: Mapping[str, str]) -> Measured:
    """Run the job for so many steps."""
    found, log = Measured(), job.parent / JOB_NAME / "metrics.jsonl"
    shutil.rmtree(log.parent, ignore_errors=True)
    begun_s = looked_s = time.monotonic()
    process = psutil.Popen(
        [sys.executable, *CLI, "run", str(job), "--plain"],
        env=dict(environment),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while (trained := _steps(log)) < steps:
            if process.poll() is not None or time.monotonic() > begun_s + LIMIT_S:
                raise SystemExit(f"the job trained {trained} of {steps} steps")
            if trained and not found.cpu_s:
                found.first_step_s, found.cpu_s = time.monotonic() - begun_s, _by_name(process, _cpu_s)
            if time.monotonic() - looked_s >= LOOK_S:
                looked_s, sizes = time.monotonic(), _by_name(process, _pss_mib)
                found.pss_mib = max(found.pss_mib, sizes, key=lambda each: sum(each.values()))
            time.sleep(0.02)
    finally:
        process.terminate()
        process.wait()
    return found


def _steps(path: Path) -> int:
    """Return the number of steps in a run log."""
    return path.read_bytes().count(b'"kind":"step"') if path.exists() else 0


def _cpu_s(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:4]))


def _pss_mib(process: psutil.Process) -> float:
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _by_name(root: psutil.Process, figure: Callable[[psutil.Process], float]) -> dict[str, float]:
    """Return the figure of each process from `root` on. Processes of the same name are added up."""
    figures: dict[str, float] = {}

    def add(process: psutil.Process, parent: str) -> None:
        with suppress(psutil.Error):
            name = _name(process, parent)
            figures[name] = figures.get(name, 0.0) + figure(process)
            for child in process.children():
                add(child, name)

    add(root, "")
    return figures


def _name(process: psutil.Process, parent: str) -> str:
    """Return the name of a service, `SERVER` for all processes of an engine's server, or the program's."""
    command: list[Any] = process.cmdline()
    if not parent:
        return "supervisor"
    if parent == SERVER or ENGINES.as_posix() in " ".join(command):
        return SERVER
    if MODULE in command:
        return "fork server"
    if "--name" in command:
        return str(command[command.index("--name") + 1])
    return process.name()


if __name__ == "__main__":
    main()
