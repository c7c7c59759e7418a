"""Run a job whose trainer has its batches on disk, by Ray: `python -m tests.sealed.recorded_job JOB.YAML`.

All other services only serve."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_async.config.cluster import load_cluster
from areal_async.config.load import load_job
from areal_async.launch.plan import MODULES
from areal_async.runner.run_job import run_job

if __name__ == "__main__":
    path = Path(sys.argv[1])
    modules = dict.fromkeys(MODULES, "tests.unit.launch.stand_in") | {
        "trainer": "tests.sealed.recorded_trainer"
    }
    job = load_job(path, files=False)
    run_job(job, plain=True, modules=modules, cluster=load_cluster(path.with_name("cluster.yaml")))
