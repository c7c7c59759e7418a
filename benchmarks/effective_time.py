"""Effective training time under random kills: what share of the wall time went into steps that count.

    python benchmarks/effective_time.py [--steps 40] [--every 20] [--seed 0] [--noise] [--out FILE.json]
        [--set checkpoint.in_memory=false …]

One job, run from the command line again and again: undisturbed; with SIGKILL of rollout worker, reward
service, buffer and Redis at random times; with SIGKILL of the trainer at such times; of any of all these;
and with SIGKILL of every process at such times, each followed at once by `areal-async resume`, which is what
a system does that knows no local restart. Runs of the first two kinds alternate. The first steps of each run
are left out.

    effective training time = wall time of the undisturbed run / wall time of the disturbed one

over the same steps. The machine's speed drifts between two runs, and so does this ratio. `computed` is the
same ratio without the drift: the share of its wall time in which the trainer of the disturbed run computed
steps that count, over that share of the undisturbed run.

From the return of the last victim (it serves; a trainer has trained a step) to the next kill pass `--every`
seconds on average, 0.5 to 1.5 times as many, from the seed. Beside it, for a reader with another rate of
failures, the seconds from a kill of each role until the supervisor notices and until the successor serves,
and the seconds lost: what the steps around the kill took longer than a step of the undisturbed run does.

With `--noise` the trainer does no step twice alike, as on a GPU: every advantage gets a little noise of its
own, so a trainer that comes back abandons all versions after the state that it goes on from. What share of
the groups was dropped is in the result.

The trainer is what the job waits for, and has one core to itself; all the rest share what cores there are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from areal_async.base.processes import kill_processes_of
from areal_async.cli.quickstart.model import split_problems, write_model, write_tasks
from areal_async.launch.run_handle import find_run
from areal_async.service.record import as_it_became, read_run_log
from replay_buffer.tools.measured import measured

ROLES = ("rollout-0", "reward", "buffer", "redis")
WARMUP_STEPS = 6
"""Until the buffer has its batches ahead."""
SPACING = (0.5, 1.5)
"""Shortest and longest time to the next kill, in `--every`. With exponential times, a run of few kills may
have half as many as stated."""
POLL_S = 0.05
SETTLE_STEPS = 4
"""Steps after a kill that may still be slower for it."""
LIMIT_S = 600.0
REWARD = """
from reward_service.sdk import RewardInput, reward


@reward
def share_of_ones(given: RewardInput) -> float:
    return given.response.count("1") / max(1, len(given.response))
"""

NOISE = """
import torch

from areal_async import advantage


@advantage(needs_group=2)
def noisy(rewards, groups):
    labels, member = groups.unique(return_inverse=True)
    zeros = rewards.new_zeros(len(labels))
    mean = zeros.index_add(0, member, rewards) / zeros.index_add(0, member, rewards.new_ones(len(rewards)))
    own = torch.Generator()
    own.seed()
    return (rewards - mean[member]).float() + 1e-4 * torch.randn(len(rewards), generator=own)
"""

Kind = Literal["undisturbed", "others", "trainer", "any role", "whole job"]
KINDS: tuple[Kind, ...] = ("undisturbed", "others", "trainer", "any role", "whole job")


@dataclass
class Kill:
    role: str
    at_s: float
    """Unix time."""
    down_s: float | None = None
    """Until its successor served; of a trainer and of a whole job, until a step was trained."""
    noticed_s: float | None = None
    """From the kill until the supervisor starts a successor."""
    serves_s: float | None = None
    """From the kill until the successor serves, by the supervisor's log. For Redis, until the buffer has
    loaded the ledger from the new one."""
    lost_s: float | None = None


@dataclass
class Run:
    kind: Kind
    wall_s: float = 0.0
    steps: int = 0
    trained_steps: int = 0
    """With those that were done again."""
    wait_share: float = 0.0
    """Share of the wall time in which the trainer waits for batches."""
    computing_share: float = 0.0
    """Share of the wall time in which the trainer computes steps that count."""
    kills: list[Kill] = field(default_factory=list)
    max_staleness: int = 0
    episodes_dropped: int = 0
    resumes: int = 0
    groups_dropped: dict[str, int] = field(default_factory=dict)
    """By reason."""
    dropped_share: float = 0.0
    """Of all groups that ended."""


def prepare(folder: Path, groups: int, *, noise: bool) -> Path:
    """Tasks, a random model, a reward and the job file, in `folder`."""
    (folder / "noise.py").write_text(NOISE, encoding="utf-8")
    train, _ = split_problems(0, 64)
    write_tasks(train, folder / "train.jsonl", "train")
    write_model(folder / "model", seed=0)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    job = {
        "job": "effective-time",
        "seed": 1,
        "run_dir": "runs",
        "model": "model",
        "tasks": {"train": "train.jsonl"},
        "rollout": {
            "group_size": 8,
            "max_concurrent": 256,
            "max_model_len": 48,
            "sampling": {"temperature": 1.0, "max_new_tokens": 6},
        },
        "buffer": {"max_staleness": 4, "batch_groups": groups, "max_groups": 20 * groups},
        "reward": {"name": "reward.py:share_of_ones", "workers": 1},
        "trainer": {
            # Three forward passes and small micro-batches: the trainer is to be the slower side.
            "micro_batch_tokens": 1024,
            "backend_args": {"recompute": "full"},
            "optimizer": {"lr": 1e-4, "clip_grad_norm": 0.2},
            "objective": {"prox": "recompute"} | ({"advantage": "noise.py:noisy"} if noise else {}),
        },
        "evaluation": {"sampling": {"max_new_tokens": 6}},
        "observe": {"metrics_port": 0},
        "supervisor": {"restarts": 100},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


class Job:
    """A job that runs, with the trainer on a core of its own."""

    def __init__(self, job_file: Path, run_dir: Path, overrides: Sequence[str]) -> None:
        self.job_file, self.run_dir = job_file, run_dir
        self._overrides = overrides
        self._cores = sorted(os.sched_getaffinity(0))
        self._trainer: psutil.Process | None = None
        self.process = self._start("run", "--overwrite")

    def _start(self, verb: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "areal_async.cli.main", verb, str(self.job_file), *self._overrides]
        process = subprocess.Popen([*command, *options, "--plain"], stdout=subprocess.DEVNULL)
        os.sched_setaffinity(process.pid, set(self._cores[1:] or self._cores))
        return process

    def resume(self) -> None:
        self.process = self._start("resume")

    def poll(self) -> bool:
        """Pin a new trainer; whether the job still runs."""
        if self._trainer is None or not self._trainer.is_running():
            self._trainer = self.find("trainer")
            with suppress(psutil.Error, ProcessLookupError):
                for thread in self._trainer.threads() if self._trainer is not None else ():
                    os.sched_setaffinity(thread.id, {self._cores[0]})
        return self.process.poll() is None

    def find(self, name: str) -> psutil.Process | None:
        """A process of the job by its name; `redis` is the one below the buffer."""
        with suppress(psutil.Error):
            if name == "redis":
                buffer = self.find("buffer")
                children = buffer.children(recursive=True) if buffer is not None else []
                return next((child for child in children if child.name().endswith("-server")), None)
            for child in psutil.Process(self.process.pid).children():
                if name in child.cmdline():
                    return child
        return None

    def steps(self) -> int:
        """Steps finished, however often."""
        with suppress(OSError):
            return (self.run_dir / "metrics.jsonl").read_bytes().count(b'"kind":"step"')
        return 0

    def last_step(self) -> int:
        """The newest step's number."""
        steps = [
            record["step"] for record in read_run_log(self.run_dir / "metrics.jsonl") if "loss" in record
        ]
        return steps[-1] if steps else 0

    def serves(self, role: str) -> int:
        """How often `role` has come up, by the log of who knows."""
        file, event = ("buffer", "ledger loaded") if role == "redis" else ("supervisor", "service serves")
        with suppress(OSError):
            lines = (self.run_dir / "logs" / f"{file}.log").read_text().splitlines()
            return sum(event in line and (role == "redis" or f'"{role}"' in line) for line in lines)
        return 0

    def kill_all(self) -> None:
        run_id = json.loads((self.run_dir / "run.lock").read_text())["run_id"]
        self.process.kill()
        self.process.wait()
        while kill_processes_of(run_id):
            time.sleep(0.01)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill_all()


def victims(kind: Kind, rng: random.Random) -> Iterator[str]:
    """Whom the next kills hit: of several roles each as often, in random order."""
    roles: Sequence[str] = {"others": ROLES, "any role": (*ROLES, "trainer")}.get(kind, (kind,))
    while True:
        yield from rng.sample(roles, len(roles))


def measure(
    kind: Kind,
    job_file: Path,
    steps: int,
    every_s: float,
    rng: random.Random,
    whom: Iterator[str],
    overrides: Sequence[str] = (),
) -> tuple[Run, list[float]]:
    """Run the job once; returns its figures and, for the counted steps, when each became done for good."""
    run_dir = job_file.parent / "runs" / "effective-time"
    job = Job(job_file, run_dir, [f"trainer.steps={steps}", *overrides])
    run, began_s = Run(kind), time.monotonic()
    next_s: float | None = None
    try:
        while job.poll():
            time.sleep(POLL_S)
            if time.monotonic() - began_s > LIMIT_S:
                raise SystemExit(f"the run ({kind}) took too long: see {run_dir}/logs")
            if kind == "undisturbed" or job.steps() < WARMUP_STEPS or job.last_step() >= steps - SETTLE_STEPS:
                continue
            if next_s is None:
                next_s = time.monotonic() + every_s * rng.uniform(*SPACING)
            elif time.monotonic() >= next_s:
                hit(job, run, next(whom))
                next_s = time.monotonic() + every_s * rng.uniform(*SPACING)
        if job.process.returncode:
            raise SystemExit(f"the run ({kind}) failed: see {run_dir}/logs")
    finally:
        job.end()
    return run, read_times(run, run_dir, steps)


def hit(job: Job, run: Run, role: str) -> None:
    """Kill, and wait until the successor serves; or, of a whole job, until it computes again."""
    at_s, done = time.time(), job.steps()
    if role == "whole job":
        job.kill_all()
        job.resume()
    else:
        process, before = job.find(role), job.serves(role)
        if process is None:
            return
        process.kill()
    run.kills.append(kill := Kill(role, at_s))
    while job.poll() and time.time() - at_s < 120:
        came_back = job.serves(role) > before if role in ROLES else job.steps() > done
        if came_back:
            kill.down_s = round(time.time() - at_s, 3)
            return
        time.sleep(POLL_S)


def read_times(run: Run, run_dir: Path, steps: int) -> list[float]:
    """Fill in what the run's own records say; unix times at which steps became done for good."""
    every = [record for record in read_run_log(run_dir / "metrics.jsonl") if record["kind"] == "step"]
    # A step that a restarted trainer did again was done for good only then.
    times = [record["time_s"] for record in as_it_became(every)]
    assert len(times) == steps
    summary = json.loads((run_dir / "summary.json").read_text())
    counted = times[WARMUP_STEPS:]
    run.steps, run.wall_s = len(counted) - 1, counted[-1] - counted[0]
    run.trained_steps = sum(record["time_s"] > counted[0] for record in every)
    final = as_it_became(every)[WARMUP_STEPS + 1 :]
    run.wait_share = sum(record["wait_s"] for record in final) / run.wall_s
    run.computing_share = sum(record["busy_s"] for record in final) / run.wall_s
    split(run.kills, run_dir / "logs")
    run.max_staleness = summary["max_staleness_seen"]
    run.episodes_dropped = summary["episodes_dropped"]
    run.resumes = summary["resumes"]
    counts = summary["transitions"] or {}
    run.groups_dropped = {reason: count for reason, count in counts.items() if reason.startswith("dropped:")}
    dropped = sum(run.groups_dropped.values())
    run.dropped_share = dropped / max(1, dropped + counts.get("committed", 0))
    return counted


def split(kills: Sequence[Kill], logs: Path) -> None:
    """Fill in when the supervisor noticed each death and when the successor served."""

    def after(file: str, event: str, kill: Kill) -> float | None:
        for line in (logs / f"{file}.log").read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            passed_s = datetime.fromisoformat(said["time"]).timestamp() - kill.at_s
            if passed_s > 0 and said["event"] == event and said.get("service", kill.role) == kill.role:
                return round(passed_s, 3)
        return None

    for kill in kills:
        if kill.role == "redis":
            kill.serves_s = after("buffer", "ledger loaded", kill)
        elif kill.role != "whole job":
            kill.noticed_s = after("supervisor", "start", kill)
            kill.serves_s = after("supervisor", "service serves", kill)


def lost(run: Run, times: Sequence[float], pace_s: float) -> None:
    """Seconds that each kill cost: until the next kill, or some steps later, less what so many steps take."""
    for index, kill in enumerate(run.kills):
        before = max((i for i, at_s in enumerate(times) if at_s <= kill.at_s), default=None)
        if before is None:
            continue
        limit_s = run.kills[index + 1].at_s if index + 1 < len(run.kills) else times[-1]
        after = [i for i, at_s in enumerate(times) if kill.at_s < at_s <= limit_s]
        settled = after[: SETTLE_STEPS + (0 if kill.role in ROLES else 8)]
        if settled:
            kill.lost_s = times[settled[-1]] - times[before] - (settled[-1] - before) * pace_s


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Effective training time by kind, and what a kill of each role cost."""
    base = [run for run in runs if run.kind == "undisturbed"]
    base_s = statistics.mean(run.wall_s for run in base)
    base_share = statistics.mean(run.computing_share for run in base)
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(run.kind for run in runs):
        mine = [run for run in runs if run.kind == kind]
        wall_s, kills = sum(run.wall_s for run in mine), sum(len(run.kills) for run in mine)
        kinds[kind] = {
            "effective": base_s * len(mine) / wall_s,
            "computed": statistics.mean(run.computing_share for run in mine) / base_share,
            "wall_s": wall_s / len(mine),
            "kills": kills,
            "one_kill_every_s": wall_s / kills if kills else None,
            "lost_s_per_kill": (wall_s - base_s * len(mine)) / kills if kills else None,
            "steps_done_again": sum(run.trained_steps - run.steps for run in mine),
            "groups_dropped_share": statistics.mean(run.dropped_share for run in mine),
            "max_staleness": max(run.max_staleness for run in mine),
        }
    roles = {}
    for role in dict.fromkeys(kill.role for run in runs for kill in run.kills):
        kills_of = [kill for run in runs for kill in run.kills if kill.role == role]
        roles[role] = {
            "kills": len(kills_of),
            "noticed_s": _mean([kill.noticed_s for kill in kills_of]),
            "serves_s": _mean([kill.serves_s for kill in kills_of]),
            "back_after_s": _mean([kill.down_s for kill in kills_of]),
            "lost_s": _mean([kill.lost_s for kill in kills_of]),
        }
    return {"kinds": kinds, "roles": roles}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def show(result: dict[str, Any]) -> None:
    def text(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    head = f"{'killed':>12} {'effective':>10} {'computed':>9} {'wall s':>8}"
    print(head + f" {'kills':>6} {'every s':>8} {'lost s/kill':>12} {'again':>6} {'dropped':>8}")
    for kind, row in result["kinds"].items():
        print(
            f"{kind:>12} {row['effective']:>10.3f} {row['computed']:>9.3f} {row['wall_s']:>8.1f} "
            f"{row['kills']:>6} {text(row['one_kill_every_s'], '.1f'):>8} "
            f"{text(row['lost_s_per_kill'], '.2f'):>12} {row['steps_done_again']:>6} "
            f"{row['groups_dropped_share']:>8.2%}"
        )
    names = ("noticed_s", "serves_s", "back_after_s", "lost_s")
    print(f"\n{'role':>12} {'kills':>6}" + "".join(f"{name:>14}" for name in names))
    for role, row in result["roles"].items():
        print(f"{role:>12} {row['kills']:>6}" + "".join(f"{text(row[name], '.2f'):>14}" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=256, help="groups in one step")
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between kills")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS[:2], *KINDS], choices=KINDS, metavar="KIND")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", action="store_true", help="no step can be done again alike")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="of the job file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is ended, too
    runs: list[Run] = []
    pace_s, costs = 0.0, None
    with tempfile.TemporaryDirectory(prefix="effective-time-") as folder:
        job_file = prepare(Path(folder), options.groups, noise=options.noise)
        rng = random.Random(options.seed)
        whom = {kind: victims(kind, rng) for kind in KINDS}
        for kind in options.kinds:
            run, times = measure(kind, job_file, options.steps, options.every, rng, whom[kind], options.set)
            if kind == "undisturbed":
                pace_s = run.wall_s / run.steps
                costs = measured([find_run(job_file.parent / "runs" / "effective-time")]).model_dump()
            lost(run, times, pace_s)
            runs.append(run)
            print(f"{kind}: {run.steps} steps in {run.wall_s:.1f} s, {len(run.kills)} kills", flush=True)
    result = summarise(runs)
    show(result)
    if options.out:
        stated = {
            "command": "python benchmarks/effective_time.py " + " ".join(sys.argv[1:]),
            "cores": len(os.sched_getaffinity(0)),
            "step_s": pace_s,
            "groups": options.groups,
            "costs": costs,  # for `simulated_kills.py`
        }
        options.out.write_text(
            json.dumps(stated | result | {"runs": [asdict(run) for run in runs]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
