"""The parts of `gpu.py`, each run as a process of its own: `python -m gpu_parts NAME --out FILE …`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from memory import packed_rows, train_once

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.main import prepare
from areal_async.cli.quickstart.model import make_tokenizer
from areal_async.config.job import OptimizerSection
from areal_async.config.parallel import RankGrid
from areal_async.config.registry import BACKENDS
from areal_async.rpc.secret import RunSecret
from areal_async.trajectory import Sampling
from areal_async.weights.pieces import whole_piece
from areal_async.weights.snapshot import Companions, open_snapshot
from rollout_service.engines.base import GenerateRequest
from rollout_service.engines.local.engine import LocalEngine
from trainer_service.backends.base import TRAINED_MODEL, ModelUse, TrainingBackend
from trainer_service.backends.fsdp.memory import MemoryOptions, ModelShape, rank_memory, shape_of
from trainer_service.backends.megatron.memory import stage_memory
from trainer_service.durable_files import companion_files
from trainer_service.publishing.publisher import Publisher
from trainer_service.ranks import join_ranks
from trainer_service.tools.gpus import Gpu, gpu_of_device
from trainer_service.tools.plan import tensor_shapes

QWEN_1_5B = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
TINY = {**QWEN_1_5B, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "max_position_embeddings": 1024}
SAMPLED_SHARE = 0.75
"""Of a row's tokens: a long answer after a prompt."""
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Setting:
    """What a part is given. `note` keeps what was found so far on disk."""

    device: torch.device
    tiny: bool
    scratch: Path
    until_s: float
    out: Path
    found: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.scratch / "model"

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def note(self, **figures: Any) -> None:
        self.found.update(figures)
        whole = self.out.with_suffix(".part")
        whole.write_text(json.dumps(self.found))
        whole.replace(self.out)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds that `action` takes, the device's work included."""
        self.synchronize()
        begun_s = time.perf_counter()
        action()
        self.synchronize()
        return time.perf_counter() - begun_s

    def gpu(self) -> Gpu | None:
        if self.device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(self.device)
        return gpu_of_device(properties.name, properties.total_memory)

    def shape(self) -> ModelShape:
        return shape_of(json.loads((self.model / "config.json").read_text()), tensor_shapes(self.model))


def make_model(setting: Setting) -> None:
    """A random model with a tokenizer, made on the device, and what the device is."""
    config = transformers.Qwen2Config(**(TINY if setting.tiny else QWEN_1_5B), eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    with setting.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(setting.model)
    make_tokenizer().save_pretrained(setting.model)
    gpu = setting.gpu()
    size = 64 << 20 if setting.tiny else 1 << 30
    copied = torch.empty(size, dtype=torch.uint8, device=setting.device)
    other = torch.ones_like(copied)
    rates = [2 * size / setting.timed(lambda: copied.copy_(other)) for _ in range(8)]
    setting.note(
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=sys.version.split()[0],
        name=gpu.name if gpu else "cpu",
        memory_bytes=gpu.memory_bytes if gpu else None,
        bf16_flops=gpu.bf16_flops if gpu else None,
        bytes_per_s=gpu.bytes_per_s if gpu else None,
        copied_bytes_per_s=max(rates),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def flops_per_step(model: ModelShape, lengths: list[int], units: int) -> float:
    """Model FLOPs of forward and backward over rows of these lengths, of which `units` tokens are sampled.

    6 per weight of a product and token (2 forward, 4 backward), 6 · layers · query width · length² / length
    for the causal half of attention; see the sources in `gpu.py`."""
    tokens = sum(lengths)
    products = 6.0 * sum(block.size for block in model.blocks) * tokens
    head = 6.0 * model.vocabulary * model.hidden * units
    attention = sum(6.0 * block.width("q_proj.weight") for block in model.blocks)
    return products + head + attention * sum(length * length for length in lengths)


def train(setting: Setting, arguments: Mapping[str, Any], name: str = "fsdp") -> None:
    """Updates of micro-batches of 8k tokens in one row: rate, MFU, peak beside the plan's."""
    tokens = 256 if setting.tiny else 8192
    model = setting.shape()
    if name == "megatron":
        if setting.device.type != "cuda":
            setting.note(skipped="Megatron-Core computes on CUDA devices alone")
            return
        planned = stage_memory(model, MemoryOptions(compute_bytes=2, **arguments))
    else:
        planned = rank_memory(
            model, MemoryOptions(compute_bytes=2, on_host=setting.device.type == "cpu", **arguments)
        )
    device = str(setting.device)
    backend: TrainingBackend = BACKENDS.find(name)(
        {TRAINED_MODEL: ModelUse(setting.model, OptimizerSection(), 1000)},
        join_ranks(0, 1, device=device),
        dtype=torch.bfloat16,
        grid=RankGrid(),
        **arguments,
    )
    batches = [
        packed_rows(tokens, model.vocabulary, device, SAMPLED_SHARE, rows=1) for _ in range(MICRO_BATCHES)
    ]
    units = batches[0].n_units
    setting.note(tokens=tokens, units=units, planned_bytes=planned.peak(tokens, units))
    if setting.device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(setting.device)
    train_once(backend, batches)  # the moments are made here, and kernels are chosen
    took: list[float] = []
    while len(took) < (2 if setting.tiny else 12) and (not took or setting.left_s > 2 * took[-1]):
        took.append(setting.timed(lambda: train_once(backend, batches)))
        step_s = statistics.median(took)
        flops = MICRO_BATCHES * flops_per_step(model, [tokens], units) / step_s
        gpu = setting.gpu()
        setting.note(
            steps=len(took),
            step_s=step_s,
            tokens_per_s=MICRO_BATCHES * tokens / step_s,
            model_flops=flops,
            mfu=flops / gpu.bf16_flops if gpu and gpu.bf16_flops else None,
        )
    if setting.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(setting.device)
        setting.note(
            peak_bytes=peak,
            reserved_bytes=torch.cuda.max_memory_reserved(setting.device),
            planned_over_peak=planned.peak(tokens, units) / peak,
        )
    if setting.device.type == "cuda" and not arguments:
        setting.note(profile=profile_of(lambda: train_once(backend, batches)))


def profile_of(action: Callable[[], None]) -> list[list[Any]]:
    """[kernel, ms] of the kernels that take the most of the device's time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        action()
    averages = profiler.key_averages()
    ordered = sorted(averages, key=lambda event: -event.self_device_time_total)
    return [[event.key[:90], round(event.self_device_time_total / 1000, 3)] for event in ordered[:15]]


def engine_of(setting: Setting, slots: int, max_model_len: int) -> LocalEngine:
    return LocalEngine(
        setting.model,
        slots=slots,
        max_model_len=max_model_len,
        device=str(setting.device),
        dtype="float32" if setting.device.type == "cpu" else "bfloat16",
    )


@dataclass(frozen=True)
class Start:
    """The weights of a model directory, as an engine takes them."""

    tag: VersionTag
    tensors: Mapping[str, torch.Tensor]
    path: Path


def start_of(setting: Setting) -> Start:
    model = transformers.AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.bfloat16)
    dtype = torch.float32 if setting.device.type == "cpu" else torch.bfloat16
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    return Start(VersionTag("policy", 0, 0), tensors, setting.model)


def request(name: str, prompt: int, new: int) -> GenerateRequest:
    ids = np.random.default_rng(len(name)).integers(3, 16, prompt).astype(np.int32)
    return GenerateRequest(name, ids, Sampling(max_new_tokens=new, seed=len(name)))


async def decode(setting: Setting) -> None:
    """Tokens per second with 1 to 128 requests in flight, and what the bandwidth allows.

    A decoding step reads every weight of a product once, and the keys and values of every context."""
    prompt, new = (8, 8) if setting.tiny else (128, 256)
    model, gpu = setting.shape(), setting.gpu()
    table = model.vocabulary * model.hidden
    weights = 2 * (sum(block.size for block in model.blocks) + table)
    per_position = 2 * sum(2 * block.width("k_proj.weight") for block in model.blocks)
    bandwidth = gpu.bytes_per_s if gpu and gpu.bytes_per_s else None
    runs: list[dict[str, Any]] = []
    counts = (1, 4) if setting.tiny else (1, 8, 32, 128)
    engine = engine_of(setting, max(counts), prompt + new)
    await engine.start(start_of(setting))
    await engine.generate(request("warm", prompt, 4))
    for count in counts:
        if runs and setting.left_s < 4 * runs[-1]["took_s"]:
            break
        begun_s = time.perf_counter()
        calls = [engine.generate(request(f"{count}-{i}", prompt, new)) for i in range(count)]
        sampled = sum(len(result.token_ids) for result in await asyncio.gather(*calls))
        took_s = time.perf_counter() - begun_s
        step_bytes = weights + count * per_position * (prompt + new / 2)
        rate = sampled / took_s
        runs.append(
            {
                "in_flight": count,
                "tokens_per_s": rate,
                "took_s": took_s,
                "bytes_per_step": step_bytes,
                "roofline_tokens_per_s": count * bandwidth / step_bytes if bandwidth else None,
                "share_of_roofline": rate * step_bytes / count / bandwidth if bandwidth else None,
            }
        )
        setting.note(runs=runs)
    await engine.stop()


async def update(setting: Setting) -> None:
    """Publish the trained weights twice, and exchange those of an engine that generates."""
    prompt, new, flying = (8, 64, 2) if setting.tiny else (128, 1024, 16)
    engine = engine_of(setting, flying, prompt + new)
    start = start_of(setting)
    await engine.start(start)
    tensors = {name: tensor.to(setting.device) for name, tensor in start.tensors.items()}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    size = sum(tensor.nbytes for tensor in tensors.values())
    setting.note(bytes=size, copy_to_host_s=copy_to_host(setting, [*tensors.values()]))
    publisher = Publisher(
        setting.scratch / "snapshots",
        f"ipc://{setting.scratch}/weights",
        job="gpu",
        access=RunSecret(bytes(32)),
        companions=Companions(companion_files(setting.model, "bfloat16"), tied),
    )
    publisher.start()
    pieces = [whole_piece(name, tensor) for name, tensor in tensors.items()]
    publisher.prepare(pieces)
    calls = [asyncio.ensure_future(engine.generate(request(f"r{i}", prompt, new))) for i in range(flying)]
    updates: list[dict[str, float]] = []
    for version in range(1, 4):
        begun_s = time.perf_counter()
        setting.synchronize()
        publication = publisher.begin(VersionTag("policy", 1, version), pieces)
        blocked_s = time.perf_counter() - begun_s
        written = publication.result()
        published_s = time.perf_counter() - begun_s
        snapshot = await asyncio.to_thread(open_snapshot, written.path)
        verified_s = time.perf_counter() - begun_s
        paused_s = time.perf_counter()
        await engine.pause()
        await engine.load(snapshot)
        await engine.resume()
        stall_s = time.perf_counter() - paused_s
        updates.append(
            {
                "step_blocked_s": blocked_s,
                "published_s": published_s,
                "verify_s": verified_s - published_s,
                "stall_s": stall_s,
                "whole_s": time.perf_counter() - begun_s,
            }
        )
        setting.note(runs=updates, **updates[-1])
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await engine.stop()
    publisher.close()


def copy_to_host(setting: Setting, tensors: list[torch.Tensor]) -> float:
    """Seconds of a plain copy of the tensors into memory that was touched before."""
    host = [tensor.cpu() for tensor in tensors]
    return setting.timed(lambda: [kept.copy_(tensor) for kept, tensor in zip(host, tensors, strict=True)])


BUCKET_BYTES = 512 << 20


def nccl(setting: Setting) -> None:
    """Two processes on the one device broadcast buckets; NCCL may refuse two ranks on one GPU."""
    backend = "nccl" if setting.device.type == "cuda" else "gloo"
    meeting = setting.scratch / "meeting"
    command = [
        sys.executable,
        "-P",
        __file__,
        "nccl-receiver",
        "--out",
        str(setting.out.with_name("receiver")),
    ]
    command += [
        "--scratch",
        str(setting.scratch),
        "--device",
        str(setting.device),
        "--until",
        str(setting.until_s),
    ]
    receiver = subprocess.Popen(command + (["--tiny"] if setting.tiny else []))
    setting.note(backend=backend)
    try:
        broadcast(setting, 0, backend, meeting)
    finally:
        receiver.kill()
        receiver.wait()


def nccl_receiver(setting: Setting) -> None:
    backend = "nccl" if setting.device.type == "cuda" else "gloo"
    broadcast(setting, 1, backend, setting.scratch / "meeting")


def broadcast(setting: Setting, rank: int, backend: str, meeting: Path) -> None:
    """Note the bytes per second of broadcasts of a bucket from rank 0, after each the best so far."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if setting.device.type == "cuda":
        torch.cuda.set_device(setting.device)
    dist.init_process_group(backend, store=dist.FileStore(str(meeting), 2), rank=rank, world_size=2)
    bucket = torch.zeros(1 << 20 if setting.tiny else BUCKET_BYTES, dtype=torch.uint8, device=setting.device)
    dist.broadcast(bucket, src=0)
    least_s = float("inf")
    for _ in range(2 if setting.tiny else 8):
        least_s = min(least_s, setting.timed(lambda: dist.broadcast(bucket, src=0)))
        setting.note(bucket_bytes=bucket.nbytes, bytes_per_s=bucket.nbytes / least_s)
    dist.destroy_process_group()


def quickstart(setting: Setting) -> None:
    """Both jobs, trainer, engines and evaluation on the device; what there is when time is up counts."""
    files = setting.scratch / "quickstart-files"
    prepare(files, 0)
    device = str(setting.device)
    warm, train = ["trainer.steps=2"], ["trainer.steps=2", "evaluation.every_steps=1"]
    changes = {
        "warm_start.yaml": [
            f"trainer.device={device}",
            *(["sft.stop_between=null", *warm] if setting.tiny else []),
        ],
        "train.yaml": [
            f"trainer.device={device}",
            f"rollout.device={device}",
            *(train if setting.tiny else []),
        ],
    }
    for name, overrides in changes.items():
        command = [sys.executable, "-P", "-m", "areal_async.cli.main", "run", str(files / name), "--plain"]
        job = subprocess.Popen([*command, "--overwrite", *overrides, "observe.metrics_port=0"])
        begun_s = time.monotonic()
        try:
            job.wait(max(1.0, setting.left_s - 3))
        except subprocess.TimeoutExpired:
            setting.note(ended_early=name)
            job.send_signal(signal.SIGINT)
            job.wait()
        setting.note(**{f"{Path(name).stem}_s": time.monotonic() - begun_s})
        if job.returncode and "ended_early" not in setting.found:
            raise RuntimeError(f"{name} ended with status {job.returncode}")
        note_records(setting, setting.scratch / ("quickstart" if name == "train.yaml" else "quickstart-warm"))


def note_records(setting: Setting, run: Path) -> None:
    """Steps, tokens per second and held-out accuracy from the records of a run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    steps = [record for record in records if record["kind"] == "step"]
    if steps:
        seconds = sum(record["step_s"] for record in steps)
        setting.note(
            steps=len(steps),
            step_s=statistics.median(record["step_s"] for record in steps),
            tokens_per_s=sum(record["tokens"] for record in steps) / seconds,
            curve=[[r["version"], r["accuracy"]] for r in records if r["kind"] == "evaluation"],
        )


PARTS: dict[str, Callable[[Setting], Any]] = {
    "model": make_model,
    "train-none": lambda setting: train(setting, {}),
    "train-selective": lambda setting: train(setting, {"recompute": "selective"}),
    "train-full": lambda setting: train(setting, {"recompute": "full"}),
    "train-offload": lambda setting: train(setting, {"recompute": "full", "offload_optimizer": True}),
    "train-megatron": lambda setting: train(setting, {}, "megatron"),
    "decode": lambda setting: asyncio.run(decode(setting)),
    "update": lambda setting: asyncio.run(update(setting)),
    "nccl": nccl,
    "nccl-receiver": nccl_receiver,
    "quickstart": quickstart,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--until", type=float, required=True, help="on the clock of time.monotonic")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    device = torch.device(options.device)
    setting = Setting(device, options.tiny, options.scratch, options.until, options.out, {})
    try:
        PARTS[options.part](setting)
    except Exception as error:
        traceback.print_exc()
        setting.note(error=f"{type(error).__name__}: {error}"[:1000])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
