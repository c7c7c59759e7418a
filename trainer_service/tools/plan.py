"""`areal-async plan`: the memory that a job needs on each GPU and host, and the micro-batches that fit.

The command reads the job file, the model's `config.json` and the headers of its safetensors files, but no
weights. If there are no safetensors files, transformers computes the shapes of tensors. Otherwise torch is
imported only to find a visible GPU.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.cli.tools import PlanRequest, print_json, run_tool
from areal_async.config.checks import check_fields
from areal_async.config.content import content_mistakes
from areal_async.config.devices import device_mistakes
from areal_async.config.engines import declared_engine, evaluation_engine
from areal_async.config.files import check_config, json_in, lora_target_mistakes
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.config.parallel import RankGrid
from areal_async.config.parts import load_part
from areal_async.config.registry import PartError
from areal_async.models.files import stored_tensors, weight_files
from areal_async.weights.channels import shared_copies
from trainer_service.backends.base import TRAINED_MODEL, models_of
from trainer_service.backends.fsdp.memory import ModelShape, RankMemory, options_of, planned
from trainer_service.tools.gpus import GPUS, MIB, Gpu, gpu_named, gpu_of_device
from trainer_service.tools.plan_devices import TrainerBytes, gpu_plans, takes_turns

RESERVED_BYTES = 3 << 29  # The CUDA context, and workspaces of cuBLAS and NCCL
FRAGMENTED_SHARE = 0.05  # Share of memory that the caching allocator cannot use
HOST_GPUS = 8  # Ranks on one host, at most
HOST_BYTES = 2 << 40
"""Memory that a host with eight GPUs usually has. More is not planned with."""
LINKS = {"between GPUs of a host": 200e9, "between hosts": 45e9}
"""Bytes per second that NCCL's collectives reach for each GPU: with NVLink of an H100 (450e9 each way), and
with a network card of 400 Gbit/s for each GPU. Both are assumptions."""
NCCL_COPY = "copy of the weights that nccl sends"
GIB = 1 << 30


def main(request: PlanRequest) -> None:
    """Print the plan. Raises `ConfigError` if a job or a model cannot be read."""
    job = load_job(Path(request.job_file), request.overrides or (), files=False)
    if mistakes := content_mistakes(job, ("model",)) or check_config(job):
        raise ConfigError(request.job_file, mistakes)
    gpu, count = _gpu(request.gpu, job)
    shapes, rank = job_memory(job, request.job_file)
    found = figures(job, shapes[TRAINED_MODEL], rank, gpu, count) | {
        "shapes_of_config": not _has_weights(job.model),
        "further_models": {
            name: {"parameters": shapes[name].size, "trained": use.optimizer is not None}
            for name, use in models_of(job).items()
            if name != TRAINED_MODEL
        },
        "vision": vision_figures(job, shapes[TRAINED_MODEL]),
        "uncounted_layers": sorted({layer for model in shapes.values() for layer in model.uncounted}),
    }
    if request.as_json:
        print_json(found)
    else:
        _show(found, [*remedies(job, found, count)] if gpu else [])


def job_memory(job: JobConfig, source: str = "job") -> tuple[Mapping[str, ModelShape], RankMemory]:
    """Return the shapes of the job's models by name, and the bytes that each rank needs for all of them.
    Raises `ConfigError`."""
    part = load_part(job, "trainer.backend")
    if not hasattr(part, "memory_of"):
        fix = "Ask its author; `fsdp` can be planned"
        raise ConfigError(
            source,
            [Mistake("trainer.backend", f"{job.trainer.backend} does not say what memory it needs", fix)],
        )
    reading = job.model

    def read(folder: Path) -> tuple[dict[str, Any], Mapping[str, tuple[int, ...]]]:
        nonlocal reading
        reading = folder
        return json.loads((folder / "config.json").read_bytes()), tensor_shapes(folder)

    try:
        shapes, rank = planned(job.trainer, models_of(job), read, part.memory_of)
    except (OSError, ValueError) as error:
        fix = "Name a Hugging Face directory of a causal language model"
        raise ConfigError(source, [Mistake("model", f"{reading} cannot be planned: {error}", fix)]) from None
    if mistakes := [*lora_target_mistakes(job, tensor_shapes(job.model))]:
        raise ConfigError(source, mistakes)
    return shapes, rank


def vision_figures(job: JobConfig, model: ModelShape) -> dict[str, Any] | None:
    """Return the size and the work of the model's vision tower, and the tokens of the largest image; None if
    it has no tower. The tokens are None if its config does not say them."""
    if not model.tower:
        return None
    from trainer_service.data.flops import load_row_cost  # loads torch

    cost, files = load_row_cost(job.model, trains_vision=True), ("config.json", "preprocessor_config.json")
    config, processor = (json_in(job.model / name) or {} for name in files)
    given = config.get("vision_config"), processor.get("size")
    vision, size = (each if isinstance(each, dict) else {} for each in given)
    pixels = job.rollout.images.max_pixels or processor.get("max_pixels") or size.get("longest_edge")
    side = vision.get("patch_size", 0) * vision.get("spatial_merge_size", 0)
    return {
        "parameters": sum(map(prod, model.tower.values())),
        "trained": options_of(job.trainer).trains_vision,
        "flops_per_token": {"of an image": cost.vision, "language model": cost.linear},
        "largest_image_tokens": pixels // side**2 if pixels and side else None,
    }


@cache
def tensor_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a model directory, from the safetensors headers or else from
    `config.json`. Raises `OSError` and `ValueError`."""
    if _has_weights(folder):
        return {name: stored.shape for name, stored in stored_tensors(folder).items()}
    import torch
    from transformers import AutoConfig

    from areal_async.models.classes import auto_class
    from areal_async.weights.names import names_in_files

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model: Any = auto_class(config).from_config(config)
        model.tie_weights()  # early versions of transformers 5 only tie weights while loading them
        state = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(state.items())}  # the first of tied names
        return names_in_files(model, {name: state[name] for name in first.values()})
    except Exception as error:  # an unknown configuration can cause any error
        raise ValueError(f"transformers makes no model of its config.json: {error}") from error


def _has_weights(folder: Path) -> bool:
    files = weight_files(folder)
    return bool(files) and all(path.is_file() for path in files)


def usable_bytes(gpu: Gpu, beside: int = 0) -> int:
    """Return the bytes of a GPU that are available for the trainer's tensors, with `beside` bytes of other
    processes on it."""
    return int((gpu.memory_bytes - RESERVED_BYTES - beside) * (1 - FRAGMENTED_SHARE))


def host_bytes(job: JobConfig, model: ModelShape, rank: RankMemory) -> dict[str, int]:
    """Return the bytes of memory that the host of rank 0 needs, without entries of 0. The host has at most
    `HOST_GPUS` ranks."""
    published, ranks = _published_bytes(job, model), min(job.trainer.ranks, HOST_GPUS)
    # Copies of the model are equal, so only the first one writes checkpoints.
    found = {
        "copy for checkpoints, ranks of the host": rank.saved * min(ranks, options_of(job.trainer).shards),
        "offloaded AdamW moments, ranks of the host": rank.host_optimizer * ranks,
    }
    if takes_turns(job):
        found["the trainer's state while engines sample"] = rank.parameters + rank.optimizer
        found["weights of an engine that sleeps"] = options_of(job.trainer).compute_bytes * model.size
    try:
        shared = shared_copies(job) if job.kind == "rl" else None
    except PartError:
        shared = None  # the needs of an engine that is not installed are unknown
    if shared is not None:
        found |= {
            "published snapshots (shared memory)": shared.snapshots * published,
            "those that evaluations hold, at most": shared.evaluated * published,
            "deltas and what they change, at most": shared.deltas * published,
            "merged models (shared memory)": shared.merged
            * options_of(job.trainer).compute_bytes
            * model.size,
        }
    return {name: size for name, size in found.items() if size}


def _published_bytes(job: JobConfig, model: ModelShape) -> int:
    lora = job.trainer.lora
    adapters = sum(prod(s) for block in model.blocks for s in block.adapters(lora.rank, lora.targets))
    return options_of(job.trainer).compute_bytes * (adapters if lora.rank else model.size)


def _sent_bytes(job: JobConfig, model: ModelShape) -> int:
    return _published_bytes(job, model) if job.kind == "rl" and job.weights.channel == "nccl" else 0


def _tokens_that_fit(job: JobConfig, model: ModelShape, rank: RankMemory, room: int) -> int:
    sent = _sent_bytes(job, model)
    # Before the next pass, a version is exported completely, next to the copy that is sent.
    return rank.tokens_that_fit(room - sent) if rank.state + 2 * sent <= room else 0


def longest_pass(job: JobConfig) -> int:
    """Return the largest number of tokens in one pass. A row that is longer than a micro-batch gets its own
    pass."""
    longest_row = job.rollout.max_model_len if job.kind == "rl" else 0
    return max(job.trainer.micro_batch_tokens, longest_row)


def figures(
    job: JobConfig, model: ModelShape, rank: RankMemory, gpu: Gpu | None, count: int | None = None
) -> dict[str, Any]:
    """Return all printed figures, in bytes. `count` is the number of GPUs, None if it is not known."""
    trainer, tokens = job.trainer, longest_pass(job)
    sent = _sent_bytes(job, model)
    found: dict[str, Any] = {
        "model": str(job.model),
        "parameters": model.size,
        "blocks": len(model.blocks),
        "ranks": trainer.ranks,
        "parallel": asdict(RankGrid.of(trainer)),
        "dtype": trainer.resolved_dtype,
        "backend_args": dict(trainer.backend_args),
        "lora_rank": trainer.lora.rank,
        "bytes_per_rank": {
            ("frozen model, and adapters (fp32)" if trainer.lora.rank else "parameters"): rank.parameters,
            "gradients (fp32)": rank.gradients,
            "AdamW moments (fp32)": rank.optimizer,
            "gathered parameters, root and a block": rank.working,
            "gradients before they are reduced": rank.unreduced,
            "head, a tile of the vocabulary": rank.head,
        },
        "bytes_per_token": {
            "activations": round(rank.activations_per_token / rank.sequence),
            "backward of a block": round(rank.passing_per_token / rank.sequence),
        },
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "longest_pass_tokens": tokens,
        "peak_bytes": max(rank.peak(tokens) + sent, rank.state + 2 * sent),
        "host_bytes": host_bytes(job, model, rank),
    }
    mistakes = [*_host_mistakes(found["host_bytes"])]
    if sent:
        found["bytes_per_rank"][NCCL_COPY] = sent
    if rank.exchanged and trainer.ranks > 1:
        link = [*LINKS][options_of(trainer).shards > HOST_GPUS]
        found["communication"] = {"link": link, "seconds_per_pass": rank.exchanged / LINKS[link]}
    if gpu is not None:
        there, refused = _on_gpus(job, model, rank, gpu, count, found["peak_bytes"])
        found, mistakes = found | there, mistakes + refused
    told = [{"field": each.field, "problem": each.problem, "fix": each.fix} for each in mistakes]
    return found | {"mistakes": told}


def _host_mistakes(host: Mapping[str, int]) -> Iterator[Mistake]:
    if (needed := sum(host.values())) > HOST_BYTES:
        problem = (
            f"its snapshots and copies take {_size(needed)} on the host of rank 0, and a host with eight "
            f"GPUs has about {_size(HOST_BYTES)}: no setting changes this"
        )
        yield Mistake("model", problem, "Train a smaller model")


def _on_gpus(
    job: JobConfig, model: ModelShape, rank: RankMemory, gpu: Gpu, count: int | None, peak: int
) -> tuple[dict[str, Any], list[Mistake]]:
    held = TrainerBytes(
        RESERVED_BYTES + rank.parameters, RESERVED_BYTES + math.ceil(peak / (1 - FRAGMENTED_SHARE))
    )
    try:
        devices, mistakes = gpu_plans(job, model, tensor_shapes, held, gpu, count)
    except (OSError, ValueError) as error:
        fix = "Correct it, and plan again"
        raise ConfigError("job", [Mistake("rollout.server.arguments", str(error), fix)]) from None
    beside = max((each["beside_trainer_bytes"] for each in devices if each["trainer"]), default=0)
    room, tokens = usable_bytes(gpu, beside), longest_pass(job)
    fits = _tokens_that_fit(job, model, rank, room) if room > 0 else 0
    return {
        "gpu": {
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "usable_bytes": room,
            "tokens_that_fit": fits,
            "fits": tokens <= fits,
        },
        "devices": devices,
    }, mistakes


def remedies(job: JobConfig, found: Mapping[str, Any], count: int | None) -> Iterator[str]:
    """Yield the fields that give the trainer more memory, the best first. `found` are the figures for `count`
    GPUs. If `count` is None, a job whose trainer and engine have the same single GPU has no other."""
    trainer, devices = job.trainer, found["devices"]
    shared = [each["gpus"] for each in devices if each["trainer"] and each["engines"]]
    one = count == 1 or (count is None and len(devices) == 1 and [*map(len, shared)] == [1])
    if one and shared and not takes_turns(job):
        placement = job.placement.model_copy(update={"share": "time"})
        if not check_fields(job.model_copy(update={"placement": placement})):
            yield "placement.share: time"
        for section in dict.fromkeys(each["section"] for each in devices[0]["engines"]):
            part = declared_engine(job.rollout.engine if section == "rollout" else evaluation_engine(job))
            if part is not None and part.memory_flag:
                yield f"{section}.server.arguments.{part.memory_flag}"
    yield "trainer.micro_batch_tokens and rollout.max_model_len"
    options, given = load_part(job, "trainer.backend").Arguments.model_fields, trainer.backend_args
    if "recompute" in options and given.get("recompute") != "full":
        yield "trainer.backend_args.recompute"
    if trainer.resolved_dtype != "bfloat16":
        yield "trainer.dtype: bfloat16"
    if "offload_optimizer" in options and not given.get("offload_optimizer"):
        yield "trainer.backend_args.offload_optimizer: true"
    if not one:
        yield from ("trainer.parallel", "trainer.ranks")
    yield "trainer.lora.rank"


def _gpu(name: str | None, job: JobConfig) -> tuple[Gpu | None, int | None]:
    """Return the GPU that the user named, or otherwise the GPU that is visible to the trainer, if there is
    one. Also return the number of GPUs, if it is known."""
    if name is not None:
        number, model = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(.*)", name).groups()  # type: ignore[union-attr]
        if found := gpu_named(model):
            count = int(number) if number else None
            if count is not None and (mistakes := [*device_mistakes(job, count)]):
                raise ConfigError("the command line", mistakes)
            return found, count
        fix = f"Known are {', '.join(gpu.name for gpu in GPUS)}"
        raise ConfigError("the command line", [Mistake("--gpu", f"{name} is in no table", fix)])
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
        return None, None
    import torch

    if not torch.cuda.is_available():
        return None, None
    visible = torch.cuda.device_count()
    index = int(job.trainer.device.partition(":")[2] or 0)
    properties = torch.cuda.get_device_properties(min(index, visible - 1))
    gpu = gpu_of_device(properties.name, properties.total_memory)
    return gpu, None if [*device_mistakes(job, visible)] else visible


def _show(found: Mapping[str, Any], remedies: Sequence[str]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    ranks = "1 rank" if found["ranks"] == 1 else f"{found['ranks']} ranks"
    options = [f"{name}: {json.dumps(value)}" for name, value in found["backend_args"].items()]
    options += [f"{axis}: {size}" for axis, size in found["parallel"].items() if size > 1 and axis != "shard"]
    options += [f"lora of rank {found['lora_rank']}"] if found["lora_rank"] else []
    lines = [found["model"]]
    if found["shapes_of_config"]:
        lines.append("Its shapes are those of config.json: its safetensors files are not all there.")
    counted = f"{_count(found['parameters'])} parameters in {found['blocks']} blocks"
    lines.append(f"{counted}; {found['dtype']} on {ranks}")
    for name, further in found["further_models"].items():
        kind = "trained" if further["trained"] else "frozen"
        lines.append(f"{name}: {_count(further['parameters'])} parameters, {kind}")
    lines += [*_vision_lines(found["vision"])] if found["vision"] else []
    lines += [", ".join(options).replace('"', "")] if options else []
    console.print("\n".join(lines), markup=False)
    each = {name: _size(size) for name, size in found["bytes_per_rank"].items() if size}
    each |= {f"{name}, per token": f"{size / MIB:.3f} MiB" for name, size in found["bytes_per_token"].items()}
    tokens, gpu = found["longest_pass_tokens"], found.get("gpu")
    what = "micro-batch" if tokens == found["micro_batch_tokens"] else "row"
    each[f"peak of a {what} of {tokens:,} tokens"] = _size(found["peak_bytes"])
    if communication := found.get("communication"):
        link = communication["link"]
        speed = f"{LINKS[link] / 1e9:.0f} GB/s {link}"
        each[f"exchanged in a pass, at {speed}"] = f"{communication['seconds_per_pass']:.2f} s"
    host = {name: _size(size) for name, size in found["host_bytes"].items()}
    tables = [("each rank", [*each.items()]), ("the host of rank 0", [*host.items()])]
    tables += [_device_table(device) for device in found.get("devices", ()) if device["engines"]]
    for title, sizes in tables:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(min_width=46)
        table.add_column(justify="right", min_width=11)
        for name, size in sizes:
            table.add_row(f"  {name}", size)
        console.print(title, table, sep="\n")
    lines = ["No GPU is visible: name one with --gpu to see what fits."]
    if gpu is not None:
        usable = f"{gpu['name']}: {_size(gpu['usable_bytes'])} for the trainer's tensors"
        hopeless = any(each["field"] == "model" for each in found["mistakes"])
        lines = [usable, *_what_fits(gpu, tokens, what, () if hopeless else remedies)]
    lines += [f"- {each['field']}: {each['problem']}. {each['fix']}." for each in found["mistakes"]]
    if layers := found["uncounted_layers"]:
        lines.append(f"Not counted is what these layers of a block keep: {', '.join(layers)}.")
        lines.append("A pass takes more than is said here, and fewer tokens fit.")
    console.print("\n".join(lines), markup=False)


def _vision_lines(vision: Mapping[str, Any]) -> Iterator[str]:
    kind, work = "trained" if vision["trained"] else "frozen", vision["flops_per_token"]
    sizes = [f"{work[name] / 1e9:.2f} GFLOP" for name in work]
    yield f"vision tower: {_count(vision['parameters'])} parameters, {kind}"
    yield f"forward pass of a token of an image: {sizes[0]} in the tower, {sizes[1]} in the language model"
    if tokens := vision["largest_image_tokens"]:
        yield f"tokens of the largest image: {tokens:,}"


def _device_table(device: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Return the title and the lines of a GPU that engines use."""
    numbers = device["gpus"]
    title = f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {', '.join(map(str, numbers))}, each"
    lines = []
    if device["trainer"]:
        lines.append(("trainer, from its first step on", _size(device["trainer_bytes"]["peak"])))
    lines += [(f"reward model of {name}", _size(size)) for name, size in device["reward_models"].items()]
    for engine in device["engines"]:
        lines.append((engine["name"], _size(engine["total_bytes"])))
        lines += [(f"  {part}", _size(size)) for part, size in engine["bytes"].items() if size]
        at_once = f"{engine['longest_requests_at_once']} of {engine['slots']}"
        lines.append(("  longest requests at once, of its slots", at_once))
        lines.append(("  tokens of KV", f"{engine['kv_tokens']:,}"))
        lines.append(("  tokens of KV after a restart, at worst", f"{engine['least_kv_tokens']:,}"))
    return title, [*lines, ("remaining", _size(device["remaining_bytes"]))]


def _what_fits(gpu: Mapping[str, Any], tokens: int, what: str, remedies: Sequence[str]) -> Iterator[str]:
    fits: int = gpu["tokens_that_fit"]
    told = f"Micro-batches of up to {fits:,} tokens fit; the job's {what} of {tokens:,}"
    yield f"{told} does{' too' if gpu['fits'] else ' not'}." if fits else "The model does not fit."
    if not gpu["fits"] and remedies:
        yield f"Change one of these and plan again: {', '.join(remedies)}."


def _size(n_bytes: int) -> str:
    large = abs(n_bytes) >= GIB // 10 or not n_bytes
    return f"{n_bytes / GIB:.2f} GiB" if large else f"{n_bytes / MIB:.2f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2f} million"


if __name__ == "__main__":
    run_tool(PlanRequest, main)
