"""The quickstart's RL job on tensor ranks and on stages of Megatron-Core, one of which is killed on the way.

    python -m benchmarks.megatron_jobs --out benchmarks/results/megatron_jobs.json

On CPU ranks, with what tests need to run Megatron-Core there; the model is the quickstart's with an output
layer of its own, which stages need. The same job on one rank of FSDP2 is beside them. Figures: held-out
accuracy before and after, what died, and whether each step was trained once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from areal_async.cli.quickstart.main import quickstart_job
from areal_async.service.record import read_run_log
from tests.megatron_jobs import ON_CPU, untie
from tests.processes import processes_of

GRIDS: tuple[dict[str, int], ...] = ({}, {"tensor": 2}, {"pipeline": 2})
KILL_AT = 0.3  # Share of the steps
TARGET = 0.9
"""Held-out accuracy that the quickstart is to reach."""
LIMIT_S = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-megatron-") as temporary:
        folder = Path(temporary)
        quickstart_job(out=folder)
        model = folder / "untied"
        shutil.copytree(folder / "quickstart-warm" / "model", model)
        untie(model)
        (folder / "on_cpu.py").write_text(ON_CPU, encoding="utf-8")
        rows = [measured(folder, model, sizes, given.steps) for sizes in GRIDS]
    result = {
        "what": __doc__.splitlines()[0],
        "command": f"python -m benchmarks.megatron_jobs --steps {given.steps}",
        "jobs": rows,
    }
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["steps_trained_once"] and row["held_out_after"] >= TARGET for row in rows) else 1


def measured(folder: Path, model: Path, sizes: dict[str, int], steps: int) -> dict[str, Any]:
    """The job with these sizes, or on FSDP2 without any."""
    name = "-".join(["megatron", *sizes]) if sizes else "fsdp"
    asked = [f"job={name}", f"model={model}", f"trainer.steps={steps}", "evaluation.every_steps=20"]
    if sizes:
        asked += [
            f"trainer.backend={folder / 'on_cpu.py'}:megatron",
            "trainer.ranks=2",
            f"trainer.parallel={json.dumps(sizes)}",
            "checkpoint.every_steps=10",
        ]
    file = folder / "quickstart-files" / "train.yaml"
    command = [sys.executable, "-m", "areal_async.cli.main", "run", str(file), *asked, "--plain"]
    run = folder / name
    began_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        victim = "trainer-1" if sizes else ""
        while process.poll() is None and victim:
            if len(_steps(run)) >= KILL_AT * steps:
                _process(run, victim).kill()
                break
            time.sleep(0.2)
        said, _ = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise RuntimeError(said[-4000:])
    evaluations = [r["accuracy"] for r in read_run_log(run / "metrics.jsonl") if r["kind"] == "evaluation"]
    kept = {record["step"]: record for record in _steps(run)}
    return {
        "backend": "megatron" if sizes else "fsdp",
        "sizes": sizes,
        "held_out_before": evaluations[0],
        "held_out_after": evaluations[-1],
        "seconds": round(time.monotonic() - began_s),
        "died": [r["service"] for r in read_run_log(run / "metrics.jsonl") if r["kind"] == "restart"],
        "steps_trained_once": sorted(kept) == list(range(steps)),
        "most_staleness": json.loads((run / "summary.json").read_text())["max_staleness_seen"],
    }


def _steps(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [record for record in read_run_log(file) if record["kind"] == "step"] if file.exists() else []


def _process(run: Path, name: str) -> psutil.Process:
    run_id = json.loads((run / "run.lock").read_text())["run_id"]
    return next(one for one in processes_of(run_id) if name in one.cmdline())


if __name__ == "__main__":
    sys.exit(main())
