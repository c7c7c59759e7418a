"""Calls per second of the reward model as a backend, against the bare model.

    python benchmarks/reward_model.py [--texts 2000] [--layers 4] [--hidden 256] [--device cpu] [--json FILE]
    python benchmarks/reward_model.py --model DIR --device cuda --dtype bfloat16

A randomly initialised sequence-classification model (or `--model`) scores texts of many lengths:

`bare`         the model itself in one process: all texts tokenized before, sorted by length, in batches of
               the same size and the same number of tokens. The most that any server of it could reach.
`in order`     the same without sorting: batches in order of arrival, as a plain loop over a queue would.
`backend`      what a job gets: every text is a call on its way to the model's process and back.
`one by one`   a call is submitted only when the one before it has its verdict: what a call takes by itself.

All compute with one thread on a CPU. Each is run `--repeats` times, alternating; the best counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from transformers.utils import logging as transformers_logging

from areal_async.base.verdicts import Score, Verdict
from areal_async.cli.quickstart.model import CHARACTERS, make_tokenizer
from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from reward_service.backends.reward_model import RewardModelArguments
from reward_service.backends.reward_model.backend import RewardModel
from reward_service.backends.reward_model.scorer import ModelScorer, TokenizedText, cut_by_tokens
from reward_service.sdk import RewardInput


def write_random_model(directory: Path, layers: int, hidden: int) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_texts(n: int, shortest: int, longest: int) -> list[str]:
    """Lengths evenly spread on a logarithmic scale, in random order."""
    rng = random.Random(0)
    lengths = [round(shortest * (longest / shortest) ** rng.random()) for _ in range(n)]
    return ["".join(rng.choices(CHARACTERS, k=length)) for length in lengths]


def bare(
    scorer: ModelScorer, rows: Sequence[TokenizedText], batch: int, tokens: int, *, ordered: bool
) -> list[float]:
    """Scores of all rows, in batches of at most `batch` texts and `tokens` tokens."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids)) if ordered else range(len(rows))
    found = [0.0] * len(rows)
    for start in range(0, len(rows), batch):
        part = list(order)[start : start + batch]
        for inner in cut_by_tokens([len(rows[i].ids) for i in part], tokens):
            chosen = [part[i] for i in inner]
            for index, verdict in zip(chosen, scorer.score([rows[i] for i in chosen]), strict=True):
                assert isinstance(verdict, Score)
                found[index] = verdict.value
    return found


async def through(backend: RewardModel, inputs: Sequence[RewardInput]) -> list[float]:
    found: dict[int, Verdict] = {}
    done = asyncio.Event()

    def take(index: int, verdicts: list[Verdict], _elapsed_ms: float) -> None:
        found[index] = verdicts[0]
        if len(found) == len(inputs):
            done.set()

    await backend.submit(list(inputs), take)
    await done.wait()
    verdicts = [found[index] for index in range(len(inputs))]
    assert all(isinstance(verdict, Score) for verdict in verdicts), verdicts[:3]
    return [verdict.value for verdict in verdicts if isinstance(verdict, Score)]


async def one_by_one(backend: RewardModel, inputs: Sequence[RewardInput]) -> float:
    """Median seconds from a call to its verdict."""
    spent_s = []
    for given in inputs:
        began_s = time.perf_counter()
        await through(backend, [given])
        spent_s.append(time.perf_counter() - began_s)
    return statistics.median(spent_s)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    found = work()
    return time.perf_counter() - began_s, found


def measure(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": directory,
        "template": "{response}",
        "device": options.device,
        "dtype": options.dtype,
        "max_batch": options.batch,
        "max_batch_tokens": options.tokens,
    }
    arguments = RewardModelArguments.model_validate(settings)
    scorer = ModelScorer(arguments)
    texts = make_texts(options.texts, options.shortest, options.longest)
    rows = [row for row in scorer.tokenize([(text, "") for text in texts]) if isinstance(row, TokenizedText)]
    inputs = [RewardInput(response=text) for text in texts]
    best: dict[str, float] = {}

    def note(name: str, spent_s: float) -> None:
        best[name] = max(best.get(name, 0.0), len(texts) / spent_s)

    async def run() -> float:
        spec = RewardSpec("reward_model", settings, timeout_s=600)
        async with RewardModel(spec, RewardSection()) as backend:
            await through(backend, inputs[: 2 * options.batch])
            bare(scorer, rows[: 2 * options.batch], options.batch, options.tokens, ordered=True)
            for _ in range(options.repeats):
                spent_s, expected = timed(
                    lambda: bare(scorer, rows, options.batch, options.tokens, ordered=True)
                )
                note("bare", spent_s)
                spent_s, _ = timed(lambda: bare(scorer, rows, options.batch, options.tokens, ordered=False))
                note("in_order", spent_s)
                began_s = time.perf_counter()
                found = await through(backend, inputs)
                note("backend", time.perf_counter() - began_s)
                worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
                assert worst < (1e-3 if scorer.dtype == "float32" else 0.2), f"scores differ by {worst}"
            return await one_by_one(backend, inputs[:50])

    alone_s = asyncio.run(run())
    return {
        "texts": len(texts),
        "tokens": sum(len(row.ids) for row in rows),
        "device": scorer.device,
        "dtype": scorer.dtype,
        **{f"{name}_per_s": round(rate, 1) for name, rate in best.items()},
        "backend_over_bare": round(best["backend"] / best["bare"], 3),
        "backend_over_in_order": round(best["backend"] / best["in_order"], 3),
        "one_call_ms": round(alone_s * 1000, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--shortest", type=int, default=16, help="characters, which are tokens here")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16384, help="most tokens of a batch, with padding")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--model", help="a model of one's own, in place of a random one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            write_random_model(Path(folder), options.layers, options.hidden)
        figures = measure(options, options.model or folder)
    for name, value in figures.items():
        print(f"{name:24} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
