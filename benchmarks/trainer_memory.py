"""Memory and time of the trainer's output layer in tiles, and of recomputed activations.

    python benchmarks/trainer_memory.py [--json FILE]

- `head`: at the vocabulary of Qwen2.5 and Qwen3, the most bytes at one time in a forward and a backward pass
  of the output layer, above its parameters, their gradient and that of the hidden states, at several numbers
  of trained tokens: for each token of each number, and as a constant and a slope (least squares over those
  numbers). At `COMPARED` tokens also with all logits at once, in the same run. In fp32 the log-probs and
  gradients of the two are compared; in bfloat16 those of each with the exact ones.
- `recompute`: peak of updates of a small model with long rows, by `recompute` and with offloaded moments,
  beside the plan's figure, and the time of one over that of one that recomputes nothing.
- `tiny`: time of the passes of a step of a model with the quickstart's vocabulary, in tiles over at once.

Memory is counted by torch's profiler of its CPU allocator; times are medians of ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from memory import allocated, measure, packed_rows, train_once, write_random_model
from torch import Tensor

from areal_async.config.job import OptimizerSection
from trainer_service.backends.base import TRAINED_MODEL, ModelUse
from trainer_service.backends.fsdp import backend as backend_module
from trainer_service.backends.fsdp.attention import PackedRuns
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.head import Head, columns_of_units
from trainer_service.data.microbatch import MicroBatch
from trainer_service.ranks import join_ranks

VOCABULARY = 151_936
MIB = 2**20
BAR_MIB = 0.06
TOKENS = (1024, 2048, 4096)
COMPARED = 2048
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"offload_optimizer": True},
    {"recompute": "full", "offload_optimizer": True},
)


def whole_columns(head: Head, hidden: Tensor, batch: MicroBatch, names: Any) -> dict[str, Tensor]:
    """The columns from all logits at once, with autograd, as before tiles."""
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
    scaled = logits / batch.temperature[:, None]
    logp = -torch.nn.functional.cross_entropy(scaled, batch.target, reduction="none")
    if "entropy" not in names:
        return {"logp": logp}
    wide = scaled.log_softmax(-1)
    return {"logp": logp, "entropy": -(wide.exp() * wide).sum(-1)}


def head_case(hidden_size: int, dtype: torch.dtype, names: tuple[str, ...]) -> dict[str, Any]:
    """MiB of each token in tiles and at once, and how far the two are apart."""
    row: dict[str, Any] = {"hidden": hidden_size, "dtype": str(dtype)[6:], "columns": names}
    peaks = {}
    for tokens in TOKENS:
        found: dict[str, Pass] = {"tiles": head_pass(columns_of_units, tokens, hidden_size, dtype, names)}
        peaks[tokens] = found["tiles"].extra_mib
        if tokens == COMPARED:
            found["whole"] = head_pass(whole_columns, tokens, hidden_size, dtype, names)
            exact = "whole"
            if dtype != torch.float32:
                exact = "exact"
                found[exact] = head_pass(whole_columns, tokens, hidden_size, dtype, names, exact=True)
            row |= comparison(found, exact) | {
                "whole_mib_per_token": round(found["whole"].extra_mib / tokens, 4),
                "tiles_s": round(found["tiles"].seconds, 2),
                "whole_s": round(found["whole"].seconds, 2),
            }
        found.clear()
        gc.collect()
    slope, constant = statistics.linear_regression(list(peaks), list(peaks.values()))
    per_token = {tokens: round(peak / tokens, 4) for tokens, peak in peaks.items()}
    return row | {
        "tiles_mib_per_token": per_token,
        "tiles_slope_mib_per_token": round(slope, 4),
        "tiles_constant_mib": round(constant, 1),
        "within_bar": max(per_token.values()) <= BAR_MIB,
    }


class Pass(NamedTuple):
    """A forward and a backward pass of the output layer."""

    logp: Tensor
    gradients: dict[str, Tensor]
    extra_mib: float
    """The peak without the gradients that the pass leaves."""
    seconds: float


def head_pass(
    columns_by: Callable[..., Any],
    tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    names: tuple[str, ...],
    *,
    exact: bool = False,
) -> Pass:
    """One on random numbers of `dtype`, always the same, computed in fp32 with `exact`."""
    random = torch.Generator().manual_seed(0)
    precise = torch.float32 if exact else dtype
    weight = (torch.randn(VOCABULARY, hidden_size, generator=random) * 2 / hidden_size**0.5).to(dtype)
    hidden = torch.randn(tokens, hidden_size, generator=random).to(dtype)
    w = weight.to(precise).requires_grad_()
    h = hidden.to(precise).requires_grad_()
    batch = packed_rows(tokens, VOCABULARY, share=1.0)
    told: dict[str, Any] = {}

    def passes() -> None:
        begun_s = time.perf_counter()
        columns = columns_by(Head(w, None), h, batch, names)
        sum(column.sum() for column in columns.values()).backward()
        told.update(logp=columns["logp"].detach(), seconds=time.perf_counter() - begun_s)

    peak = allocated(passes).peak
    gradients = {"hidden": h.grad, "weight": w.grad}
    left = sum(g.nbytes for g in gradients.values() if g is not None)
    return Pass(told["logp"], gradients, (peak - left) / MIB, told["seconds"])


def comparison(found: dict[str, Pass], exact: str) -> dict[str, float]:
    """How far each pass is from the one called `exact`; gradients as shares of its largest."""
    row = {}
    for way in {"tiles", "whole"} - {exact}:
        row[f"{way}_logp_difference"] = float((found[way].logp - found[exact].logp).abs().max())
        for name, want in found[exact].gradients.items():
            gap = (found[way].gradients[name].float() - want).abs().max() / want.abs().max()
            row[f"{way}_{name}_gradient_difference"] = float(gap)
    return row


def backend_of(folder: Path, **arguments: Any) -> FsdpBackend:
    return FsdpBackend(
        {TRAINED_MODEL: ModelUse(folder, OptimizerSection(), 100)},
        join_ranks(0, 1),
        dtype=torch.float32,
        **arguments,
    )


def recompute_case(tokens: int) -> list[dict[str, Any]]:
    """Peak with all that is held, beside the plan's, and seconds of an update of each way, in one run."""
    rows = []
    for arguments in WAYS:
        row = measure("qwen2", "float32", tokens, arguments)
        with tempfile.TemporaryDirectory() as scratch:
            write_random_model("qwen2", Path(scratch))
            backend, batch = backend_of(Path(scratch), **arguments), packed_rows(tokens, 8192)
            train_once(backend, [batch])
            begun_s = time.perf_counter()
            train_once(backend, [batch])
            seconds = time.perf_counter() - begun_s
        rows.append(row | {"seconds": round(seconds, 2)})
    return [row | {"time_over_first": round(row["seconds"] / rows[0]["seconds"], 2)} for row in rows]


def tiny_case(rounds: int) -> dict[str, Any]:
    """Time of a step's passes in tiles over that with all logits at once."""
    ratios = []
    tiled: Any = backend_module.packed_columns

    def at_once(model: Any, batch: MicroBatch, names: Any) -> Any:
        def run(inside: Any) -> Any:
            states = inside.base_model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                packed_runs=PackedRuns(batch.runs),
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
            seconds(tiled)
            seconds(at_once)
        for index in range(rounds):
            first, second = (tiled, at_once) if index % 2 else (at_once, tiled)
            times = {first: seconds(first), second: seconds(second)}
            ratios.append(times[tiled] / times[at_once])
    backend_module.packed_columns = tiled
    return {"rounds": rounds, "tiles_over_whole": round(statistics.median(ratios), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"vocabulary": VOCABULARY, "bar_mib_per_token": BAR_MIB, "head": []}
    for dtype, names in itertools.product((torch.float32, torch.bfloat16), (("logp",), ("logp", "entropy"))):
        row = head_case(options.hidden, dtype, names)
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
