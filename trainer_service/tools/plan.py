"""`areal-async plan`: the memory that a job's trainer needs on each rank, and what fits.

Reads the job file, the model's `config.json` and the headers of its safetensors files; no weights. torch is
imported only to ask which GPU is visible, where there is one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_async.cli.tools import PlanRequest, run_tool
from areal_async.config.errors import ConfigError, Mistake
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.config.parts import load_part
from areal_async.modelfiles import stored_tensors
from areal_async.weights.channels import shared_copies
from trainer_service.backends.fsdp.memory import ModelShape, RankMemory, options_of
from trainer_service.tools.gpus import GPUS, Gpu, gpu_named, gpu_of_device

RESERVED_BYTES = 3 << 29  # The CUDA context, and workspaces of cuBLAS and NCCL
FRAGMENTED_SHARE = 0.05  # What the caching allocator cannot give out
NCCL_COPY = "copy of the weights that nccl sends"
GIB = 1 << 30
MIB = 1 << 20


def main(request: PlanRequest) -> None:
    """Print the plan. Raises `ConfigError` for a job or a model that cannot be read."""
    job = load_job(Path(request.job_file), request.overrides or ())
    gpu = _gpu(request.gpu, job)
    model, rank = job_memory(job, request.job_file)
    found = figures(job, model, rank, gpu)
    if request.as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)


def job_memory(job: JobConfig, source: str = "job") -> tuple[ModelShape, RankMemory]:
    """The model of `job`, and the bytes that each rank of its back end needs. Raises `ConfigError`."""
    part = load_part(job, "trainer.backend")
    if not hasattr(part, "memory"):
        fix = "Ask its author; `fsdp` can be planned"
        raise ConfigError(
            source,
            [Mistake("trainer.backend", f"{job.trainer.backend} does not say what memory it needs", fix)],
        )
    try:
        config = json.loads((job.model / "config.json").read_bytes())
        model, rank = part.memory(job.trainer, config, tensor_shapes(job.model))
    except (OSError, ValueError) as error:
        fix = "Name a Hugging Face directory of a causal language model with safetensors weights"
        raise ConfigError(
            source, [Mistake("model", f"{job.model} cannot be planned: {error}", fix)]
        ) from None
    return model, rank


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the safetensors files of a model directory, from the headers alone."""
    return {name: stored.shape for name, stored in stored_tensors(folder).items()}


def usable_bytes(gpu: Gpu) -> int:
    """Bytes of a GPU that tensors can have."""
    return int((gpu.memory_bytes - RESERVED_BYTES) * (1 - FRAGMENTED_SHARE))


def host_bytes(job: JobConfig, model: ModelShape, rank: RankMemory) -> dict[str, int]:
    """Bytes of a host's memory with all ranks of the job on it; only what there is any of."""
    published = _published_bytes(job, model)
    # Copies of the model are equal: the first alone writes checkpoints.
    found = {
        "copy for checkpoints, all ranks": 3 * rank.gradients * options_of(job.trainer).shards,
        "offloaded AdamW moments, all ranks": rank.host_optimizer * job.trainer.ranks,
    }
    if job.kind == "rl":
        shared = shared_copies(job)
        found |= {
            "published snapshots (shared memory)": shared.snapshots * published,
            "those that evaluations hold, at most": shared.evaluated * published,
            "deltas and what they change, at most": shared.deltas * published,
            "merged models (shared memory)": shared.merged * _number_bytes(job) * model.size,
        }
    return {name: size for name, size in found.items() if size}


def longest_pass(job: JobConfig) -> int:
    """Most tokens of one pass: a row that is longer than a micro-batch gets one of its own."""
    longest_row = job.rollout.max_model_len if job.kind == "rl" else 0
    return max(job.trainer.micro_batch_tokens, longest_row)


def _number_bytes(job: JobConfig) -> int:
    return 2 if job.trainer.dtype == "bfloat16" else 4


def _published_bytes(job: JobConfig, model: ModelShape) -> int:
    lora = job.trainer.lora
    adapters = sum(prod(s) for block in model.blocks for s in block.adapters(lora.rank, lora.targets))
    return _number_bytes(job) * (adapters if lora.rank else model.size)


def figures(job: JobConfig, model: ModelShape, rank: RankMemory, gpu: Gpu | None) -> dict[str, Any]:
    """Everything that is printed, in bytes."""
    trainer, tokens = job.trainer, longest_pass(job)
    sent = _published_bytes(job, model) if job.kind == "rl" and job.weights.channel == "nccl" else 0
    found: dict[str, Any] = {
        "model": str(job.model),
        "parameters": model.size,
        "blocks": len(model.blocks),
        "ranks": trainer.ranks,
        "dtype": trainer.dtype,
        "backend_args": dict(trainer.backend_args),
        "lora_rank": trainer.lora.rank,
        "bytes_per_rank": {
            (
                "frozen model, and adapters (fp32)" if trainer.lora.rank else "parameters (fp32)"
            ): rank.parameters,
            "gradients (fp32)": rank.gradients,
            "AdamW moments (fp32)": rank.optimizer,
            "gathered parameters, root and a block": rank.working,
            "gradients before they are reduced": rank.unreduced,
            "head, a tile of the vocabulary": rank.head,
        },
        "bytes_per_token": {
            "activations": rank.activations_per_token,
            "backward of a block": rank.passing_per_token,
        },
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "longest_pass_tokens": tokens,
        # A version is exported whole, beside the copy that it becomes, before the next pass.
        "peak_bytes": max(rank.peak(tokens) + sent, rank.state + 2 * sent),
        "host_bytes": host_bytes(job, model, rank),
        "uncounted_layers": model.uncounted,
    }
    if sent:
        found["bytes_per_rank"][NCCL_COPY] = sent
    if gpu is not None:
        found["gpu"] = {
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "usable_bytes": usable_bytes(gpu),
            "tokens_that_fit": rank.tokens_that_fit(usable_bytes(gpu) - sent),
        }
    return found


def _gpu(name: str | None, job: JobConfig) -> Gpu | None:
    """The named GPU, else the visible one of the trainer, if there is one."""
    if name is not None:
        if found := gpu_named(name):
            return found
        known = ", ".join(gpu.name for gpu in GPUS)
        raise ConfigError(
            "the command line", [Mistake("--gpu", f"{name} is in no table", f"Known are {known}")]
        )
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    index = int(job.trainer.device.partition(":")[2] or 0)
    properties = torch.cuda.get_device_properties(min(index, torch.cuda.device_count() - 1))
    return gpu_of_device(properties.name, properties.total_memory)


def _show(found: Mapping[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    ranks = "1 rank" if found["ranks"] == 1 else f"{found['ranks']} ranks"
    options = [f"{name}: {json.dumps(value)}" for name, value in found["backend_args"].items()]
    options += [f"lora of rank {found['lora_rank']}"] if found["lora_rank"] else []
    console.print(found["model"], markup=False)
    console.print(
        f"{_count(found['parameters'])} parameters in {found['blocks']} blocks; {found['dtype']} on {ranks}",
        markup=False,
    )
    if options:
        console.print(", ".join(options).replace('"', ""), markup=False)
    each = {name: _size(size) for name, size in found["bytes_per_rank"].items()}
    each |= {f"{name}, per token": f"{size / MIB:.3f} MiB" for name, size in found["bytes_per_token"].items()}
    tokens = found["longest_pass_tokens"]
    what = "micro-batch" if tokens == found["micro_batch_tokens"] else "row"
    each[f"peak of a {what} of {tokens:,} tokens"] = _size(found["peak_bytes"])
    _show_sizes(console, "each rank", each)
    _show_sizes(console, "the host", {name: _size(size) for name, size in found["host_bytes"].items()})
    gpu = found.get("gpu")
    if gpu is None:
        console.print("No GPU is visible: name one with --gpu to see what fits.")
    else:
        console.print(f"{gpu['name']}: {_size(gpu['usable_bytes'])} for tensors", markup=False)
        alone = NCCL_COPY in found["bytes_per_rank"]  # that channel takes neither more ranks nor adapters
        console.print(_what_fits(gpu["tokens_that_fit"], tokens, what, alone=alone), markup=False)
    if layers := found["uncounted_layers"]:
        console.print(
            f"Not counted is what these layers of a block keep: {', '.join(layers)}.\n"
            "A pass takes more than is said here, and fewer tokens fit.",
            markup=False,
        )


def _show_sizes(console: Console, title: str, sizes: Mapping[str, str]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(min_width=46)
    table.add_column(justify="right", min_width=11)
    for name, size in sizes.items():
        table.add_row(f"  {name}", size)
    console.print(title, table, sep="\n")


def _what_fits(fits: int, tokens: int, what: str, *, alone: bool) -> str:
    if not fits:
        more = "weights.channel: shm and then more ranks" if alone else "more ranks, trainer.lora"
        return f"The model does not fit: use {more} or offload_optimizer."
    told = f"Micro-batches of up to {fits:,} tokens fit; the job's {what} of {tokens:,}"
    if tokens <= fits:
        return f"{told} does too."
    lower = "trainer.micro_batch_tokens" if what == "micro-batch" else "rollout.max_model_len"
    more = "weights.channel: shm" if alone else "more ranks"
    return f"{told} does not.\nLower {lower}, set recompute, or use {more}."


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB // 10 or not n_bytes else f"{n_bytes / MIB:.2f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"


if __name__ == "__main__":
    run_tool(PlanRequest, main)
