"""Memory and time of the trainer's output layer in chunks, and of recomputed activations.

    python benchmarks/trainer_memory.py [--json FILE]

- `head`: at the vocabulary of Qwen2.5 and Qwen3, bytes for each trained token of the most memory at one time
  in a forward and a backward pass of the output layer, above its parameters, their gradient and that of the
  hidden states; in chunks and with all logits at once, in the same run. In fp32 the log-probs and gradients
  of the two are compared; in bfloat16 those of each with the exact ones.
- `recompute`: peak of an update of a small model with long rows, by `recompute`, and its time.
- `tiny`: time of the passes of a step of a model with the quickstart's vocabulary, in chunks over at once.

Memory is counted by torch's profiler of its CPU allocator; times are medians of ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory import allocated_peak, packed_rows, train_once, write_random_model
from torch import Tensor

from areal_async.config.job import OptimizerSection
from trainer_service.backends.base import TRAINED_MODEL
from trainer_service.backends.fsdp import backend as backend_module
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.fsdp.head import Head, columns_of_units
from trainer_service.data.microbatch import MicroBatch
from trainer_service.ranks import join_ranks

VOCABULARY = 151_936
MIB = 2**20
BAR_MIB = 0.06


def whole_columns(head: Head, hidden: Tensor, batch: MicroBatch, names: Any) -> dict[str, Tensor]:
    """The columns from all logits at once, with autograd, as before chunks."""
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
    scaled = logits / batch.temperature[:, None]
    logp = -torch.nn.functional.cross_entropy(scaled, batch.target, reduction="none")
    if "entropy" not in names:
        return {"logp": logp}
    wide = scaled.log_softmax(-1)
    return {"logp": logp, "entropy": -(wide.exp() * wide).sum(-1)}


def head_case(tokens: int, hidden_size: int, dtype: torch.dtype, names: tuple[str, ...]) -> dict[str, Any]:
    """Bytes a token in chunks and at once, and how far the two are apart."""
    random = torch.Generator().manual_seed(0)
    weight = (torch.randn(VOCABULARY, hidden_size, generator=random) * 2 / hidden_size**0.5).to(dtype)
    hidden = torch.randn(tokens, hidden_size, generator=random).to(dtype)
    batch = packed_rows(tokens, VOCABULARY, share=1.0)
    found: dict[str, Any] = {}

    def run(way: str, columns_by: Callable[..., Any], exact: bool) -> None:
        precise = torch.float32 if exact else dtype
        w = weight.to(precise, copy=True).requires_grad_()
        h = hidden.to(precise, copy=True).requires_grad_()
        seconds = 0.0

        def passes() -> None:
            nonlocal seconds
            begun_s = time.perf_counter()
            columns = columns_by(Head(w, None), h, batch, names)
            sum(column.sum() for column in columns.values()).backward()
            found[way] = [columns["logp"].detach()]
            seconds = time.perf_counter() - begun_s

        peak = allocated_peak(passes)
        gradients = [t.grad for t in (h, w) if t.grad is not None]
        # In bfloat16 the weight's gradient is summed up in fp32: a constant, not a cost of each token.
        size = sum(g.numel() * 4 for g in gradients)
        found[way] = [*found[way], *gradients, (peak - size) / tokens / MIB, seconds]

    run("chunks", columns_of_units, False)
    run("whole", whole_columns, False)
    exact_way = "whole"
    if dtype != torch.float32:
        run("exact", whole_columns, True)
        exact_way = "exact"
    row: dict[str, Any] = {"tokens": tokens, "hidden": hidden_size, "dtype": str(dtype)[6:], "columns": names}
    for way in ("chunks", "whole"):
        logp, *gradients, mib, seconds = found[way]
        row[f"{way}_mib_per_token"] = round(mib, 4)
        row[f"{way}_s"] = round(seconds, 2)
        if way != exact_way:
            want, *wanted, _, _ = found[exact_way]
            row[f"{way}_logp_difference"] = float((logp - want).abs().max())
            for name, mine, exact in zip(("hidden", "weight"), gradients, wanted, strict=True):
                gap = (mine.float() - exact).abs().max() / exact.abs().max()
                row[f"{way}_{name}_gradient_difference"] = float(gap)
    found.clear()
    gc.collect()
    return row


def backend_of(folder: Path, **arguments: Any) -> FsdpBackend:
    return FsdpBackend(
        {TRAINED_MODEL: folder},
        OptimizerSection(),
        join_ranks(0, 1),
        dtype=torch.float32,
        total_updates=100,
        **arguments,
    )


def recompute_case(tokens: int) -> dict[str, Any]:
    """Peak above what is held and seconds of an update of each way, in one run."""
    row: dict[str, Any] = {"tokens": tokens}
    with tempfile.TemporaryDirectory() as scratch:
        write_random_model("qwen2", Path(scratch))
        batch = packed_rows(tokens, 8192)
        for how in ("none", "selective", "full"):
            backend = backend_of(Path(scratch), recompute=how)
            train_once(backend, [batch])
            row[f"{how}_peak_mib"] = round(allocated_peak(partial(train_once, backend, [batch])) / MIB, 1)
            begun_s = time.perf_counter()
            train_once(backend, [batch])
            row[f"{how}_s"] = round(time.perf_counter() - begun_s, 2)
    return row


def tiny_case(rounds: int) -> dict[str, Any]:
    """Time of a step's passes in chunks over that with all logits at once."""
    ratios = []
    chunked: Any = backend_module.packed_columns

    def at_once(model: Any, batch: MicroBatch, names: Any) -> Any:
        def run(inside: Any) -> Any:
            states = inside.base_model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                packed_runs=batch.runs,
            ).last_hidden_state[0]
            return whole_columns(Head.of(inside), states[batch.predict], batch, names)

        return model(run)

    with tempfile.TemporaryDirectory() as scratch:
        quickstart = {"vocab_size": 18, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
        write_random_model("qwen2-tied", Path(scratch), **quickstart)
        backend, batches = backend_of(Path(scratch)), [packed_rows(1024, 18, share=0.5) for _ in range(2)]

        def seconds(way: Any) -> float:
            backend_module.packed_columns = way
            begun_s = time.perf_counter()
            train_once(backend, batches)
            return time.perf_counter() - begun_s

        for _ in range(3):
            seconds(chunked)
            seconds(at_once)
        for index in range(rounds):
            first, second = (chunked, at_once) if index % 2 else (at_once, chunked)
            times = {first: seconds(first), second: seconds(second)}
            ratios.append(times[chunked] / times[at_once])
    backend_module.packed_columns = chunked
    return {"rounds": rounds, "chunks_over_whole": round(statistics.median(ratios), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"vocabulary": VOCABULARY, "bar_mib_per_token": BAR_MIB, "head": []}
    for tokens, dtype, names in (
        (2048, torch.float32, ("logp",)),
        (3072, torch.float32, ("logp",)),
        (2048, torch.float32, ("logp", "entropy")),
        (2048, torch.bfloat16, ("logp",)),
    ):
        row = head_case(tokens, options.hidden, dtype, names)
        result["head"].append(row)
        print(row, flush=True)
    result["recompute"] = recompute_case(4096)
    print(result["recompute"], flush=True)
    result["tiny"] = tiny_case(60)
    print(result["tiny"], flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
