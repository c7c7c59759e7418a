"""Tokens per second of the local engine on one core, beside `transformers`' own `generate`.

    python benchmarks/local_engine.py [--in-flight 1,8,64,256,512] [--seconds 4]

The quickstart's model and an arithmetic task's shapes: prompts of 7 tokens, 32 samples each, answers of 2
to 4 tokens. The engine is driven through its protocol with a fixed number of requests in flight; `generate`
gets the same number as one batch, again and again. Both are timed by the
CPU time of the whole process and by the wall; the CPU figure is the one to compare on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.model import write_model
from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest
from rollout_service.engines.local.engine import LocalEngine

PROMPT_TOKENS = 7
GROUP = 32
ANSWER_TOKENS = (2, 3, 4)


@dataclass(frozen=True)
class Start:
    tag: VersionTag
    tensors: dict[str, torch.Tensor]
    path: Path


@dataclass
class Measured:
    tokens: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


def prompt(number: int) -> list[int]:
    return np.random.default_rng(number).integers(3, 16, PROMPT_TOKENS).tolist()


async def engine_rate(directory: Path, in_flight: int, seconds: float) -> Measured:
    engine = LocalEngine(directory, slots=in_flight, max_model_len=64)
    weights = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    await engine.start(Start(VersionTag("policy", 0, 0), weights, directory))
    started = 0
    measured = Measured()
    deadline = float("inf")

    async def one() -> None:
        nonlocal started
        while time.perf_counter() < deadline:
            number = started
            started += 1
            sampling = Sampling(max_new_tokens=ANSWER_TOKENS[number % len(ANSWER_TOKENS)], seed=number)
            result = await engine.generate(
                GenerateRequest(str(number), prompts[number // GROUP % len(prompts)], sampling)
            )
            measured.tokens += len(result.token_ids)

    prompts = [np.asarray(prompt(i), np.int32) for i in range(997)]
    deadline = time.perf_counter() + seconds / 4
    await asyncio.gather(*(one() for _ in range(in_flight)))
    measured.tokens = 0
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    deadline = wall_s + seconds
    await asyncio.gather(*(one() for _ in range(in_flight)))
    measured.cpu_s, measured.wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    await engine.stop()
    return measured


def generate_rate(directory: Path, in_flight: int, seconds: float) -> Measured:
    """`generate` on a batch: every row goes on to the longest answer, but only what was asked for counts."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    wanted = sum(ANSWER_TOKENS[i % len(ANSWER_TOKENS)] for i in range(in_flight))
    longest = max(ANSWER_TOKENS[i % len(ANSWER_TOKENS)] for i in range(in_flight))

    def batch(number: int) -> int:
        ids = torch.tensor([prompt(number * in_flight // GROUP + i // GROUP) for i in range(in_flight)])
        with torch.inference_mode():
            model.generate(ids, do_sample=True, max_new_tokens=longest, attention_mask=torch.ones_like(ids))
        return wanted

    return repeat(batch, seconds)


def repeat(batch: Callable[[int], int], seconds: float) -> Measured:
    batch(0)
    measured = Measured()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    while time.perf_counter() - wall_s < seconds:
        measured.tokens += batch(measured.tokens + 1)
    measured.cpu_s, measured.wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--in-flight", default="1,8,64,256,512")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="one JSON line per row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(directory, seed=0)
        if not options.json:
            print(f"{'in flight':>9} {'engine tok/s':>13} {'(wall)':>8} {'generate tok/s':>15} {'ratio':>6}")
        for in_flight in map(int, options.in_flight.split(",")):
            engine = asyncio.run(engine_rate(directory, in_flight, options.seconds))
            generate = generate_rate(directory, in_flight, options.seconds)
            row = {
                "in_flight": in_flight,
                "engine_tokens_per_cpu_s": round(engine.per_cpu_s()),
                "engine_tokens_per_s": round(engine.tokens / engine.wall_s),
                "generate_tokens_per_cpu_s": round(generate.per_cpu_s()),
                "ratio": round(engine.per_cpu_s() / generate.per_cpu_s(), 2),
            }
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print("{:>9} {:>13} {:>8} {:>15} {:>6}".format(*row.values()), flush=True)


if __name__ == "__main__":
    main()
