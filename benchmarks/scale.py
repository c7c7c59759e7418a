"""What one front of the buffer carries: throughput, latencies and CPU from one worker to a thousand.

    python benchmarks/scale.py [--workers 1,10,100,500,1000] [--units 64,8192] [--outstanding 2000,200,20000]
        [--group 8] [--seconds 8] [--durability everysec] [--no-fetch] [--json FILE]

A real service with its Redis, and a closed loop around it: fake workers that hold all groups that are
outstanding, put the oldest as one message as soon as the one before is acknowledged and lease another; a
fake scorer that claims and gives verdicts; a fake trainer that takes batches, fetches all their episodes,
commits and reports checkpoints. Nobody waits for work inside the front (`wait_ms` 0), so every latency is
that of the service: its queue, its decision and Redis's confirmation. CPU is user and system, all threads.

Each worker is a client of its own, `WORKERS_EACH` of them in a process. The version to serve and the phase
of the measurement lie in a file that all processes map.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Awaitable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil
from buffer_service import JOB, cpu_s, episode, job_in, keys_at, start_service

from areal_async.base.verdicts import Score
from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    Fetch,
    GroupSamples,
    Heartbeat,
    Lease,
    LeasedGroup,
    NextBatch,
    OpenTrainer,
    PutEpisodes,
    PutVerdicts,
    Stats,
)
from areal_async.rpc.secret import KeyRole

WORKERS_EACH = 125  # Workers of one process
BATCH_GROUPS, CHECKPOINT_STEPS = 64, 5
SLACK_BYTES = 256 << 20  # What may wait to be scored or trained, beside the groups in generation
SLACK_GROUPS = 2048
PAUSE_S = 0.005  # After an answer that holds nothing
BEAT_S = 5.0
CLAIM_EPISODES, FETCH_EPISODES = 256, 128
PREFIX = struct.Struct("<4sHHQII")
FURTHER_WORKERS = 100
WARM, MEASURED, OVER = range(3)

T = TypeVar("T")


class Shared:
    """The version to serve, and the phase."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 16)

    def set(self, place: int, value: int) -> None:
        struct.pack_into("<q", self._memory, 8 * place, value)

    @property
    def version(self) -> int:
        return int(struct.unpack_from("<q", self._memory, 0)[0])

    @property
    def phase(self) -> int:
        return int(struct.unpack_from("<q", self._memory, 8)[0])


class Timed:
    """A client whose calls are timed while it is measured."""

    def __init__(self, client: Client, shared: Shared, seconds: dict[str, list[float]]) -> None:
        self.client, self._shared, self._seconds = client, shared, seconds

    async def __call__(self, what: str, call: Awaitable[T]) -> T:
        began_s = time.perf_counter()
        answer = await call
        if self._shared.phase == MEASURED:
            self._seconds[what].append(time.perf_counter() - began_s)
        return answer


@cache
def _blob(task_chars: int, group_chars: int, sample: int, units: int, version: int) -> bytes:
    return episode("t" * task_chars, "g" * group_chars, sample, units, version=version, epoch=1)


def blob_of(group: LeasedGroup, sample: int, units: int, version: int) -> bytes:
    """The episode of a lease: one made before, under this one's names."""
    task, name = group.task.task_id.encode(), group.group_id.encode()
    whole = _blob(len(task), len(name), sample, units, version)
    head, rest = whole[:4096], whole[4096:]
    head = head.replace(b"g" * len(name), name).replace(b"t" * len(task), task)
    magic, schema, frames, size, _, zero = PREFIX.unpack_from(head)
    crc = zlib.crc32(rest, zlib.crc32(memoryview(head)[PREFIX.size :]))
    return b"".join((PREFIX.pack(magic, schema, frames, size, crc, zero), head[PREFIX.size :], rest))


async def work(timed: Timed, shared: Shared, name: str, most: int, units: int) -> None:
    """One worker: holds `most` groups, and puts them one after the other."""
    client, held, beat_s = timed.client, deque[tuple[LeasedGroup, int]](), time.monotonic()
    while shared.phase != OVER:
        if len(held) < most:
            version = shared.version
            wanted = Lease(name, min(64, most - len(held)), [VersionTag("policy", 1, version)])
            granted = (await timed("lease", client.call(wanted))).groups
            held += [(group, version) for group in granted]
            if len(held) < most and granted:
                continue
        if time.monotonic() - beat_s > BEAT_S:
            beat_s = time.monotonic()
            await timed("heartbeat", client.call(Heartbeat(name, [group.lease_id for group, _ in held])))
        if not held or (shared.phase == WARM and len(held) < most):
            await asyncio.sleep(PAUSE_S)
            if not held:
                continue
        group, version = held.popleft()
        blobs = [blob_of(group, sample, units, version) for sample in group.missing]
        ack = await timed(
            "put",
            client.call(
                PutEpisodes([GroupSamples(group.lease_id, group.group_id, group.missing)]), attachments=blobs
            ),
        )
        assert not ack.groups[0].refused, ack


async def score(timed: Timed, shared: Shared) -> None:
    while shared.phase != OVER:
        claims, _ = await timed("claim", timed.client.exchange(Claim("scorer", CLAIM_EPISODES)))
        if not claims.items:
            await asyncio.sleep(PAUSE_S)
            continue
        verdicts = [EpisodeVerdict(i.episode_id, i.claim_id, Score(1.0), 0.1) for i in claims.items]
        await timed("verdicts", timed.client.call(PutVerdicts("scorer", verdicts)))


async def train(timed: Timed, shared: Shared, fetches: bool) -> None:
    client, step = timed.client, 0
    while shared.phase != OVER:
        batch = await timed("next_batch", client.call(NextBatch("policy", 1, step)))
        if not isinstance(batch, Batch):
            await asyncio.sleep(PAUSE_S)
            continue
        ids = [each.episode_id for group in batch.groups for each in group.episodes]
        for start in range(0, len(ids) if fetches else 0, FETCH_EPISODES):
            _, found = await timed("fetch", client.exchange(Fetch(ids[start : start + FETCH_EPISODES])))
            assert sum(map(len, found))
        await timed("commit", client.call(Commit("policy", 1, step)))
        step += 1
        shared.set(0, step)
        if step % CHECKPOINT_STEPS == 0:
            await client.call(Checkpointed("policy", 1, step))


async def process(role: KeyRole, order: dict[str, Any]) -> None:
    """The process of some workers, of the scorer or of the trainer; prints its latencies at the end."""
    shared, endpoint = Shared(Path(order["shared"])), order["endpoint"]
    seconds: dict[str, list[float]] = defaultdict(list)
    names = [f"worker-{order['first'] + i}" for i in range(order["count"])] if role == "rollout" else [role]
    clients = [
        Client(endpoint, job=JOB, role=role, name=name, access=keys_at(endpoint, role)) for name in names
    ]
    for client in clients:
        await client.connect(60)
    timed = [Timed(client, shared, seconds) for client in clients]
    match role:
        case "rollout":
            works = [
                work(one, shared, name, order["most"], order["units"])
                for one, name in zip(timed, names, strict=True)
            ]
        case "reward":
            works = [score(timed[0], shared), score(timed[0], shared)]
        case _:
            works = [train(timed[0], shared, order["fetches"])]
    await asyncio.gather(*works)
    print(json.dumps(seconds), flush=True)
    for client in clients:
        await client.close()


def start(role: str, **order: Any) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--as", role, json.dumps(order)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def measure(options: argparse.Namespace, workers: int, units: int, outstanding: int) -> dict[str, Any]:
    held = max(workers, outstanding // workers * workers)
    size_bytes = len(episode("t", "g", 0, units, version=0, epoch=1)) * options.group
    slack = max(2 * BATCH_GROUPS, min(SLACK_GROUPS, SLACK_BYTES // size_bytes))
    eta = -(-(held + slack) // BATCH_GROUPS)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        buffer = {
            "batch_groups": BATCH_GROUPS,
            "max_staleness": eta,
            "pacing": "full",
            "redis": "embedded",
            "lease_s": 60,
            "max_groups": 4 * (held + slack) + CHECKPOINT_STEPS * BATCH_GROUPS,
        }
        job = job_in(
            folder,
            group_size=options.group,
            groups=4096,
            durability=options.durability,
            buffer=buffer,
        )
        service = start_service(folder, job)
        shared = Shared(folder / "shared")
        common = {
            "shared": str(folder / "shared"),
            "endpoint": service.endpoint,
        }
        children = []
        try:
            async with Client(
                service.endpoint,
                job=JOB,
                role="bench",
                name="bench",
                access=keys_at(service.endpoint, "trainer"),
            ) as client:
                await client.call(OpenTrainer("policy", "trainer", 0))
                for first in range(0, workers, WORKERS_EACH):
                    count = min(WORKERS_EACH, workers - first)
                    order = {"first": first, "count": count, "most": held // workers, "units": units}
                    children.append(start("rollout", **common, **order))
                children += [start("reward", **common), start("trainer", **common, fetches=options.fetch)]
                await warm(client, held)
                row = await watch(client, service.front, service.redis, shared, options.seconds)
                shared.set(1, OVER)
                seconds: dict[str, list[float]] = defaultdict(list)
                for child in children:
                    out, _ = await asyncio.to_thread(child.communicate, None, 60)
                    for what, some in json.loads(out).items():
                        seconds[what] += some
        finally:
            for child in children:
                child.kill()
                child.wait()
            service.stop()
    latencies = {what: percentiles(sorted(some)) for what, some in sorted(seconds.items())}
    return {"workers": workers, "units": units, "outstanding": held, **row, "latency_ms": latencies}


async def warm(client: Client, held: int) -> None:
    """Until all groups are leased and the loop goes round."""
    while True:
        own = (await client.call(Stats())).policies["policy"]
        if own.outstanding >= 0.95 * held and own.v_train >= 2:
            return
        await asyncio.sleep(0.25)


async def watch(
    client: Client, front: psutil.Process, redis: psutil.Process, shared: Shared, seconds: float
) -> dict[str, Any]:
    shared.set(1, MEASURED)
    began, began_s = await client.call(Stats()), time.monotonic()
    spent_s = {"front": cpu_s(front), "redis": cpu_s(redis)}
    await asyncio.sleep(seconds)
    spent_s = {"front": cpu_s(front) - spent_s["front"], "redis": cpu_s(redis) - spent_s["redis"]}
    ended, wall_s = await client.call(Stats()), time.monotonic() - began_s

    def count(reason: str) -> int:
        return ended.reasons.get(reason, 0) - began.reasons.get(reason, 0)

    stored, scored = count("stored"), count("verdict:score")
    trained = ended.policies["policy"].episodes_trained - began.policies["policy"].episodes_trained
    ms = {who: 1e3 * s / max(1, stored) for who, s in spent_s.items()}
    return {
        "stored_per_s": stored / wall_s,
        "scored_per_s": scored / wall_s,
        "trained_per_s": trained / wall_s,
        "cpu_ms_per_episode": {**ms, "both": sum(ms.values())},
        "front_busy": spent_s["front"] / wall_s,
        "rss_mib": {"front": front.memory_info().rss / 2**20, "redis": redis.memory_info().rss / 2**20},
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    at = {"p50": 0.5, "p99": 0.99}
    ms = {name: 1e3 * seconds[min(len(seconds) - 1, int(len(seconds) * part))] for name, part in at.items()}
    return {**ms, "n": len(seconds)}


def line(row: dict[str, Any]) -> str:
    latencies = "".join(
        "{:>16}".format("{p50:.1f}/{p99:.1f}".format(**row["latency_ms"][what]))
        if what in row["latency_ms"]
        else f"{'-':>16}"
        for what in SHOWN
    )
    cpu = row["cpu_ms_per_episode"]
    return (
        f"{row['units']:>7}{row['workers']:>8}{row['outstanding']:>8}{row['stored_per_s']:>9.0f}"
        f"{row['scored_per_s']:>9.0f}{row['trained_per_s']:>9.0f}{cpu['front']:>8.3f}{cpu['redis']:>8.3f}"
        + latencies
    )


SHOWN = ("lease", "put", "claim", "verdicts", "next_batch")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


async def main(options: argparse.Namespace) -> None:
    heads = ("stored/s", "scored/s", "trained/s")
    print(
        f"{'units':>7}{'workers':>8}{'groups':>8}{heads[0]:>9}{heads[1]:>9}{heads[2]:>9}{'front':>8}{'redis':>8}"
        + "".join(f"{what:>16}" for what in SHOWN)
        + "   (CPU ms per episode; p50/p99 ms)"
    )
    first, *further = options.outstanding
    runs = [(units, workers, first) for units in options.units for workers in options.workers]
    runs += [(max(options.units), FURTHER_WORKERS, groups) for groups in further]
    rows = []
    for units, workers, groups in runs:
        rows.append(await measure(options, workers, units, groups))
        print(line(rows[-1]), flush=True)
        if options.json is not None:
            command = "python " + " ".join(["benchmarks/scale.py", *sys.argv[1:]])
            options.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        asyncio.run(process(sys.argv[2], json.loads(sys.argv[3])))  # type: ignore[arg-type]
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=numbers, default=[1, 10, 100, 500, 1000])
    parser.add_argument(
        "--units", type=numbers, default=[64, 8192], help="tokens per episode, prompt included"
    )
    parser.add_argument("--outstanding", type=numbers, default=[2000], help="groups in generation")
    parser.add_argument("--group", type=int, default=8, help="episodes per group")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--durability", choices=["memory", "everysec", "always"], default="everysec")
    parser.add_argument("--no-fetch", dest="fetch", action="store_false", help="the trainer fetches nothing")
    parser.add_argument("--dir", type=Path, default=None, help="where the files lie meanwhile")
    parser.add_argument("--json", type=Path, default=None)
    asyncio.run(main(parser.parse_args()))
