"""Everything that a job has on each GPU, in the order of its start: ranks of the trainer, reward models,
engines.

A server's share of a GPU depends on what is there when the server starts, so `gpu_plans` follows the start.

1. A rank of the trainer loads its models. It has no gradients and moments until its first step.
2. Reward models load, then engines: those of the rollout, then the evaluation's. All of them may load at
   once.
3. The trainer steps and then keeps its peak, because torch's allocator does not give memory back.

Each server holds most if it starts in this order, and this is what the GPU must have room for. A server has
the least KV in the worse of two cases: the others on the GPU load while it loads, or it starts again once
all of the others have all of their memory.

If engines and trainer take turns on a GPU (`placement.share: time`), they do not add up. While the trainer
steps, sleeping servers keep their graphs and contexts. While they sample, the trainer keeps its
parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_async.base.mistakes import Mistake
from areal_async.config.devices import device_mistakes, engine_gpus, evaluation_rollout, trainer_gpus
from areal_async.config.engine_memory import CONTEXT_BYTES, GIB, EngineMemory, MemoryRule, Served
from areal_async.config.engines import EnginePart, declared_engine, parallel_width, server_flags
from areal_async.config.job import JobConfig
from areal_async.config.rewardcheck import asked, part_of, with_those_inside
from areal_async.config.rollout import RolloutSection
from trainer_service.backends.fsdp.memory import MemoryOptions, ModelShape, rank_memory, shape_of
from trainer_service.tools.gpus import Gpu

Shapes = Callable[[Path], Mapping[str, tuple[int, ...]]]


PARTS = ("weights", "kv", "graphs", "activations", "context")
MOST_GPUS = 4096  # Number of GPUs if it does not matter


@dataclass(frozen=True)
class PlannedEngine:
    """An engine of a job, and the section of the job file that describes it."""

    name: str
    section: str
    part: EnginePart
    served: Served


@dataclass
class Tenants:
    """The processes on one GPU."""

    trainer: str = ""
    rewards: dict[str, int] = field(default_factory=dict)
    """Bytes of each reward model."""
    engines: list[PlannedEngine] = field(default_factory=list)


@dataclass(frozen=True)
class TrainerBytes:
    """Memory of one rank of the trainer."""

    loaded: int
    """Memory after its start."""
    peak: int
    """Memory from its first step on."""


def tenants_of(job: JobConfig, model: ModelShape, shapes: Shapes, count: int) -> list[Tenants]:
    """Return the processes on each of `count` GPUs. Raises `ValueError` if there are too few."""
    gpus = [Tenants() for _ in range(count)]
    for rank, gpu in enumerate(trainer_gpus(job)):
        gpus[gpu].trainer = f"trainer-{rank}" if rank else "trainer"
    if job.kind != "rl":
        return gpus
    rollout, evaluation = job.rollout, evaluation_rollout(job)
    workers = [(worker, n) for worker in range(rollout.workers) for n in range(rollout.replicas)]
    places: list[tuple[str, str, RolloutSection, int, int | None, int]] = [
        ("rollout", f"rollout-{worker}", rollout, rollout.max_concurrent, worker, n) for worker, n in workers
    ]
    if job.tasks.evaluation is not None and not takes_turns(job):
        places.append(("evaluation", "evaluator", evaluation, job.evaluation.max_concurrent, None, 0))
    for section, name, its, slots, worker, replica in places:
        part = declared_engine(its.engine)
        if part is not None and part.memory is not None and not its.server.urls:
            engine = PlannedEngine(name, section, part, served_by(part, its, model, slots))
            for gpu in engine_gpus(job, worker=worker, replica=replica, visible=count):
                gpus[gpu].engines.append(engine)
    for name, device, size in _reward_models(job, shapes):
        free = (n for n, gpu in enumerate(gpus) if not gpu.trainer and not gpu.engines)
        own = next(free, 0) if job.placement.reward.gpus else 0
        if (at := int(device.partition(":")[2] or own)) >= count:
            few = f"GPUs are planned up to {count - 1}: name more with --gpu"
            raise ValueError(f"{name} is on {device}, and {few}")
        gpus[at].rewards[name] = size
    return gpus


def takes_turns(job: JobConfig) -> bool:
    """Return whether the trainer and the engines take turns on their GPUs."""
    return job.placement.share == "time"


def served_by(part: EnginePart, rollout: RolloutSection, model: ModelShape, slots: int) -> Served:
    """Return the model as one GPU of this engine serves it.

    Tensor ranks divide the heads of keys and values. If there are fewer heads, each rank has one. Latent
    attention (MLA) keeps one vector per token and layer, which all tensor ranks have."""
    flags = server_flags(rollout)
    tensor, ranks = (parallel_width(flags, part.parallel_flags[:n]) for n in (1, 2))
    c = 4 if rollout.resolved_dtype == "float32" else 2
    kv_bytes = 1 if "fp8" in str(flags.get("kv-cache-dtype")) else c
    kv = wide = 0
    for block in model.blocks:
        latent, keys = block.width("kv_a_proj_with_mqa.weight"), block.width("k_proj.weight")
        kv += latent or 2 * keys * max(1, block.kv_heads // tensor) // block.kv_heads
        gate, routed = block.width("mlp.gate_proj.weight"), block.width("experts.gate_proj.weight")
        chosen = block.experts_per_token * (routed > 0)
        widest = max(3 * gate, 3 * chosen * routed, block.width("q_proj.weight") + 2 * keys)
        wide = max(wide, widest // tensor + (4 + chosen) * model.hidden)
    weights, kv_token = c * model.size // ranks, kv_bytes * kv * tensor // ranks
    tower = next((shape[0] for name, shape in model.tower.items() if "patch_emb" in name), 0)
    longest = rollout.max_model_len
    return Served(weights, kv_token, c * wide, model.vocabulary, slots, longest, flags, ranks, tower)


def _reward_models(job: JobConfig, shapes: Shapes) -> Iterator[tuple[str, str, int]]:
    """Yield field, device and bytes of each model that the reward service has on a GPU. A model that is not a
    folder here is left out."""
    for where, section in asked(job.reward):
        for place, name, given in with_those_inside(where, section.name, section.args):
            if (on_gpu := getattr(part_of(name), "on_gpu", None)) is None:
                continue
            device, folder, dtype, tokens = on_gpu(given)
            if device.startswith(("auto", "cuda")) and (folder / "config.json").is_file():
                config = json.loads((folder / "config.json").read_bytes())
                saved = config.get("dtype", config.get("torch_dtype")) if dtype == "auto" else dtype
                options = MemoryOptions(compute_bytes=4 if saved == "float32" else 2, frozen=True)
                rank = rank_memory(shape_of(config, shapes(folder), "value"), options)
                yield place, device, CONTEXT_BYTES + rank.parameters + rank.passing_per_token * tokens


def gpu_plans(
    job: JobConfig, model: ModelShape, shapes: Shapes, trainer: TrainerBytes, gpu: Gpu, count: int | None
) -> tuple[list[dict[str, Any]], list[Mistake]]:
    """Return what is on the job's GPUs, with one entry for all GPUs that have the same, and the engines that
    would not start.

    `count` is the number of GPUs. If it is None, a job that is valid on one GPU has one, and another job has
    as many as it needs. Raises `ValueError`."""
    count = count or (MOST_GPUS if [*device_mistakes(job, 1)] else 1)
    plans: dict[str, dict[str, Any]] = {}
    mistakes: dict[str, Mistake] = {}
    for index, tenants in enumerate(tenants_of(job, model, shapes, count)):
        if tenants == Tenants():
            continue
        found, wrong = _gpu_plan(tenants, trainer, gpu, turns=takes_turns(job))
        names = [engine.section for engine in tenants.engines], [*tenants.rewards]
        same = plans.setdefault(repr((bool(tenants.trainer), *names)), found | {"gpus": []})
        same["gpus"].append(index)
        mistakes |= {mistake.field: mistake for mistake in wrong}
    return [*plans.values()], [*mistakes.values()]


def _gpu_plan(
    tenants: Tenants, trainer: TrainerBytes, gpu: Gpu, *, turns: bool
) -> tuple[dict[str, Any], list[Mistake]]:
    loaded, peak = (trainer.loaded, trainer.peak) if tenants.trainer else (0, 0)
    if turns and tenants.trainer:
        loaded = CONTEXT_BYTES  # the trainer's state is in host memory while engines start
    size, rewards = gpu.memory_bytes, sum(tenants.rewards.values())
    base = free = size - loaded - rewards
    started: list[tuple[PlannedEngine, MemoryRule, int, EngineMemory]] = []
    for engine in tenants.engines:
        rule = engine.part.memory
        assert rule is not None  # see `tenants_of`
        memory = rule(engine.served, size, free, 0)
        started.append((engine, rule, free, memory))
        free -= memory.total
    held = base - free
    servers: list[dict[str, Any]] = []
    mistakes: list[Mistake] = []
    for engine, rule, at_start, memory in started:
        others, grown = held - memory.total, 0 if turns else peak - loaded
        cases = {
            "in its turn": memory,
            "if the other engines on the GPU load at the same time": rule(engine.served, size, base, others),
            "again, once the others have all of their memory": rule(
                engine.served, size, base - grown - others, 0
            ),
        }
        least = min(_tokens(engine, each) for each in cases.values())
        servers.append(_server(engine, memory) | {"free_at_start_bytes": at_start, "least_kv_tokens": least})
        mistakes += _refused(engine, cases)
    asleep = sum(memory.asleep for *_, memory in started)
    beside = rewards + (asleep if turns else held)
    used = max(peak + beside, size - free if turns else 0)
    return {
        "trainer": tenants.trainer,
        "trainer_bytes": {"at_start": loaded, "peak": peak},
        "reward_models": tenants.rewards,
        "engines": servers,
        "beside_trainer_bytes": beside,
        "used_bytes": used,
        "remaining_bytes": size - used,
    }, mistakes


def _tokens(engine: PlannedEngine, memory: EngineMemory) -> int:
    return max(0, memory.kv) // max(1, engine.served.kv_token)


def _server(engine: PlannedEngine, memory: EngineMemory) -> dict[str, Any]:
    tokens, served = _tokens(engine, memory), engine.served
    return {
        "name": engine.name,
        "section": engine.section,
        "bytes": {part: getattr(memory, part) for part in PARTS},
        "total_bytes": memory.total,
        "kv_tokens": tokens,
        "slots": served.slots,
        "longest_requests_at_once": min(served.slots, tokens // served.max_tokens),
    }


def _refused(engine: PlannedEngine, cases: Mapping[str, EngineMemory]) -> Iterator[Mistake]:
    """Yield the mistake of an engine that would not start, or with too little KV for one request of full
    length."""
    part, section, needed = engine.part, f"{engine.section}.server.arguments", engine.served.max_tokens
    bad = {case: each for case, each in cases.items() if not each.starts or _tokens(engine, each) < needed}
    for case, memory in [*bad.items()][:1]:
        if not part.memory_flag:
            problem = (
                f"{engine.name} needs {memory.total / GIB:.1f} GiB, {memory.share:.1f} times what is free"
            )
            yield Mistake(f"{engine.section}.max_concurrent", problem, "Lower it, or rollout.max_model_len")
            return
        why = (
            f"{max(0, memory.kv) / GIB:.1f} GiB are left for KV, which hold {_tokens(engine, memory):,} of "
            f"the {needed:,} tokens of rollout.max_model_len"
        )
        if memory.share > memory.most:
            why = f"no more than {math.floor(100 * max(0.0, memory.most)) / 100:g} is free for it"
        fix = f"Give each engine on the GPU a KV of its own size ({section}.{part.kv_flag})"
        least = math.ceil(100 * max(each.least for each in cases.values())) / 100
        if memory.share < least <= min(each.most for each in cases.values()):
            fix += f", or set it to {least:g} and plan again"
        problem = f"with {memory.share:g}, {engine.name} does not start {case}: {why}"
        yield Mistake(f"{section}.{part.memory_flag}", problem, fix)
