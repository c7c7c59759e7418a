"""Parts of `areal-async gpu check` that compute on a device: its rates, training steps on ragged groups,
and log-probs of a random model.

The rows are synthetic and have the form of GRPO on short maths problems: groups of 8 answers to one prompt,
with log-normal lengths. As in a job, the steps go through `Learner`: manifest, plan, checks, packing,
columns, objective, passes and the optimizer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from areal_async.cli.gpu_check import StepPart
from areal_async.cli.quickstart.model import CHARACTERS, EOS, PAD, UNKNOWN
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.rpc.messages import Batch, BatchEpisode, BatchGroup
from areal_async.trajectory import Call, EpisodeBuilder, Sampling, pack
from areal_async.trajectory.rows import row_profile, row_sizes
from trainer_service.backends.base import TRAINED_MODEL, Columns
from trainer_service.data.microbatch import build_micro_batch, plan_passes
from trainer_service.data.rows import row_of
from trainer_service.loop.learner import Learner, load_backend
from trainer_service.loop.step import StepResult
from trainer_service.ranks import Ranks, join_ranks
from trainer_service.tools.plan import GIB, job_memory

GROUP_SIZE = 8
TIMED_STEPS = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a step."""

    model: Mapping[str, int]
    groups: int
    longest_prompt: int
    median_answer: int
    longest_answer: int
    micro_batch_tokens: int


LARGE = Sizes(
    # The dimensions of Qwen3-1.7B.
    {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    groups=16,
    longest_prompt=256,
    median_answer=180,
    longest_answer=1024,
    micro_batch_tokens=8192,
)
SMALL = replace(
    LARGE,
    # The dimensions of Qwen3-0.6B.
    model={**LARGE.model, "hidden_size": 1024, "intermediate_size": 3072},
    micro_batch_tokens=4096,
)
TINY = Sizes(
    # vLLM's attention on a CPU takes no smaller heads.
    {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    groups=4,
    longest_prompt=32,
    median_answer=12,
    longest_answer=64,
    micro_batch_tokens=512,
)
SIZES = {"large": LARGE, "small": SMALL, "tiny": TINY}


def sizes_of(part: StepPart) -> Sizes:
    return SIZES[part.size]


def make_model(part: StepPart) -> dict[str, Any]:
    """Write a random model with a tokenizer whose vocabulary is the model's."""
    sizes = sizes_of(part).model
    config = Qwen3Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(part.device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    folder = part.folder / "model"
    model.save_pretrained(folder)
    signs = [PAD, EOS, UNKNOWN, *CHARACTERS]
    words = [f"<w{number}>" for number in range(sizes["vocab_size"] - len(signs))]
    vocabulary = {token: index for index, token in enumerate([*signs, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN
    ).save_pretrained(folder)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def measure_machine(part: StepPart) -> dict[str, Any]:
    """Return versions, the device's name, and the rates of a copy and of a bf16 product on the device."""
    device = torch.device(part.device)
    cuda = device.type == "cuda"
    size, width = (1 << 24, 512) if part.size == "tiny" else (1 << 30, 8192)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    source = torch.ones_like(target)
    copied_s = fastest_s(lambda: target.copy_(source), device)
    factor = torch.ones(width, width, dtype=torch.bfloat16, device=device)
    product_s = fastest_s(lambda: factor @ factor, device)
    found: dict[str, Any] = {
        "areal_async": version("areal-async"),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": torch.cuda.device_count() if cuda else 0,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "copied_bytes_per_s": 2 * size / copied_s,
        "bf16_flops_per_s": 2 * width**3 / product_s,
    }
    if cuda:
        found |= {
            "memory_gib": torch.cuda.get_device_properties(device).total_memory / GIB,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def fastest_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of eight runs, including the device's work."""
    best = float("inf")
    for _ in range(8):
        _wait(device)
        begun_s = time.perf_counter()
        action()
        _wait(device)
        best = min(best, time.perf_counter() - begun_s)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


LOGPROB_ROWS = (384, 256, 256, 127, 64, 33, 2)
"""Tokens of the rows whose log-probs are compared between devices."""


def step_job(part: StepPart) -> JobConfig:
    """Return the job whose step is measured: the preset `grpo` with two minibatches."""
    sizes = sizes_of(part)
    backend_args = {"recompute": "selective"} if part.device.startswith("cuda") else {}
    return load_job(
        {
            "job": "gpu-check-step",
            "model": str(part.folder / "model"),
            "run_dir": str(part.folder),
            "tasks": {"train": "tasks.jsonl"},
            "reward": {"name": "exact_match"},
            "rollout": {
                "group_size": GROUP_SIZE,
                "max_model_len": sizes.longest_prompt + sizes.longest_answer,
                "sampling": {"max_new_tokens": sizes.longest_answer},
            },
            "buffer": {"batch_groups": sizes.groups},
            "trainer": {
                "steps": TIMED_STEPS + 2,
                "minibatches": 2,
                "micro_batch_tokens": sizes.micro_batch_tokens,
                "objective": {"preset": "grpo"},
                "device": part.device,
                "dtype": part.dtype,
                "backend_args": backend_args,
            },
        },
        source="gpu check",
        base=part.folder,
        files=False,
    )


def ragged_batch(step: int, part: StepPart, vocabulary: int) -> tuple[Batch, dict[str, memoryview]]:
    """Return the manifest of a step and the bytes of its episodes by id. Answers have log-normal lengths with
    a median of 180 tokens, and log-probs near those of a random model."""
    rng, sizes = np.random.default_rng(step), sizes_of(part)
    blobs: dict[str, memoryview] = {}
    groups = []
    for number in range(sizes.groups):
        name, episodes = f"check:{number}#{step}", []
        prompt = rng.integers(
            0, vocabulary, int(rng.integers(sizes.longest_prompt // 4, sizes.longest_prompt))
        )
        for sample in range(GROUP_SIZE):
            length = int(np.clip(rng.lognormal(np.log(sizes.median_answer), 0.7), 1, sizes.longest_answer))
            builder = EpisodeBuilder("gpu-check-step", f"check:{number}", name, sample)
            builder.sampled(
                rng.integers(0, vocabulary, length),
                (-np.log(vocabulary) + 0.1 * rng.standard_normal(length)).astype(np.float32),
                step,
                parent=builder.prompt(prompt),
                call=Call(sampling=Sampling(max_new_tokens=sizes.longest_answer)),
            )
            episode = builder.build()
            blobs[episode.episode_id] = memoryview(pack(episode))
            oldest = newest = step
            rows = row_sizes(row_profile(episode), 0)
            facts = (episode.episode_id, sample, episode.n_units, episode.n_sampled, oldest, newest)
            episodes.append(BatchEpisode(*facts, reward=float(rng.integers(0, 2)), rows=rows))
        groups.append(BatchGroup(name, f"check:{number}", "check", episodes))
    return Batch("policy", 0, step, 0, groups), blobs


@dataclass
class TimedStep:
    """Figures of one step."""

    seconds: float
    result: StepResult
    mfu: float | None


class StepRunner:
    """Steps of one rank on synthetic batches."""

    def __init__(self, part: StepPart, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks
        self._job = step_job(part)
        self._backend = load_backend(self._job, ranks)
        self._learner = Learner(self._job, ranks, self._backend)
        self._vocabulary = vocabulary_of(part.folder / "model")
        self._step = 0

    def run(self) -> TimedStep:
        """Run the next step and wait for the device."""
        batch, blobs = ragged_batch(self._step, self._part, self._vocabulary)
        self._step += 1
        plan = self._learner.plan(batch, batch.step)
        _wait(self._ranks.device)
        begun_s = time.perf_counter()
        result = self._learner.train(batch, plan, blobs)
        _wait(self._ranks.device)
        took_s = time.perf_counter() - begun_s
        return TimedStep(took_s, result, self._learner.mfu(batch, result, took_s))


def vocabulary_of(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_bytes())["vocab_size"]
    return size


def measure_steps(part: StepPart, ranks: Ranks) -> dict[str, Any]:
    """Return figures of `TIMED_STEPS` steps after one that compiles and chooses kernels, and of one step
    under the profiler."""
    runner = StepRunner(part, ranks)
    cuda = ranks.device.type == "cuda"
    first = runner.run()
    if cuda:
        torch.cuda.reset_peak_memory_stats(ranks.device)
    timed = [runner.run() for _ in range(TIMED_STEPS)]
    seconds = statistics.median(each.seconds for each in timed)
    utilization = [each.mfu for each in timed if each.mfu is not None]
    last = timed[-1].result
    found: dict[str, Any] = {
        "first_step_s": first.seconds,
        "step_s": seconds,
        "tokens_per_s": last.packed_tokens / seconds,
        "mfu": statistics.median(utilization) if utilization else None,
        "loss_is_finite": not any(each.result.not_finite for each in (first, *timed)),
        "micro_batches": last.micro_batches,
    }
    if cuda:
        _, memory = job_memory(step_job(part))
        tokens = sizes_of(part).micro_batch_tokens
        planned = memory.peak(tokens, tokens)
        peak = torch.cuda.max_memory_allocated(ranks.device)
        found |= {"peak_gib": peak / GIB, "planned_gib": planned / GIB, "peak_over_plan": peak / planned}
    return found | _profile_of_step(runner, cuda, layers_of(part.folder / "model"))


def layers_of(model: Path) -> int:
    layers: int = json.loads((model / "config.json").read_bytes())["num_hidden_layers"]
    return layers


def _profile_of_step(runner: StepRunner, cuda: bool, layers: int) -> dict[str, Any]:
    """Run a step for its synchronisations and one for its kernels. The counts are None on a CPU."""
    if not cuda:
        runner.run()
        return {"syncs_per_micro_batch": None, "launches_per_layer": None, "attention_shapes": None}
    step, syncs = syncs_of(runner.run)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        runner.run()
    events = profiler.events() or []
    kernels = Counter(event.name for event in events if is_kernel(event))
    shapes = {str(event.input_shapes) for event in events if "attention_forward" in event.name}
    plans = {str(event.input_shapes) for event in events if "cudnn_attention" in event.name}
    slowest = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)[:12]
    # A micro-batch has a pass for proximal log-probs and one with gradient.
    passes = max(1, step.result.micro_batches)
    return {
        "syncs_per_micro_batch": sum(syncs.values()) / passes,
        "sync_places": dict(syncs.most_common(12)),
        "launches_per_layer": sum(kernels.values()) / (passes * layers),
        "attention_shapes": len(shapes),
        "cudnn_plans": len(plans),
        "slowest_kernels_ms": {event.key[:90]: event.self_device_time_total / 1000 for event in slowest},
    }


def is_kernel(event: Any) -> bool:
    """Return whether a profiled event is a kernel on the device, not a copy or a fill."""
    on_device = event.device_type == torch.autograd.DeviceType.CUDA
    return on_device and not event.name.startswith(("Memcpy", "Memset", "ProfilerStep"))


def syncs_of(run: Callable[[], TimedStep]) -> tuple[TimedStep, Counter[str]]:
    """Return the result of `run`, and the number of waits for the GPU at each place of the code."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    told = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    return found, Counter(f"{Path(each.filename).name}:{each.lineno}" for each in told)


def measure_logprobs(part: StepPart, ranks: Ranks) -> dict[str, Any]:
    """Write the log-probs of synthetic rows to `logprobs-<device>.npy`, f64 [units]."""
    rng = np.random.default_rng(7)
    vocabulary = vocabulary_of(part.folder / "model")
    rows = []
    for number, length in enumerate(LOGPROB_ROWS):
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        mask, zeros = np.ones(length, np.uint8), np.zeros(length, np.int32)
        mask[0] = 0
        row = row_of(number, ids, mask, zeros.astype(np.float32), zeros)
        assert row is not None
        rows.append(row)
    backend = load_backend(step_job(part), ranks, policy_alone=True)
    chosen = [each for each in plan_passes(rows, ranks, sizes_of(part).micro_batch_tokens) if each]
    batches = [build_micro_batch(each, device=ranks.device) for each in chosen]

    def column(index: int, columns: Columns) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return batches[index].episode.cpu().numpy(), columns["logp"].double().cpu().numpy()

    found = backend.evaluate(TRAINED_MODEL, batches, column)
    episode, values = (np.concatenate(each) for each in zip(*found, strict=True))
    values = values[np.argsort(episode, kind="stable")]
    name = f"logprobs-{part.device.partition(':')[0]}.npy"
    np.save(part.folder / name, values)
    return {"units": len(values), "file": name}


ALONE: Mapping[str, Callable[[StepPart], dict[str, Any]]] = {"machine": measure_machine, "model": make_model}
ON_RANK: Mapping[str, Callable[[StepPart, Ranks], dict[str, Any]]] = {
    "steps": measure_steps,
    "logprobs": measure_logprobs,
}


def main() -> None:
    part = msgspec.json.decode(sys.argv[1], type=StepPart, dec_hook=lambda kind, value: kind(value))
    disable_progress_bar()
    if part.measure in ALONE:
        found = ALONE[part.measure](part)
    else:
        found = ON_RANK[part.measure](part, join_ranks(0, 1, device=part.device))
    part.out.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
