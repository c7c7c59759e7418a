"""The memory model against measured peaks: `areal-async plan` and what the allocator gave out.

    python benchmarks/memory.py [--tokens 2048] [--json FILE]

Trains two updates of two micro-batches each on a random model, on the CPU, and takes the largest number of
bytes that were allocated at once: those of the tensors that the back end holds when it is made, and from then
on every allocation and release of torch's CPU allocator, as its profiler reports them. Rows are of three
lengths, and a tenth of their tokens is sampled. The figure of the plan is for the same model, options, tokens
and units.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.config.registry import BACKENDS
from trainer_service.backends.base import TRAINED_MODEL, ModelUse, TrainingBackend
from trainer_service.backends.fsdp.memory import MemoryOptions, RankMemory, rank_memory, shape_of
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.rows import row_of
from trainer_service.ranks import join_ranks
from trainer_service.tools.plan import tensor_shapes

DENSE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", DENSE),
    "qwen2-tied": ("Qwen2", {**DENSE, "tie_word_embeddings": True}),
    "qwen2-large-vocabulary": ("Qwen2", {**DENSE, "vocab_size": 65_536}),
    "qwen3": ("Qwen3", DENSE),
    "qwen3-moe": ("Qwen3Moe", {**DENSE, **EXPERTS}),
}
SAVING = (("qwen2", "float32"), ("qwen3", "bfloat16"), ("qwen3-moe", "float32"))
SAMPLED_SHARE = 0.1
UPDATES = 2
MICRO_BATCHES = 2


def write_random_model(name: str, folder: Path, **changes: Any) -> None:
    """A model of `MODELS` as a Hugging Face directory without a tokenizer."""
    family, dimensions = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**dimensions, **changes})
    transformers.utils.logging.disable_progress_bar()
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


def packed_rows(
    tokens: int, vocabulary: int, device: str = "cpu", share: float = SAMPLED_SHARE, rows: int = 3
) -> MicroBatch:
    """A micro-batch of `tokens` in rows of falling length, of which the last tokens are sampled."""
    rng = np.random.default_rng(0)
    parts = range(rows, 0, -1)
    lengths = [part * tokens // sum(parts) for part in parts]
    lengths[0] += tokens - sum(lengths)
    packed = []
    for index, length in enumerate(lengths):
        mask = np.zeros(length + 1, np.uint8)
        mask[-max(1, int(share * length)) :] = 1
        ids = rng.integers(0, vocabulary, length + 1).astype(np.int32)
        row = row_of(index, ids, mask, np.zeros(length + 1, np.float32), np.zeros(length + 1, np.int32))
        packed += [row] if row is not None else []
    return build_micro_batch(packed, device=device)


def train_once(backend: TrainingBackend, batches: list[MicroBatch]) -> None:
    """One update whose loss is the mean log-prob of the sampled units."""
    units = sum(batch.n_units for batch in batches)
    backend.train(TRAINED_MODEL, batches, lambda index, columns: -columns["logp"].sum() / units)
    backend.optimizer_step()


def held_bytes() -> int:
    """Bytes of the storages of all tensors that Python can reach."""
    gc.collect()
    plain = (x for x in gc.get_objects() if issubclass(type(x), Tensor) and not isinstance(x, DTensor))
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in plain)}.values())


@dataclass(frozen=True)
class Allocated:
    """Bytes that the CPU allocator gave out, above those before."""

    peak: int
    """Most at once."""
    at_mark: int
    """When the mark was made last; 0 without one."""


def allocated(action: Callable[[], None], *, mark: str = "") -> Allocated:
    """What was given out during `action`, of which the `mark` is an event of the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() in ("[memory]", mark)]
    now = peak = at_mark = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == mark:
            at_mark = now
        else:
            now += event.nbytes()
            peak = max(peak, now)
    return Allocated(peak, at_mark)


def measure(
    name: str, dtype: str, tokens: int, arguments: Mapping[str, Any], *, lora_rank: int = 0, **changes: Any
) -> dict[str, Any]:
    """The measured peak of one case, and the plan's figure."""
    adapters = {"lora": LoraSection(rank=lora_rank)} if lora_rank else {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_random_model(name, folder, **changes)
        config = json.loads((folder / "config.json").read_text())
        compute_bytes = getattr(torch, dtype).itemsize
        options = MemoryOptions(compute_bytes=compute_bytes, on_host=True, lora_rank=lora_rank, **arguments)
        planned: RankMemory = rank_memory(shape_of(config, tensor_shapes(folder)), options)
        ranks = join_ranks(0, 1)
        before = held_bytes()
        backend: TrainingBackend = BACKENDS.find("fsdp")(
            {TRAINED_MODEL: ModelUse(folder, OptimizerSection(), UPDATES)},
            ranks,
            dtype=getattr(torch, dtype),
            **adapters,
            **arguments,
        )
        batches = [packed_rows(tokens, config["vocab_size"]) for _ in range(MICRO_BATCHES)]
        at_rest = held_bytes() - before

        def train() -> None:
            for _ in range(UPDATES):
                train_once(backend, batches)

        measured = at_rest + allocated(train).peak
    expected = planned.peak(tokens, batches[0].n_units) + planned.host_optimizer
    return {
        "model": name,
        "dtype": dtype,
        "tokens": tokens,
        **({"lora_rank": lora_rank} if lora_rank else {}),
        **arguments,
        "measured_bytes": measured,
        "planned_bytes": expected,
        "ratio": round(expected / measured, 3),
    }


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Every model in fp32 and bf16, and two of them with what saves memory."""
    options: list[dict[str, Any]] = [
        {"recompute": "selective"},
        {"recompute": "full"},
        {"offload_optimizer": True},
        {"recompute": "full", "offload_optimizer": True},
    ]
    plain: list[tuple[str, str, dict[str, Any]]] = [
        (name, dtype, {}) for name in MODELS for dtype in ("float32", "bfloat16")
    ]
    saving = [(name, dtype, chosen) for name, dtype in SAVING for chosen in options]
    adapters = [("qwen2", dtype, {"lora_rank": 16}) for dtype in ("float32", "bfloat16")]
    return plain + saving + adapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name, dtype, arguments in cases():
        chosen = dict(arguments)
        row = measure(name, dtype, options.tokens, chosen, lora_rank=chosen.pop("lora_rank", 0))
        rows.append(row)
        told = " ".join(f"{key}={value}" for key, value in arguments.items())
        print(
            f"{name:24} {dtype:9} {told:40} measured {row['measured_bytes'] / 2**20:7.1f} MiB, "
            f"planned {row['planned_bytes'] / 2**20:7.1f} MiB, ratio {row['ratio']:.3f}",
            flush=True,
        )
    worst = max(abs(math.log(row["ratio"])) for row in rows)
    result = {"worst_ratio": round(math.exp(worst), 3), "bar": 1.1, "cases": rows}
    print(f"worst ratio {result['worst_ratio']} (bar {result['bar']})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
