"""The quickstart's RL job on the GPUs of one machine, by the launcher of one machine and by Ray's: what it
reaches, how fast, and which GPUs each process was given.

    ray start --head --port 6380
    python benchmarks/gpu_cluster.py --address 127.0.0.1:6380 --steps 200 --json results/gpu_cluster.json

Under Ray the trainer, the engine and the evaluation share a GPU by parts of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from areal_async.cli.quickstart.main import JOB_FILES, prepare
from areal_async.config.cluster import ClusterConfig
from areal_async.config.load import load_job
from areal_async.runner.run_job import run_job

SHAPES = {"trainer": 0.4, "rollout": 0.4, "evaluator": 0.2}
KEPT = ("accuracy_start", "accuracy_end", "steps", "wall_s", "steps_per_s", "max_staleness_seen", "restarts")


def seen(run_dir: Path) -> dict[str, dict[str, Any]]:
    """What the topology of the run says of each process."""
    topology = json.loads((run_dir / "topology.json").read_text())
    return {
        place["name"]: {"node": place["node_id"], "own_gpus": place.get("gpus_of_its_own", False)}
        for place in topology["services"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu-cluster"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = options.folder / "files"
    prepare(files, 0)
    run_job(load_job(files / JOB_FILES[0], [f"trainer.device={options.device}"]), overwrite=True, plain=True)
    devices = [f"trainer.device={options.device}", f"rollout.device={options.device}"]
    steps = [f"trainer.steps={options.steps}"]
    rows: dict[str, Any] = {}
    for name in ("local", "ray"):
        shapes = [f"placement.{role}.gpus={part}" for role, part in SHAPES.items()]
        given = shapes if name == "ray" and options.device != "cpu" else []
        job = load_job(files / JOB_FILES[1], [*devices, *steps, *given, f"job=on-{name}"])
        cluster = ClusterConfig.model_validate({"launcher": name, "ray": {"address": options.address}})
        done = run_job(job, overwrite=True, plain=True, cluster=cluster)
        rows[name] = {key: done.summary[key] for key in KEPT} | {"processes": seen(done.run_dir)}
        print(name, json.dumps(rows[name]), flush=True)
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    if options.json is not None:
        command = "python " + " ".join(["benchmarks/gpu_cluster.py", *sys.argv[1:]])
        options.json.write_text(json.dumps({"command": command, "gpu": gpu, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
