"""A real buffer service for the benchmarks of this folder: its job, its process, its episodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from areal_async.base.topology import ServicePlace
from areal_async.config.job import JobConfig
from areal_async.launch.folders import TOPOLOGY, write_keys
from areal_async.launch.one_host import make_host, topology_here
from areal_async.rpc.secret import KeyRole, RoleKeys, RunSecret
from areal_async.trajectory import Call, EpisodeBuilder, Sampling, pack

JOB = "load"
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1 << 24, stop=(), seed=1)
PROMPT_UNITS = 8


def job_in(folder: Path, *, group_size: int, groups: int, durability: str, **sections: Any) -> JobConfig:
    """A job that lets `groups` groups be outstanding and has so many tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "prompt": f"{i}+{i}=",
            "data_source": "load",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        }
        for i in range(groups)
    ]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    buffer = {
        "batch_groups": groups,
        "max_staleness": 4,
        "durability": durability,
        "lease_s": 3600,
        "max_groups": 10 * groups,
        "max_bytes": 1 << 40,
    }
    return JobConfig.model_validate(
        {
            "job": JOB,
            "model": str(folder),
            "run_dir": str(folder),
            "tasks": {"train": str(folder / "tasks.jsonl")},
            "trainer": {"steps": 1_000_000},
            "rollout": {"group_size": group_size} | sections.pop("rollout", {}),
            "buffer": buffer | sections.pop("buffer", {}),
        }
        | sections
    )


@dataclass
class Service:
    """The front's process, with its Redis below it."""

    process: subprocess.Popen[bytes]
    endpoint: str
    log: Path

    @property
    def front(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    @property
    def redis(self) -> psutil.Process:
        (redis,) = (child for child in self.front.children() if child.name().endswith("-server"))
        return redis

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def keys_at(endpoint: str, role: KeyRole) -> RoleKeys:
    """What a client of this role shows the service at `endpoint`."""
    return RunSecret.read(Path(endpoint.removeprefix("ipc://")).parent).of(role)


def start_service(folder: Path, job: JobConfig) -> Service:
    """The service as the supervisor would start it; returns once it serves."""
    host = make_host("local", run_dir=folder / "run", socket_dir=folder / "s", shm_dir=folder / "shm")
    sockets = Path(host.socket_dir)
    for path in (sockets, folder / "run", folder / "shm"):
        path.mkdir(parents=True, exist_ok=True)
    place = ServicePlace("buffer", "buffer", 0, "replay_buffer", 0)
    topology = topology_here(JOB, host, [place], job.model_dump(mode="json"), {})
    (folder / TOPOLOGY).write_bytes(msgspec.json.encode(topology))
    write_keys(RunSecret.make(sockets), sockets)
    log = folder / "buffer.log"
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "replay_buffer", "--topology", str(folder / TOPOLOGY)]
    process = subprocess.Popen(
        [*command, "--name", "buffer", "--ready-fd", str(write_fd)],
        pass_fds=[write_fd],
        stderr=log.open("wb"),
    )
    os.close(write_fd)
    ready = os.read(read_fd, 4096)
    os.close(read_fd)
    if not ready:
        sys.exit(log.read_text())
    return Service(process, topology.buffer, log)


def episode(task_id: str, group_id: str, sample: int, units: int, *, version: int, epoch: int) -> bytes:
    """The blob of one question and one answer of `units` tokens in all, drawn at random."""
    rng = np.random.default_rng(sample)
    n = max(1, units - PROMPT_UNITS)
    builder = EpisodeBuilder(JOB, task_id, group_id, sample)
    prompt = builder.prompt(list(range(5, 5 + PROMPT_UNITS)))
    builder.sampled(
        rng.integers(0, 150_000, n, dtype=np.int32),
        -rng.random(n, dtype=np.float32),
        np.full(n, version, np.int32),
        parent=prompt,
        call=Call(sampling=SAMPLING),
        epoch=epoch,
    )
    builder.text(prompt="12+34=", response="46")
    return pack(builder.build())


def units_of(size_bytes: int) -> int:
    """How many tokens make an episode of about this size."""
    small, large = (len(episode("t", "t#0", 0, n, version=0, epoch=1)) for n in (64, 1064))
    return max(PROMPT_UNITS + 1, round(64 + (size_bytes - small) * 1000 / (large - small)))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
