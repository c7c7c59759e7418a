"""CPU-seconds of a whole job from its command to its first trained step, by process.

    python -m benchmarks.start_cost [--runs 3] [--engine local] [--out benchmarks/results/start_cost.json]

Once with clean starts, as a user's, and once with services that are forked as the tests fork them. The job
is the quickstart's RL job on its random model: buffer with Redis, reward service, one worker on the
chosen engine, evaluator, trainer; no spare processes. A process's seconds include those of its children that
have exited. A server of SGLang or vLLM is called `server` and left out of the totals. `validate` is timed on
the same job: first with an empty cache, then again."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from areal_async.cli.quickstart.main import prepare
from areal_async.service.record import read_run_log
from tests.forks import CLEAN_VARIABLE, start_command

CLI = ("-m", "areal_async.cli.main")
FIRST_STEP_LIMIT_S = 600.0
JOB_NAME = "start-cost"
SERVER = "server"
ENGINES = Path(__file__).parents[1] / ".engines"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--engine", default="local", help="local, sglang or vllm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), options.engine)
        environment = os.environ | {"AREAL_ASYNC_CACHE": f"{folder}/cache"}
        validations = [timed_validation(job, environment) for _ in range(3)]
        clean = [until_first_step(job, environment | {CLEAN_VARIABLE: "1"}) for _ in range(options.runs)]
        start_command(["--version"]).wait()  # the fork server has done its imports
        forked = [until_first_step(job, environment) for _ in range(options.runs)]
    found = {
        "command": " ".join(["python -m benchmarks.start_cost", *sys.argv[1:]]),
        "cores": len(os.sched_getaffinity(0)),
        "clean": summed(clean),
        "forked": summed(forked),
        "validate_first": validations[0],
        "validate_again": validations[-1],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def summed(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the total of each run and the median of each process, in CPU-seconds."""
    names = sorted({name for run in runs for name in run})
    return {
        "total_cpu_s": [round(sum(run.values()) - run.get(SERVER, 0.0), 1) for run in runs],
        "median_cpu_s": {
            name: round(statistics.median(run.get(name, 0.0) for run in runs), 2) for name in names
        },
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
    job |= {"observe": {"metrics_port": 0}, "supervisor": {"spare_after_s": None}}
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


def until_first_step(job: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Run the job up to its first step; return the CPU-seconds of each process by then."""
    folder = job.parent / JOB_NAME
    with open(os.devnull, "wb") as nothing:
        process = start_command(["run", job, "--plain", "--overwrite"], nothing.fileno(), **environment)
    deadline_s = time.monotonic() + FIRST_STEP_LIMIT_S
    begun = time.time()
    try:
        while not _stepped(folder / "metrics.jsonl", begun):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("the job trained no step")
            time.sleep(0.02)
        return _cpu_seconds(psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()


def _stepped(path: Path, since: float) -> bool:
    """Return whether the run log, written since `since` (Unix seconds), has a step."""
    with suppress(OSError, ValueError):
        if path.stat().st_mtime >= since:
            return any(record["kind"] == "step" for record in read_run_log(path))
    return False


def _cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """Return the CPU-seconds of each process below `root` by name, those of exited children with their
    parent."""
    seconds: dict[str, float] = {}

    def add(process: psutil.Process, parent: str) -> None:
        with suppress(psutil.Error):
            name, times = _name(process, parent), process.cpu_times()
            seconds[name] = seconds.get(name, 0.0) + sum(times[:4])
            for child in process.children():
                add(child, name)

    add(root, "")
    return seconds


def _name(process: psutil.Process, parent: str) -> str:
    """Return the name of a service, `SERVER` for all processes of an engine's server, or the program's."""
    command: list[Any] = process.cmdline()
    if not parent:
        return "supervisor"
    if parent == SERVER or ENGINES.as_posix() in " ".join(command):
        return SERVER
    if "--name" in command:
        return str(command[command.index("--name") + 1])
    return process.name()


if __name__ == "__main__":
    main()
