"""CPU of the replay buffer (front and Redis) under the quickstart's kind of load.

    python benchmarks/buffer_load.py [--rate 1000] [--seconds 15] [--put 8] [--durability everysec] [--json
    FILE]

One process plays worker, scorer and trainer against a real buffer service with its embedded Redis: groups of
32 tiny episodes are leased, put in handfuls, claimed, judged, batched, fetched, committed and, every few
steps, checkpointed. The rate is held by waiting, so the CPU seconds per episode are those of this load."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from areal_async.config.job import JobConfig
from areal_async.control.context import RunPlaces, ServicePlace, short_socket_dir
from areal_async.trajectory import EpisodeBuilder, Sampling, pack
from areal_async.wire.messages import Batch, EpisodeVerdict, LeasedGroup, Score, VersionTag
from replay_buffer.client import BufferClient

GROUP_SIZE, BATCH_GROUPS, ETA = 32, 16, 4
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, stop=(), seed=1)


def job_in(folder: Path, durability: str) -> JobConfig:
    rows = [
        {
            "prompt": f"{i}+{i}=",
            "data_source": "load",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        }
        for i in range(5000)
    ]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return JobConfig.model_validate(
        {
            "job": "load",
            "model": str(folder),
            "run_dir": str(folder),
            "tasks": {"train": str(folder / "tasks.jsonl")},
            "rollout": {"group_size": GROUP_SIZE},
            "buffer": {"batch_groups": BATCH_GROUPS, "max_staleness": ETA, "durability": durability},
            "trainer": {"steps": 1_000_000},
        }
    )


def start_buffer(folder: Path, job: JobConfig) -> tuple[subprocess.Popen[bytes], str]:
    """The service as the supervisor would start it; returns once it serves."""
    sockets = short_socket_dir(folder / "s")
    for path in (sockets, folder / "run", folder / "shm"):
        path.mkdir(parents=True, exist_ok=True)
    endpoint = f"ipc://{sockets}/buffer"
    places = RunPlaces(
        run_id="load",
        supervisor_pid=os.getpid(),
        run_dir=str(folder / "run"),
        socket_dir=str(sockets),
        shm_dir=str(folder / "shm"),
        buffer_endpoint=endpoint,
        weights_endpoint=f"ipc://{sockets}/weights",
        services=[ServicePlace("buffer", "buffer", 0, "replay_buffer", 0)],
        job=job.model_dump(mode="json"),
    )
    (folder / "context.json").write_bytes(msgspec.json.encode(places))
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "replay_buffer", "--context", str(folder / "context.json")]
    process = subprocess.Popen(
        [*command, "--name", "buffer", "--ready-fd", str(write_fd)],
        pass_fds=[write_fd],
        stderr=(folder / "buffer.log").open("wb"),
    )
    os.close(write_fd)
    if not os.read(read_fd, 4096):
        sys.exit((folder / "buffer.log").read_text())
    return process, endpoint


class Load:
    """One coroutine per role; `version` is what the trainer has published."""

    def __init__(self, endpoint: str, rate: float, put: int) -> None:
        self.client = BufferClient(endpoint, job="load", role="load", name="load")
        self.rate, self.put = rate, put
        self.epoch = self.version = 0
        self.stored = self.trained = 0
        self.put_s: list[float] = []
        self.stop = asyncio.Event()

    async def run(self, seconds: float) -> None:
        self.epoch = (await self.client.open_trainer("load", 0)).epoch
        roles = [asyncio.create_task(role()) for role in (self.worker, self.scorer, self.trainer)]
        done, _ = await asyncio.wait(roles, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for role in roles:
            role.cancel()
        await asyncio.wait(roles)
        for role in done:
            role.result()

    async def worker(self) -> None:
        begun_s = time.monotonic()
        while True:
            tag = VersionTag(self.epoch, self.version)
            leases = await self.client.lease("load", 2, tag, wait_ms=1000)
            for group in leases.groups:
                blobs = {sample: self.episode(group, sample, tag) for sample in group.missing}
                for first in range(0, GROUP_SIZE, self.put):
                    await asyncio.sleep(max(0.0, begun_s + self.stored / self.rate - time.monotonic()))
                    part = {sample: blobs[sample] for sample in range(first, first + self.put)}
                    asked_s = time.perf_counter()
                    ack = await self.client.put(group.lease_id, group.group_id, part)
                    self.put_s.append(time.perf_counter() - asked_s)
                    assert not ack.refused, ack.refused
                    self.stored += len(ack.stored)

    def episode(self, group: LeasedGroup, sample: int, tag: VersionTag) -> bytes:
        builder = EpisodeBuilder("load", group.task.task_id, group.group_id, sample)
        prompt = builder.prompt([5, 6, 7, 8, 9, 10])
        builder.sampled(
            [11, 12, 13],
            [-0.1, -0.2, -0.3],
            [tag.version] * 3,
            parent=prompt,
            sampling=SAMPLING,
            finish_reason="stop",
            epoch=tag.epoch,
        )
        builder.text(prompt="12+34=", response="46")
        return pack(builder.build())

    async def scorer(self) -> None:
        while True:
            claims, _ = await self.client.claim("load", 128, wait_ms=1000)
            verdicts = [EpisodeVerdict(i.episode_id, i.claim_id, Score(1.0), 0.1) for i in claims.items]
            if verdicts:
                await self.client.verdicts("load", verdicts)
            await asyncio.sleep(0.01)

    async def trainer(self) -> None:
        while True:
            batch = await self.client.next_batch(self.epoch, self.version, wait_ms=1000)
            if not isinstance(batch, Batch):
                continue
            episodes = [episode for group in batch.groups for episode in group.episodes]
            await self.client.fetch([episode.episode_id for episode in episodes])
            await self.client.commit(self.epoch, self.version)
            self.trained += len(episodes)
            self.version += 1
            if self.version % 20 == 0:
                await self.client.export_ledger(self.epoch, self.version)
                await self.client.checkpointed(self.epoch, self.version)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        buffer, endpoint = start_buffer(folder, job_in(folder, options.durability))
        try:
            front = psutil.Process(buffer.pid)
            (redis,) = (child for child in front.children() if "redis" in child.name())
            load = Load(endpoint, options.rate, options.put)
            async with load.client:
                before_s, begun_s = [cpu_s(front), cpu_s(redis)], time.monotonic()
                await load.run(options.seconds)
                wall_s = time.monotonic() - begun_s
                spent_s = [cpu_s(front) - before_s[0], cpu_s(redis) - before_s[1]]
                stats = await load.client.stats()
            rss = [front.memory_info().rss, redis.memory_info().rss]
        finally:
            buffer.terminate()
            buffer.wait(10)
    puts = sorted(load.put_s)
    return {
        "episodes": load.stored,
        "episodes_trained": load.trained,
        "episodes_per_s": load.stored / wall_s,
        "put_episodes": options.put,
        "durability": options.durability,
        "front_us_per_episode": 1e6 * spent_s[0] / load.stored,
        "redis_us_per_episode": 1e6 * spent_s[1] / load.stored,
        "core_share": sum(spent_s) / wall_s,
        "core_share_at_1000_per_s": 1000 * sum(spent_s) / load.stored,
        "put_p50_ms": 1e3 * puts[len(puts) // 2],
        "put_p99_ms": 1e3 * puts[int(len(puts) * 0.99)],
        "front_rss_mib": rss[0] / 2**20,
        "redis_rss_mib": rss[1] / 2**20,
        "dropped": stats.episodes_dropped,
        "max_staleness_seen": stats.max_staleness_seen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=1000.0, help="episodes per second")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--put", type=int, default=8, help="episodes per put; divides 32")
    parser.add_argument("--durability", choices=["memory", "everysec", "always"], default="everysec")
    parser.add_argument("--dir", type=Path, default=None, help="where Redis keeps its files meanwhile")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    for name, value in result.items():
        print(f"{name:26} {value:.1f}" if isinstance(value, float) else f"{name:26} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
