"""Putting episodes into the buffer: throughput, acknowledgement and memory, beside redis-py and dm-reverb.

    python benchmarks/buffer.py [--sizes 1024,65536,1048576,16777216] [--producers 1,4,8]
        [--tiers memory,everysec,always] [--round-mib 64] [--rounds 2] [--reverb PYTHON] [--json FILE]

Ours: a real service with its Redis; producers lease groups, pack episodes (random tokens, as many as make
the size) and put them as a rollout worker does. redis-py: the same processes SET the same bytes into
another Redis of the same settings, one at a time and pipelined. dm-reverb (tier `memory`): as many
processes insert arrays of the same bytes into a table of its server, one at a time and by a writer that
flushes as rarely. The systems take turns in one run, with the others idle; what was put stays, everywhere.
Packing is not timed."""

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

import psutil
from buffer_service import Service, cpu_s, episode, job_in, keys_at, start_service, units_of

from areal_async.rpc.client import SyncClient
from areal_async.rpc.messages import BufferStats, OpenTrainer, Stats
from replay_buffer.redis.embedded import EmbeddedRedis

HERE = Path(__file__).parent
OURS, SET, SETS = "areal-async", "redis-py", "redis-py, pipelined"
INSERT, WRITER = "reverb insert", "reverb writer"
SMALL_GROUP, LARGE_GROUP = 16, 4
MOST_ITEMS = 4096
COMPARED = {"set": SET, "sets": SETS, "insert": INSERT, "writer": WRITER}


class Processes:
    """Processes that take orders, one JSON line each."""

    def __init__(self, command: list[str], names: list[str], rest: list[str]) -> None:
        pipe = subprocess.PIPE
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
        self.all = [
            subprocess.Popen(
                [*command, name, *rest], stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment
            )
            for name in names
        ]

    def do(self, count: int, **order: Any) -> list[dict[str, Any]]:
        """Give `order` to the first `count` at once, and wait for all."""
        for process in self.all[:count]:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
        return [json.loads(process.stdout.readline()) for process in self.all[:count] if process.stdout]

    def end(self) -> None:
        for process in self.all:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.all:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def figures(reports: list[dict[str, Any]], items: int, size_bytes: int) -> dict[str, float]:
    wall_s = max(r["ended_s"] for r in reports) - min(r["began_s"] for r in reports)
    acks_ms = sorted(ms for report in reports for ms in report["acks_ms"])
    return {
        "items_per_s": items / wall_s,
        "gb_per_s": size_bytes / wall_s / 1e9,
        "ack_p50_ms": acks_ms[len(acks_ms) // 2],
        "ack_p99_ms": acks_ms[min(len(acks_ms) - 1, int(len(acks_ms) * 0.99))],
    }


def outside_rewrites(url: str) -> None:
    """Wait until that Redis writes no new append-only file."""
    import redis

    with redis.Redis.from_url(url) as client:
        while client.info("persistence")["aof_rewrite_in_progress"]:
            time.sleep(0.05)


class Reverb:
    """dm-reverb's server and producers, in their own environment."""

    def __init__(self, python: Path, producers: int) -> None:
        script = [str(python), str(HERE / "buffer_reverb.py")]
        self.server = Processes([*script, "serve"], [""], [])
        assert self.server.all[0].stdout is not None
        port = str(json.loads(self.server.all[0].stdout.readline())["port"])
        self.processes = Processes([*script, "produce"], [f"producer-{i}" for i in range(producers)], [port])

    def end(self) -> None:
        self.processes.end()
        self.server.end()


class Bench:
    """One tier and one size: the servers, and their producers."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, tier: str, size: int, reverb: Reverb | None
    ) -> None:
        self.options, self.tier, self.size = options, tier, size
        self.group = SMALL_GROUP if size <= 256 << 10 else LARGE_GROUP
        self.units = units_of(size)
        most = max(options.producers)
        groups = sum(self.groups_each(n) * n for n in options.producers) * options.rounds
        job = job_in(folder, group_size=self.group, groups=groups, durability=tier)
        self.service: Service = start_service(folder, job)
        self.client = SyncClient(
            self.service.endpoint,
            job=job.job,
            role="bench",
            name="bench",
            access=keys_at(self.service.endpoint, "trainer"),
        )
        self.client.connect()
        self.client.call(OpenTrainer("policy", "bench", 0))
        plain_dir = folder / "plain"
        self.plain = EmbeddedRedis(plain_dir, folder / "s" / "plain", tier)
        asyncio.run(self.plain.start())
        names = [f"producer-{i}" for i in range(most)]
        command = [sys.executable, str(HERE / "buffer_producer.py")]
        self.processes = Processes(command, names, [self.service.endpoint, self.plain.url])
        self.reverb = reverb if tier == "memory" and size in options.reverb_sizes else None
        self.blob = folder / "blob"
        self.blob.write_bytes(episode("t", "t#0", 0, self.units, version=0, epoch=1))

    def groups_each(self, producers: int) -> int:
        """Per producer and round."""
        items = min(MOST_ITEMS, self.options.round_mib * 2**20 // self.size)
        return max(1, items // (producers * self.group))

    def run(self) -> list[dict[str, Any]]:
        self.processes.do(len(self.processes.all), do="prepare", groups=0, units=self.units)  # all are up
        time.sleep(0.2)
        redis, front = self.service.redis, self.service.front
        base_rss = [redis.memory_info().rss, front.memory_info().rss]
        rows = []
        for producers in self.options.producers:
            row: dict[str, Any] = {"tier": self.tier, "size_bytes": self.size, "producers": producers}
            systems: dict[str, list[dict[str, float]]] = {}
            for number in range(self.options.rounds):
                self.round(producers, systems, swap=number % 2 == 1)
            for system, rounds in systems.items():
                row[system] = best(rounds)
            outside_rewrites(self.service_redis)
            held: BufferStats = self.client.call(Stats())
            row["payload_bytes"] = held.payload_bytes
            rss = [redis.memory_info().rss, front.memory_info().rss]
            row["redis_rss_per_payload_byte"] = (rss[0] - base_rss[0]) / held.payload_bytes
            row["front_rss_mib"] = rss[1] / 2**20
            for name, system in COMPARED.items():
                if system in row:
                    row[f"ratio_{name}"] = row[OURS]["gb_per_s"] / row[system]["gb_per_s"]
            rows.append(row)
            print(line(row), flush=True)
        return rows

    @property
    def service_redis(self) -> str:
        endpoint = self.service.endpoint
        password = keys_at(endpoint, "buffer").token("redis")
        return f"unix://:{password}@{Path(endpoint.removeprefix('ipc://')).parent}/redis"

    def round(self, producers: int, systems: dict[str, list[dict[str, float]]], *, swap: bool) -> None:
        groups = self.groups_each(producers)
        prepared = self.processes.do(producers, do="prepare", groups=groups, units=self.units)
        items, size_bytes = (sum(p[name] for p in prepared) for name in ("items", "size_bytes"))
        order = [OURS, SET, SETS]
        if self.reverb is not None:
            self.reverb.processes.do(producers, do="prepare", blob=str(self.blob), items=items // producers)
            order += [INSERT, WRITER]
        for system in reversed(order) if swap else order:
            bench = self.reverb if self.reverb and system in (INSERT, WRITER) else self
            spent_s = self.cpu_s(system)
            measured = figures(bench.processes.do(producers, do=system), items, size_bytes)
            if spent_s is not None and (after_s := self.cpu_s(system)) is not None:
                measured["server_cpu_us_per_item"] = 1e6 * (after_s - spent_s) / items
            systems.setdefault(system, []).append(measured)

    def cpu_s(self, system: str) -> float | None:
        if system == OURS:
            return cpu_s(self.service.front) + cpu_s(self.service.redis)
        if system in (SET, SETS) and self.plain.pid is not None:
            return cpu_s(psutil.Process(self.plain.pid))
        return cpu_s(psutil.Process(self.reverb.server.all[0].pid)) if self.reverb is not None else None

    def end(self) -> None:
        self.processes.end()
        self.client.close()
        self.service.stop()
        asyncio.run(self.plain.stop())


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The fastest round: what else the machine does only ever slows one down."""
    return max(rounds, key=lambda round_: round_["items_per_s"])


def line(row: dict[str, Any]) -> str:
    ours = row[OURS]
    ratios = "".join(f"{row.get(f'ratio_{name}', float('nan')):>9.2f}" for name in COMPARED)
    return (
        f"{row['tier']:9}{row['size_bytes'] / 1024:>8.0f} KiB{row['producers']:>4}"
        f"{ours['items_per_s']:>11.0f}{ours['gb_per_s']:>8.3f}{ours['ack_p99_ms']:>10.1f}"
        f"{row['redis_rss_per_payload_byte']:>8.2f}{ours['server_cpu_us_per_item']:>9.0f}{ratios}"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=numbers, default=[1 << 10, 64 << 10, 96 << 10, 1 << 20, 16 << 20])
    parser.add_argument("--producers", type=numbers, default=[1, 4, 8])
    parser.add_argument(
        "--tiers", type=lambda text: text.split(","), default=["memory", "everysec", "always"]
    )
    parser.add_argument("--round-mib", type=int, default=64, help="payload of a round, all producers")
    parser.add_argument("--rounds", type=int, default=2, help="per system; the best counts")
    parser.add_argument(
        "--reverb", type=Path, default=None, help="the python of an environment with dm-reverb"
    )
    parser.add_argument("--reverb-sizes", type=numbers, default=[96 << 10, 1 << 20])
    parser.add_argument("--dir", type=Path, default=None, help="where the files lie meanwhile")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    print(
        f"{'tier':9}{'episode':>12}{'by':>4}{'items/s':>11}{'GB/s':>8}{'p99 ms':>10}{'RSS/B':>8}{'CPU µs':>9}"
        + "".join(f"{'/' + name:>9}" for name in COMPARED)
    )
    rows: list[dict[str, Any]] = []
    reverb = Reverb(options.reverb, max(options.producers)) if options.reverb else None
    command = "python " + " ".join(["benchmarks/buffer.py", *sys.argv[1:]])
    for tier in options.tiers:
        for size in options.sizes:
            with tempfile.TemporaryDirectory(dir=options.dir) as name:
                bench = Bench(options, Path(name), tier, size, reverb)
                try:
                    rows += bench.run()
                finally:
                    bench.end()
            if options.json is not None:
                options.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    if reverb is not None:
        reverb.end()


if __name__ == "__main__":
    main()
