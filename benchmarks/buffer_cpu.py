"""CPU that the buffer costs per episode: front, Redis, and its clients' put, claim and verdict.

    python benchmarks/buffer_cpu.py [--outstanding 100,1000,10000] [--units 8192] [--group 8] [--rate 150]
        [--seconds 12] [--durability everysec] [--json FILE]

A real service with its Redis; a real rollout worker with the workflow `single_turn` over an engine that
speaks the engine protocol and answers by a timer, `rate` answers a second whatever is under way; a scorer
that claims and gives verdicts; a trainer that takes batches, commits and reports checkpoints, fetching
nothing. As many groups as asked are outstanding all the time, nearly all in generation. CPU seconds (user
and system, all threads) are per process; the worker's are split by a second worker on a buffer that does
nothing: the difference is the cost of the put."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from buffer_service import JOB, PROMPT_UNITS, cpu_s, job_in, secret_at, start_service

from areal_async.config.job import JobConfig
from areal_async.rpc.client import Client
from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    Heartbeat,
    HeartbeatAck,
    Lease,
    LeasedGroup,
    Leases,
    NextBatch,
    OpenTrainer,
    PutAck,
    PutEpisodes,
    PutVerdicts,
    Stats,
)
from areal_async.rpc.schema import Ok, Task, VersionTag
from areal_async.rpc.verdicts import Score
from rollout_service.engines.base import EngineStats, GenerateRequest, GenerateResult
from rollout_service.worker import Worker
from rollout_service.workflows import Renderer, load_workflow
from rollout_service.workflows.turns import Rendered

BATCH_GROUPS, CHECKPOINT_STEPS = 10, 10
WORKER_GROUPS = 500
"""A worker holds at most so many; more are spread over several in one process."""


class TimerEngine:
    """Answers the requests in their order, one every `1 / rate` seconds, with `n` tokens each."""

    def __init__(self, n: int, rate: float) -> None:
        rng = np.random.default_rng(1)
        self._ids = rng.integers(0, 150_000, n, dtype=np.int32)
        self._logprobs = -rng.random(n, dtype=np.float32)
        self._rate = rate
        self._next_s = 0.0
        self._tag = VersionTag("policy", 1, 0)

    @property
    def version(self) -> VersionTag:
        return self._tag

    def alive(self) -> bool:
        return True

    def serve(self, version: int) -> None:
        self._tag = VersionTag("policy", 1, version)

    async def generate(self, request: GenerateRequest, tell: object = None) -> GenerateResult:
        now_s = time.monotonic()
        self._next_s = max(self._next_s, now_s) + 1 / self._rate
        tag, n = self._tag, len(self._ids)
        await asyncio.sleep(self._next_s - now_s)
        return GenerateResult(
            token_ids=self._ids,
            logprobs=self._logprobs,
            versions=np.full(n, tag.version, np.int32),
            epochs=np.full(n, tag.epoch, np.int32),
            finish_reason="stop",
            text="46",
        )

    async def start(self, snapshot: Any) -> None: ...

    async def pause(self) -> None: ...

    async def load(self, snapshot: Any) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Iterable[str]) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 1, 0.0, 0, 0, 0.0)

    async def stop(self) -> None: ...


class ShortPrompt(Renderer):
    """Any prompt as the same few ids."""

    def __init__(self) -> None:
        self._rendered = Rendered(np.arange(5, 5 + PROMPT_UNITS, dtype=np.int32), "12+34=")

    def __call__(self, prompt: Any) -> Rendered:
        return self._rendered


class NoBuffer:
    """Grants as many groups as are outstanding, and takes what comes."""

    def __init__(self, groups: int, group_size: int) -> None:
        self.room, self.size, self.stored, self._count = groups, group_size, 0, 0
        self._parts: dict[str, int] = {}

    async def call(self, request: Any, *, attachments: Sequence[Any] = (), timeout_s: float = 0) -> Any:
        match request:
            case Lease():
                return await self._lease(request.capacity)
            case PutEpisodes():
                return self._put(request.lease_id, request.samples)
            case Heartbeat():
                return HeartbeatAck([])
        return Ok()

    async def _lease(self, capacity: int) -> Leases:
        if self.room == 0:
            await asyncio.sleep(0.02)
            return Leases([], "as many groups are under way as may be")
        n, missing = min(capacity, self.room), list(range(self.size))
        self.room -= n
        granted = []
        for _ in range(n):
            self._count += 1
            name = f"t:{self._count}"
            task = Task(name, "12+34=", "load", "46")
            granted.append(LeasedGroup(f"{name}#0", f"L{name}", 0, task, self.size, missing, 1, 3_600_000))
        return Leases(granted)

    def _put(self, lease_id: str, samples: list[int]) -> PutAck:
        self.stored += len(samples)
        left = self._parts.get(lease_id, self.size) - len(samples)
        self._parts[lease_id] = left
        if not left:
            del self._parts[lease_id]
            self.room += 1
        return PutAck(samples, "memory")


def limits(options: argparse.Namespace, folder: Path, outstanding: int) -> JobConfig:
    """`outstanding` groups, B of them in a step: η follows."""
    tasks = outstanding + 2 * int((options.seconds + 30) * options.rate / options.group)
    return job_in(
        folder,
        group_size=options.group,
        groups=tasks,
        durability=options.durability,
        buffer={
            "batch_groups": BATCH_GROUPS,
            "max_staleness": outstanding // BATCH_GROUPS - 1,
            "lease_s": 30,
            "redis": "embedded",
        },
        rollout={"max_concurrent": min(outstanding, WORKER_GROUPS) * options.group, "concurrency": "fixed"},
    )


async def work(endpoint: str, folder: Path, units: int, rate: float, workers: int) -> None:
    """The workers' process. It reads the version to serve from its standard input; with no endpoint it runs
    on `NoBuffer` and says how many episodes it has made when asked."""
    job = JobConfig.model_validate_json((folder / "job.json").read_text())
    engine: Any = TimerEngine(units - PROMPT_UNITS, rate)
    groups = job.rollout.max_concurrent // job.rollout.group_size
    nothing = NoBuffer(groups, job.rollout.group_size)
    all_workers = []
    for i in range(workers):
        buffer: Any = nothing
        if endpoint:
            buffer = Client(endpoint, job=JOB, role="rollout", name=f"worker-{i}", access=secret_at(endpoint))
            await buffer.connect(60)
        workflow = load_workflow("single_turn")
        all_workers.append(Worker(buffer, engine, workflow, ShortPrompt(), job=job, name=f"worker-{i}"))

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line.startswith("count"):
                print(nothing.stored, flush=True)
            else:
                engine.serve(int(line))
                for worker in all_workers:
                    worker.weights_changed()

    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(listen(), *(worker.run(asyncio.Event()) for worker in all_workers))


async def score(endpoint: str) -> None:
    """The scorer's process."""
    buffer = Client(endpoint, job=JOB, role="reward", name="scorer", access=secret_at(endpoint))
    await buffer.connect(60)
    while True:
        claims, _ = await buffer.exchange(Claim("scorer", 128, wait_ms=1000))
        if claims.items:
            verdicts = [EpisodeVerdict(i.episode_id, i.claim_id, Score(1.0), 0.1) for i in claims.items]
            await buffer.call(PutVerdicts("scorer", verdicts))


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.2)


def child(role: str, *arguments: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, "--as", role, *map(str, arguments)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)


async def train(client: Client, worker: subprocess.Popen[str]) -> None:
    epoch = 1
    for step in range(1_000_000):
        while not isinstance(await client.call(NextBatch("policy", epoch, step, wait_ms=1000)), Batch):
            pass
        await client.call(Commit("policy", epoch, step))
        assert worker.stdin is not None
        worker.stdin.write(f"{step + 1}\n")
        if (step + 1) % CHECKPOINT_STEPS == 0:
            await client.call(Checkpointed("policy", epoch, step + 1))


async def measure(options: argparse.Namespace, outstanding: int, making_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        job = limits(options, folder, outstanding)
        (folder / "job.json").write_text(job.model_dump_json())
        service = start_service(folder, job)
        client = Client(
            service.endpoint, job=JOB, role="trainer", name="trainer", access=secret_at(service.endpoint)
        )
        await client.connect()
        await client.call(OpenTrainer("policy", "trainer", 0))
        workers = max(1, outstanding // WORKER_GROUPS)
        children = [
            child("worker", service.endpoint, folder, options.units, options.rate, workers),
            child("scorer", service.endpoint),
        ]
        training = asyncio.create_task(train(client, children[0]))
        try:
            # All but the few whose lease is on its way.
            while True:
                stats = await client.call(Stats())
                own = stats.policies["policy"]
                if own.outstanding >= 0.99 * outstanding and own.v_train >= 2:
                    break
                await asyncio.sleep(0.5)
                if options.verbose:
                    print(own.outstanding, own.v_train, stats.reasons, stats.episodes, flush=True)
                if training.done():
                    training.result()
            processes = {
                "front": service.front,
                "redis": service.redis,
                "worker": psutil.Process(children[0].pid),
                "scorer": psutil.Process(children[1].pid),
            }
            began, begun_s = await client.call(Stats()), time.monotonic()
            before_s = {role: cpu_s(process) for role, process in processes.items()}
            await asyncio.sleep(options.seconds)
            spent_s = {role: cpu_s(process) - before_s[role] for role, process in processes.items()}
            ended, wall_s = await client.call(Stats()), time.monotonic() - begun_s
            rss_mib = {role: process.memory_info().rss / 2**20 for role, process in processes.items()}
        finally:
            training.cancel()
            for one in children:
                one.kill()
                one.wait()
            await client.close()
            service.stop()
    episodes = ended.reasons["stored"] - began.reasons["stored"]
    scored = ended.reasons["verdict:score"] - began.reasons["verdict:score"]
    assert abs(scored - episodes) < 0.2 * episodes, (scored, episodes)
    ms = {role: 1e3 * seconds / episodes for role, seconds in spent_s.items()}
    parts = {
        "front": ms["front"],
        "redis": ms["redis"],
        "put": max(0.0, ms["worker"] - 1e3 * making_s),
        "claim_and_verdict": ms["scorer"],
    }
    return {
        "outstanding": outstanding,
        "held_outstanding": ended.policies["policy"].outstanding,
        "episodes": episodes,
        "episodes_per_s": episodes / wall_s,
        "ms_per_episode": {**parts, "all": sum(parts.values())},
        "worker_ms_per_episode_making": 1e3 * making_s,
        "rss_mib": rss_mib,
        "payload_mib": ended.payload_bytes / 2**20,
    }


async def making(options: argparse.Namespace) -> float:
    """CPU seconds that a worker spends on an episode before it is put."""
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        (folder / "job.json").write_text(limits(options, folder, 100).model_dump_json())
        worker = child("worker", "", folder, options.units, options.rate, 1)

        def count() -> int:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("count\n")
            return int(worker.stdout.readline())

        try:
            await asyncio.to_thread(wait_until, lambda: count() > 0)
            process = psutil.Process(worker.pid)
            before, before_s = count(), cpu_s(process)
            await asyncio.sleep(options.seconds)
            return (cpu_s(process) - before_s) / (count() - before)
        finally:
            worker.kill()
            worker.wait()


async def main(options: argparse.Namespace) -> None:
    making_s = await making(options) if options.making_ms is None else options.making_ms / 1e3
    print(f"an episode of {options.units} tokens costs its worker {1e3 * making_s:.2f} ms before it is put")
    names = ["front", "redis", "put", "claim_and_verdict", "all"]
    print(f"{'outstanding':>12}{'episodes/s':>12}" + "".join(f"{name:>20}" for name in names) + "   (CPU ms)")
    rows = []
    for outstanding in options.outstanding:
        row = await measure(options, outstanding, making_s)
        rows.append(row)
        figures = "".join(f"{row['ms_per_episode'][name]:>20.3f}" for name in names)
        print(f"{outstanding:>12}{row['episodes_per_s']:>12.0f}{figures}", flush=True)
    if options.json is not None:
        command = "python " + " ".join(["benchmarks/buffer_cpu.py", *sys.argv[1:]])
        options.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        role, *rest = sys.argv[2:]
        if role == "worker":
            asyncio.run(work(rest[0], Path(rest[1]), int(rest[2]), float(rest[3]), int(rest[4])))
        else:
            asyncio.run(score(rest[0]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--outstanding", type=numbers, default=[100, 1000, 10_000], help="multiples of 10")
    parser.add_argument("--units", type=int, default=8192, help="tokens per episode, the prompt's included")
    parser.add_argument("--group", type=int, default=8, help="episodes per group")
    parser.add_argument("--rate", type=float, default=150.0, help="episodes per second")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--durability", choices=["memory", "everysec", "always"], default="everysec")
    parser.add_argument("--making-ms", type=float, default=None, help="take it as known: CPU before the put")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--dir", type=Path, default=None, help="where the files lie meanwhile")
    parser.add_argument("--json", type=Path, default=None)
    asyncio.run(main(parser.parse_args()))
