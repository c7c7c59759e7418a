"""The quickstart's RL job on three hosts that share nothing but a network, with hosts, a link and the
controller failing meanwhile: what it reaches, what each failure costs, and whether any promise was broken.

    PYTHONPATH=. python benchmarks/sealed_quickstart.py --json benchmarks/results/sealed_hosts.json

The hosts are those of `tests/sealed` (root). The buffer is on the first, the trainer on the second, the
engine on the third; the job is submitted to a controller on the first. The event log is on, for the checker
of `tests/chaos`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from areal_async.cli.quickstart.main import JOB_FILES, prepare
from areal_async.config.load import load_job
from areal_async.runner.run_job import run_job
from areal_async.service.record import read_run_log
from tests.sealed.world import (
    CLUSTER,
    PLACES,
    SealedHosts,
    SubmittedJob,
    judged,
    sealed_hosts,
    until,
    unusable,
)

KEPT = (
    "accuracy_start",
    "accuracy_end",
    "steps",
    "wall_s",
    "max_staleness_bound",
    "max_staleness_seen",
    "restarts",
)
PATIENCE_S = 60  # Silence for which Ray waits; more than the longest cut
LIMIT_S = 1200.0
CHECKED = ("observe.event_log=true", "buffer.on_abandoned=drop")
"""What the checker needs of a job."""


def warm_model(folder: Path) -> None:
    """The quickstart's files and its warm start in `folder`, unless they are there."""
    files = folder / "files"
    if not (folder / "quickstart-warm" / "summary.json").exists():
        prepare(files, 0)
        run_job(load_job(files / JOB_FILES[0], ["seed=0"]), overwrite=True, plain=True)


class Faults:
    """What is done to a running job."""

    def __init__(self, hosts: SealedHosts, job: SubmittedJob, cut_s: float) -> None:
        self.hosts, self.job, self.cut_s = hosts, job, cut_s
        self.places = {"trainer": 2, "engine": 3}
        self.seen: list[dict[str, Any]] = []

    def strike(self, step: int, what: str, fault: Callable[[], None]) -> None:
        self.job.until_step(step, LIMIT_S)
        self.seen.append({"what": what, "step": self.job.steps(), "at_s": time.time()})
        print(json.dumps(self.seen[-1]), flush=True)
        fault()

    def replace_host(self, part: str) -> None:
        self.hosts.script("kill", self.places[part])
        self.places[part] = self.hosts.add()
        self.hosts.node(self.places[part], 2, part=part)

    def cut_link(self, part: str) -> None:
        self.hosts.script("cut", self.places[part])
        time.sleep(self.cut_s)  # the fault itself
        self.hosts.script("mend", self.places[part])

    def kill_controller(self) -> None:
        self.hosts.kill_controller()
        self.hosts.areal("up")

    def all(self, steps: int) -> None:
        faults: list[tuple[float, str, Callable[[], None]]] = [
            (0.15, "engine's host killed and replaced", lambda: self.replace_host("engine")),
            (0.35, f"link of the trainer's host cut for {self.cut_s:g} s", lambda: self.cut_link("trainer")),
            (0.5, "controller killed, another up", self.kill_controller),
            (0.65, "trainer's host killed and replaced", lambda: self.replace_host("trainer")),
        ]
        for share, what, fault in faults:
            self.strike(int(share * steps), what, fault)


def with_gaps(faults: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The faults, each with when it was, in seconds from the first step, and with the longest time from one
    step to the next until the next fault."""
    times = [record["time_s"] for record in records if record["kind"] == "step"]
    ends = [*(fault["at_s"] for fault in faults[1:]), times[-1]]
    found = []
    for fault, end_s in zip(faults, ends, strict=True):
        gaps = [after - before for before, after in pairwise(times) if fault["at_s"] < after <= end_s + 1]
        at_s = round(fault["at_s"] - times[0], 1)
        found.append({**fault, "at_s": at_s, "longest_step_s": round(max(gaps, default=0.0), 1)})
    return found


def run(folder: Path, warm: Path, steps: int, cut_s: float) -> dict[str, Any]:
    """Run it with all faults in `folder`; its figures."""
    work = folder / "work"
    shutil.copytree(warm / "files", work / "files", ignore=shutil.ignore_patterns("base"))
    shutil.copytree(warm / "quickstart-warm" / "model", work / "quickstart-warm" / "model")
    (work / "cluster.yaml").write_text(CLUSTER)
    places = [f"placement.{role}.labels.part={place['labels']['part']}" for role, place in PLACES.items()]
    changes = [f"trainer.steps={steps}", *CHECKED, *places]
    job_file = work / "files" / JOB_FILES[1]
    with sealed_hosts(folder, patience_s=PATIENCE_S) as hosts:
        for part in ("home", "trainer", "engine"):
            hosts.node(hosts.add(), 2, part=part)
        hosts.copy_in(work)
        hosts.areal("up", "cluster.yaml")
        hosts.areal("submit", f"files/{JOB_FILES[1]}", *changes)
        job = SubmittedJob(hosts, "quickstart")
        faults = Faults(hosts, job, cut_s)
        try:
            faults.all(steps)
            until(job.endings, "the end of the job", LIMIT_S)
            until(lambda: job.told()["state"] != "RUNNING", "its state")
            told = job.told()
        finally:
            print(job.said(), flush=True)
        hosts.areal("down")
        left = {host: hosts.left(host) for host in (1, *faults.places.values())}
        run_dir = hosts.copy_out(job.run, folder / "back")
    verdict = judged(run_dir, load_job(job_file, changes))
    summary = json.loads((run_dir / "summary.json").read_text())
    records = read_run_log(run_dir / "metrics.jsonl")
    times = [record["time_s"] for record in records if record["kind"] == "step"]
    curve = [[record["version"], record["accuracy"]] for record in records if record["kind"] == "evaluation"]
    return {
        "state": told["state"],
        "attempts": told["attempt"],
        **{key: summary[key] for key in KEPT},
        "accuracy_by_version": curve,
        "median_step_s": round(median(after - before for before, after in pairwise(times)), 2),
        "faults": with_gaps(faults.seen, records),
        "checker": verdict.figures | {"violations": [str(each) for each in verdict.violations]},
        "left_on_hosts": left,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cut-s", type=float, default=30.0)
    parser.add_argument("--warm", type=Path, help="Folder of a warm start, which is made if it is not there.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if why := unusable():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder:
        warm = options.warm or Path(folder) / "warm"
        warm_model(warm)
        found = run(Path(folder) / "run", warm, options.steps, options.cut_s)
    given = f"--steps {options.steps} --cut-s {options.cut_s:g}"
    command = f"PYTHONPATH=. python benchmarks/sealed_quickstart.py {given}"
    result = {"command": command, "cores": len(os.sched_getaffinity(0)), **found}
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
