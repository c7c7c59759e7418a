"""Time, CPU and memory of a program with all of its processes, and the figures of a training by it.

Memory is PSS: of a page that several processes share, each counts its part, so that the sum counts it once.
Redis counts, and so does what a process maps of /dev/shm. Cached files that nobody maps do not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
LIMIT_S = 3600.0
SAMPLE_S = 0.5
MEMORY_EVERY = 2
"""Samples of CPU between two of memory, which takes the kernel some milliseconds of every process."""
SHORT = "short-lived"
"""CPU of processes that ended before their next sample."""


@dataclass(frozen=True)
class Saved:
    """Weights after `step` steps, `seconds` after the beginning of training."""

    step: int
    seconds: float
    weights: Path


@dataclass
class Run:
    system: str
    """Name of a rival, or a variant of ours such as `eta=4`."""
    seed: int
    lr: float
    steps: int = 0
    start_s: float = 0.0
    first_step_s: float = 0.0
    """Seconds from the start of the process to the end of the first step."""
    first_step_cpu_s: float = 0.0
    s_per_step: float = 0.0
    saving_s: float = 0.0
    """Seconds taken off for saving."""
    cpu_per_step: dict[str, float] = field(default_factory=dict)
    """Core-seconds by process."""
    peak_mib: dict[str, float] = field(default_factory=dict)
    """PSS by process at the moment when the sum was largest."""
    tokens_per_step: float = 0.0
    """Prompts and answers."""
    cores_elsewhere: float = 0.0
    """Cores that other programs of the machine had meanwhile, on average."""
    staleness_mean: float = 0.0
    mathematics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Wall and core-seconds per step in the engine's passes and in the trainer's, where the run measures
    them."""
    settings: dict[str, int] = field(default_factory=dict)
    """Threads and passes, where they were chosen."""
    points: list[tuple[int, float, float]] = field(default_factory=list)
    """(steps, seconds, held-out accuracy), from step 0 on."""

    @property
    def core_s(self) -> float:
        """Core-seconds per step."""
        return sum(self.cpu_per_step.values())


@dataclass(frozen=True)
class Setting:
    """Settings of a run that all systems share."""

    job_file: Path
    work: Path
    steps: int
    every_steps: int
    warmup_steps: int
    """Left out of seconds and CPU per step."""


class CpuMeter(threading.Thread):
    """CPU time and memory of a process and of all below it, sampled until `end`."""

    def __init__(self, pid: int, root_name: str) -> None:
        super().__init__(daemon=True)
        self._root, self._root_name = psutil.Process(pid), root_name
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._ended = threading.Event()
        self.samples: list[tuple[float, dict[str, float]]] = []
        """Unix time, and core-seconds so far by process; `machine` is all that the machine did."""
        self.memory: list[dict[str, float]] = []
        """MiB of PSS by process."""

    def run(self) -> None:
        for count in range(1 << 62):
            if self._ended.wait(SAMPLE_S):
                break
            self.sample(memory=count % MEMORY_EVERY == 0)

    def end(self) -> None:
        self._ended.set()
        self.join()

    @property
    def peak_mib(self) -> dict[str, float]:
        """MiB of PSS by process, of the sample with the largest sum."""
        return max(self.memory, key=lambda held: sum(held.values()), default={})

    def sample(self, *, memory: bool) -> None:
        """Read CPU, and `memory` if asked, of all processes now."""
        names = {self._root.pid: self._root_name}
        held: dict[str, float] = {}
        live, reaped_s = set(), 0.0
        with suppress(psutil.Error):
            for process in [self._root, *self._root.children(recursive=True)]:
                with suppress(psutil.Error, OSError):
                    line, used = process.cmdline(), process.cpu_times()
                    name = names.get(process.ppid(), self._root_name)  # A parent comes before its children
                    if "--name" in line:
                        name = line[line.index("--name") + 1]
                    elif "--multiprocessing-fork" in line:
                        name = "generator"
                    elif process.name().endswith("-server"):
                        name = "redis"
                    names[process.pid] = name
                    key = process.pid, process.create_time()
                    live.add(key)
                    self._seen[key] = (name, used.user + used.system)
                    reaped_s += used.children_user + used.children_system
                    if memory:
                        held[name] = held.get(name, 0.0) + pss_mib(process.pid)
        cores = psutil.cpu_times()
        total = {"machine": cores.user + cores.nice + cores.system + cores.irq + cores.softirq}
        for name, cpu_s in self._seen.values():
            total[name] = total.get(name, 0.0) + cpu_s
        # A parent counts its dead children whole, and their last samples lack what they did afterwards.
        missed_s = reaped_s - sum(cpu_s for key, (_, cpu_s) in self._seen.items() if key not in live)
        before = self.samples[-1][1].get(SHORT, 0.0) if self.samples else 0.0
        if missed_s > 0 or before:
            total[SHORT] = max(before, missed_s)
        self.samples.append((time.time(), total))
        if memory:
            self.memory.append(held)

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Core-seconds by process from one unix time to another."""
        first, last = self.until(begin_s), self.until(end_s)
        return {name: last[name] - first.get(name, 0.0) for name in last}

    def until(self, time_s: float) -> dict[str, float]:
        """Core-seconds by process until a unix time. Between two samples what was used grows evenly."""
        late = next((n for n, (when_s, _) in enumerate(self.samples) if when_s >= time_s), None)
        if late is None or late == 0:
            return self.samples[-1 if late is None else 0][1]
        (before_s, before), (after_s, after) = self.samples[late - 1], self.samples[late]
        share = (time_s - before_s) / (after_s - before_s)
        return {name: before.get(name, 0.0) + share * (after[name] - before.get(name, 0.0)) for name in after}


def pss_mib(pid: int) -> float:
    """Return the PSS of a process. Raises `OSError` if it has ended."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measured(
    setting: Setting, run: Run, meter: CpuMeter, started_s: float, began_s: float, ended_s: Sequence[float]
) -> Run:
    """Fill in what the times of a training (unix seconds, `ended_s` of its steps) and its CPU say."""
    first_s, last_s = ended_s[setting.warmup_steps - 1], ended_s[-1]
    steps = len(ended_s) - setting.warmup_steps
    used = meter.between(first_s, last_s)
    machine_s = used.pop("machine")
    run.steps, run.start_s = len(ended_s), began_s - started_s
    run.s_per_step = (last_s - first_s) / steps
    run.cpu_per_step = {name: cpu_s / steps for name, cpu_s in sorted(used.items())}
    run.cores_elsewhere = max(0.0, machine_s - sum(used.values())) / (last_s - first_s)
    run.first_step_s = ended_s[0] - started_s
    until_first = meter.until(ended_s[0])
    run.first_step_cpu_s = sum(cpu_s for name, cpu_s in until_first.items() if name != "machine")
    run.peak_mib = dict(sorted(meter.peak_mib.items()))
    return run


def followed(command: Sequence[str], log: Path, name: str, **environment: str) -> tuple[CpuMeter, float]:
    """Run a command to its end with its output in `log`; returns its CPU and the unix time of its start.
    Raises SystemExit where it fails."""
    started_s = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=ROOT, env={**os.environ, **environment}
        )
        meter = CpuMeter(process.pid, name)
        meter.start()
        try:
            status = process.wait(LIMIT_S)
        finally:
            meter.end()
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()
    if status:
        raise SystemExit(f"{name} failed with status {status}: see {log}")
    return meter, started_s
