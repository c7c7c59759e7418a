"""A part of `areal-async gpu check`: the rate of an engine that samples many answers at once."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from areal_async.cli.gpu_check import DecodePart
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.models.files import stored_tensors, text_part
from areal_async.trajectory import Sampling
from rollout_service.engines import make_engine
from rollout_service.engines.base import GenerateRequest
from rollout_service.tools.serving import ModelFolder

PROMPT_TOKENS = 32
ROUNDS = 3


def bytes_per_step(model: Path, in_flight: int, context: float) -> float:
    """Return the bytes that a decoding step reads: all weights once, and keys and values of every context, in
    bf16. An embedding that is not also the output layer is left out, because a step reads few of its rows."""
    whole = json.loads((model / "config.json").read_bytes())
    config, tied = text_part(whole), whole.get("tie_word_embeddings", False)
    tensors = stored_tensors(model)
    sizes = {name: int(np.prod(stored.shape)) for name, stored in tensors.items()}
    weights = sum(size for name, size in sizes.items() if tied or "embed_tokens" not in name)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * heads * width
    return 2.0 * (weights + in_flight * per_token * context)


async def rate_of(job: JobConfig, in_flight: int, new_tokens: int) -> list[float]:
    """Return the sampled tokens per second of each round of `in_flight` answers, after a short first one."""
    vocabulary = text_part(json.loads((job.model / "config.json").read_bytes()))["vocab_size"]
    rng = np.random.default_rng(0)
    engine = make_engine(job, slots=in_flight, activity="gpu check")

    def request(name: str, tokens: int) -> GenerateRequest:
        prompt = rng.integers(3, vocabulary, PROMPT_TOKENS).astype(np.int32)
        return GenerateRequest(name, prompt, Sampling(max_new_tokens=tokens, seed=1))

    try:
        await engine.start(ModelFolder(job.model, job.policy))
        await asyncio.gather(*(engine.generate(request(f"warm-{n}", 8)) for n in range(in_flight)))
        rates = []
        for number in range(ROUNDS):
            begun_s = time.perf_counter()
            calls = [engine.generate(request(f"{number}-{n}", new_tokens)) for n in range(in_flight)]
            sampled = sum(len(result.token_ids) for result in await asyncio.gather(*calls))
            rates.append(sampled / (time.perf_counter() - begun_s))
        return rates
    finally:
        await engine.stop()


def main() -> None:
    part = msgspec.json.decode(sys.argv[1], type=DecodePart, dec_hook=lambda kind, value: kind(value))
    job = load_job(part.job_file)
    rates = asyncio.run(rate_of(job, part.in_flight, part.new_tokens))
    found = {
        "in_flight": part.in_flight,
        "tokens_per_s": sorted(rates)[len(rates) // 2],
        "bytes_per_step": bytes_per_step(job.model, part.in_flight, PROMPT_TOKENS + part.new_tokens / 2),
    }
    part.out.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
