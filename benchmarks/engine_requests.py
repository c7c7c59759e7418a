"""Short requests per second through an engine, and what each costs this process.

    python benchmarks/engine_requests.py --engine sglang [--in-flight 1,32,128] [--seconds 8] [--update-s 0]

The quickstart's model (16 ids, random weights) and its shapes: prompts of 5 ids, answers of at most 6 units.
The engine is driven through its protocol. With `--update-s` weights are exchanged so often meanwhile, and the
stall of each exchange is told in its three parts. The CPU figure is of this process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.model import write_model
from areal_async.config.job import JobConfig
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import Snapshot, open_snapshot
from rollout_service.engines import make_engine
from rollout_service.engines.base import Engine, GenerateRequest
from tests.snapshots import write_snapshot

SAMPLING = Sampling(temperature=0.7, max_new_tokens=6)


def snapshot(folder: Path, version: int) -> Snapshot:
    """The model's weights, as version `version`."""
    tensors = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    files = {path.name: path for path in (folder / "model").glob("*.json")}
    return open_snapshot(
        write_snapshot(folder / "snapshots", VersionTag("policy", 0, version), tensors, files=files).path
    )


async def rate(
    engine: Engine, in_flight: int, seconds: float, updates: list[Snapshot], every_s: float
) -> dict:
    prompts = np.random.default_rng(0).integers(3, 13, (997, 5)).tolist()
    count = units = 0
    until_s = time.perf_counter() + seconds
    stalls: list[tuple[float, float, float]] = []

    async def one(slot: int) -> None:
        nonlocal count, units
        number = 0
        while time.perf_counter() < until_s:
            number += 1
            prompt = prompts[(slot * 31 + number // 8) % len(prompts)]
            result = await engine.generate(GenerateRequest(f"{slot}-{number}", prompt, SAMPLING))
            count += 1
            units += len(result.token_ids)

    async def update() -> None:
        number = 0
        while every_s and time.perf_counter() + every_s < until_s:
            await asyncio.sleep(every_s)
            at = [time.perf_counter()]
            await engine.pause()
            at.append(time.perf_counter())
            await engine.load(updates[number % len(updates)])
            at.append(time.perf_counter())
            await engine.resume()
            at.append(time.perf_counter())
            stalls.append((at[1] - at[0], at[2] - at[1], at[3] - at[2]))
            number += 1

    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await asyncio.gather(update(), *(one(slot) for slot in range(in_flight)))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    found = {
        "in_flight": in_flight,
        "requests_per_s": round(count / wall_s, 1),
        "tokens_per_s": round(units / wall_s, 1),
        "cpu_us_per_request": round(1e6 * cpu_s / count, 1),
    }
    if stalls:
        names = ("pause_ms", "load_ms", "resume_ms")
        found |= {
            name: round(1e3 * statistics.median(part), 2)
            for name, part in zip(names, zip(*stalls, strict=True), strict=True)
        }
    return found


async def main(arguments: argparse.Namespace) -> None:
    counts = [int(word) for word in arguments.in_flight.split(",")]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        write_model(folder / "model", seed=0)
        job = JobConfig.model_validate(
            {
                "job": "bench",
                "model": str(folder / "model"),
                "tasks": {"train": "none.parquet"},
                "rollout": {
                    "engine": arguments.engine,
                    "max_model_len": 32,
                    "update_mode": arguments.update_mode,
                },
                "reward": {"name": "arithmetic"},
                "trainer": {"steps": 1},
            }
        )
        engine = make_engine(job, slots=max(counts), activity="bench")
        snapshots = [snapshot(folder, version) for version in range(3)]
        try:
            began_s = time.perf_counter()
            await engine.start(snapshots[0])
            start = {"engine": arguments.engine, "start_s": round(time.perf_counter() - began_s, 1)}
            print(json.dumps(start), flush=True)
            for count in counts:
                await rate(engine, count, arguments.seconds / 4, [], 0)
                found = await rate(engine, count, arguments.seconds, snapshots[1:], arguments.update_s)
                print(json.dumps(found), flush=True)
        finally:
            await engine.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="sglang", choices=("local", "sglang", "vllm"))
    parser.add_argument("--in-flight", default="1,32,128")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--update-s", type=float, default=0.0)
    parser.add_argument("--update-mode", default="recompute", choices=("recompute", "keep"))
    asyncio.run(main(parser.parse_args()))
