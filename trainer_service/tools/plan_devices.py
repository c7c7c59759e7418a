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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_async.base.mistakes import Mistake
from areal_async.config.devices import engine_gpus, evaluation_rollout, gpus_needed, trainer_gpus
from areal_async.config.engine_memory import CONTEXT_BYTES, GIB, EngineMemory, Served
from areal_async.config.engines import EnginePart, declared_engine, parallel_width, server_flags
from areal_async.config.job import JobConfig
from areal_async.config.rewardcheck import asked, part_of, with_those_inside
from areal_async.config.rollout import RolloutSection
from trainer_service.backends.fsdp.memory import MemoryOptions, ModelShape, rank_memory, shape_of
from trainer_service.tools.gpus import Gpu

Shapes = Callable[[Path], Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class PlannedEngine:
    """An engine of a job, and the section of the job file with its flags."""

    name: str
    section: str
    part: EnginePart
    served: Served
    flags: Mapping[str, Any]

    def on(self, gpu: Gpu, free: int, grown: int = 0) -> EngineMemory | None:
        return self.part.memory(self.served, self.flags, gpu=gpu.memory_bytes, free=free, grown=grown)


@dataclass
class Tenants:
    """The processes on one GPU."""

    trainer: str = ""
    rewards: tuple[tuple[str, int], ...] = ()
    engines: tuple[PlannedEngine, ...] = ()


@dataclass(frozen=True)
class TrainerBytes:
    """Memory of one rank of the trainer."""

    loaded: int
    """After its start."""
    peak: int
    """From its first step on."""


def tenants_of(job: JobConfig, model: ModelShape, shapes: Shapes, count: int) -> list[Tenants]:
    """Return the processes on each of `count` GPUs. Raises `ValueError` if there are too few."""
    gpus = [Tenants() for _ in range(count)]
    for rank, gpu in enumerate(trainer_gpus(job)):
        gpus[gpu].trainer = f"trainer-{rank}" if rank else "trainer"
    if job.kind != "rl":
        return gpus
    for name, device, size in _reward_models(job, shapes):
        # With GPUs of its own, the reward service has them behind all others.
        at = int(device.partition(":")[2] or (count - 1 if job.placement.reward.gpus else 0))
        if at >= count:
            raise ValueError(f"{name} is on {device}, and there are {count} GPUs")
        gpus[at].rewards += ((name, size),)
    rollout = job.rollout
    places: list[tuple[str, str, RolloutSection, int | None, int]] = []
    if not rollout.server.urls:
        each = [(worker, n) for worker in range(rollout.workers) for n in range(rollout.replicas)]
        places = [("rollout", f"rollout-{worker}", rollout, worker, n) for worker, n in each]
    evaluation = evaluation_rollout(job)
    if job.tasks.evaluation is not None and not evaluation.server.urls and not takes_turns(job):
        places.append(("evaluation", "evaluator", evaluation, None, 0))
    for section, name, its, worker, replica in places:
        slots = rollout.max_concurrent if worker is not None else job.evaluation.max_concurrent
        part = declared_engine(its.engine)
        if part is None:
            continue
        engine = PlannedEngine(name, section, part, served_by(part, its, model, slots), server_flags(its))
        for gpu in engine_gpus(job, worker=worker, replica=replica, visible=count):
            gpus[gpu].engines += (engine,)
    return gpus


def takes_turns(job: JobConfig) -> bool:
    """Return whether the trainer and the engines take turns on their GPUs."""
    return getattr(job.placement, "share", "") == "time"


def served_by(part: EnginePart, rollout: RolloutSection, model: ModelShape, slots: int) -> Served:
    """Return the model as one GPU of this engine serves it.

    Tensor ranks divide the heads of keys and values. If there are fewer heads, each rank has one. Latent
    attention (MLA) keeps one vector per token and layer, which all tensor ranks have."""
    flags = server_flags(rollout)
    tensor, ranks = (parallel_width(flags, part.parallel_flags[:n]) for n in (1, 2))
    c = 4 if rollout.dtype == "float32" else 2
    kv_bytes = 1 if "fp8" in str(flags.get("kv-cache-dtype")) else c
    kv = wide = 0
    for block in model.blocks:
        latent, keys = block.width("kv_a_proj_with_mqa.weight"), block.width("k_proj.weight")
        kv += latent or 2 * keys * max(1, block.kv_heads // tensor) // block.kv_heads
        chosen = block.experts_per_token * (block.width("experts.gate_proj.weight") > 0)
        widths = 3 * block.width("mlp.gate_proj.weight"), block.width("q_proj.weight") + 2 * keys
        routed = chosen * 3 * block.width("experts.gate_proj.weight")
        wide = max(wide, max(*widths, routed) // tensor + (4 + chosen) * model.hidden)
    return Served(
        weights=c * model.size // ranks,
        kv_token=kv_bytes * kv * tensor // ranks,
        token=c * wide,
        vocabulary=model.vocabulary,
        slots=slots,
        max_tokens=rollout.max_model_len,
    )


def _reward_models(job: JobConfig, shapes: Shapes) -> Iterator[tuple[str, str, int]]:
    """Yield field, device and bytes of each model that the reward service has on a GPU. A model that is not a
    folder here is left out."""
    for field, section in asked(job.reward):
        for where, name, given in with_those_inside(field, section.name, section.args):
            on_gpu = getattr(part_of(name), "on_gpu", None)
            found = on_gpu(given) if on_gpu is not None else None
            if found is None or not (Path(found[1]) / "config.json").is_file():
                continue
            device, folder, dtype, tokens = found[0], Path(found[1]), found[2], found[3]
            config = json.loads((folder / "config.json").read_bytes())
            saved = config.get("dtype", config.get("torch_dtype", "bfloat16")) if dtype == "auto" else dtype
            options = MemoryOptions(compute_bytes=4 if saved == "float32" else 2, frozen=True)
            rank = rank_memory(shape_of(config, shapes(folder), "value"), options)
            yield where, device, CONTEXT_BYTES + rank.parameters + rank.passing_per_token * tokens


def gpu_plans(
    job: JobConfig, model: ModelShape, shapes: Shapes, trainer: TrainerBytes, gpu: Gpu, count: int | None
) -> tuple[list[dict[str, Any]], list[Mistake]]:
    """Return what is on the job's GPUs, with one entry for all GPUs that have the same, and the engines that
    would not start. `count` is the number of GPUs, None if it is not known. Raises `ValueError`."""
    if count is None:
        named = [int(device.partition(":")[2] or 0) + 1 for _, device, _ in _reward_models(job, shapes)]
        count = max(gpus_needed(job) + bool(job.placement.reward.gpus), *named, 1)
    plans: dict[str, dict[str, Any]] = {}
    mistakes: dict[str, Mistake] = {}
    for index, tenants in enumerate(tenants_of(job, model, shapes, count)):
        if not (tenants.trainer or tenants.rewards or tenants.engines):
            continue
        found, wrong = _gpu_plan(tenants, trainer, gpu, turns=takes_turns(job))
        names = [engine.section for engine in tenants.engines], [name for name, _ in tenants.rewards]
        same = plans.setdefault(repr((bool(tenants.trainer), *names)), found | {"gpus": []})
        same["gpus"].append(index)
        mistakes |= {mistake.field: mistake for mistake in wrong}
    return [*plans.values()], [*mistakes.values()]


def _gpu_plan(
    tenants: Tenants, trainer: TrainerBytes, gpu: Gpu, *, turns: bool
) -> tuple[dict[str, Any], list[Mistake]]:
    loaded, peak = (trainer.loaded, trainer.peak) if tenants.trainer else (0, 0)
    rewards = sum(size for _, size in tenants.rewards)
    base = free = gpu.memory_bytes - loaded - rewards
    started: list[tuple[PlannedEngine, int, EngineMemory]] = []
    for engine in tenants.engines:
        if (memory := engine.on(gpu, free)) is not None:
            started.append((engine, free, memory))
            free -= memory.total
    held = base - free
    servers: list[dict[str, Any]] = []
    mistakes: list[Mistake] = []
    for engine, at_start, memory in started:
        others, grown = held - memory.total, 0 if turns else peak - loaded
        cases = {
            "in its turn": memory,
            "if the other engines on the GPU load at the same time": engine.on(gpu, base, others),
            "again, once the others have all of their memory": engine.on(gpu, base - grown - others),
        }
        known = {case: each for case, each in cases.items() if each is not None}
        servers.append(_server(engine, at_start, memory, min(known.values(), key=lambda each: each.kv)))
        mistakes += _refused(engine, known)
    asleep = sum(memory.asleep for _, _, memory in started)
    remaining = gpu.memory_bytes - rewards - peak - (asleep if turns else held)
    return {
        "trainer": tenants.trainer,
        "trainer_bytes": {"at_start": loaded, "peak": peak},
        "reward_models": dict(tenants.rewards),
        "engines": servers,
        "beside_trainer_bytes": gpu.memory_bytes - peak - remaining,
        "used_bytes": gpu.memory_bytes - (min(remaining, free) if turns else remaining),
        "remaining_bytes": min(remaining, free) if turns else remaining,
    }, mistakes


def _tokens(engine: PlannedEngine, memory: EngineMemory) -> int:
    return max(0, memory.kv) // max(1, engine.served.kv_token)


def _server(engine: PlannedEngine, free: int, memory: EngineMemory, least: EngineMemory) -> dict[str, Any]:
    parts = {name: getattr(memory, name) for name in ("weights", "kv", "graphs", "activations", "context")}
    tokens, fewest, served = _tokens(engine, memory), _tokens(engine, least), engine.served
    return {
        "name": engine.name,
        "section": engine.section,
        "free_at_start_bytes": free,
        "bytes": parts,
        "total_bytes": memory.total,
        "kv_tokens": tokens,
        "least_kv_tokens": fewest,
        "slots": served.slots,
        "longest_answers_at_once": min(served.slots, tokens // served.max_tokens),
        "least_longest_answers_at_once": min(served.slots, fewest // served.max_tokens),
    }


def _refused(engine: PlannedEngine, cases: Mapping[str, EngineMemory]) -> Iterator[Mistake]:
    """Yield the mistake of an engine that would not start, or with too little KV for one request of full
    length."""
    flag, section = engine.part.memory_flag, f"{engine.section}.server.arguments"
    needed = engine.served.max_tokens
    for case, memory in cases.items():
        if memory.starts and _tokens(engine, memory) >= needed:
            continue
        if not flag:
            problem = f"{engine.name} needs {memory.total / GIB:.1f} GiB, {memory.share:.1f} times what is free"
            yield Mistake(f"{engine.section}.max_concurrent", problem, "Lower it, or rollout.max_model_len")
            return
        least = math.ceil(100 * max(each.least for each in cases.values())) / 100
        most = min(each.most for each in cases.values())
        fix = f"Give each engine on the GPU a KV of its own size ({section}.{engine.part.kv_flag})"
        if memory.share < least <= most:
            fix += f", or set it to {least:g} and plan again"
        why = f"no more than {math.floor(100 * max(0.0, memory.most)) / 100:g} is free for it"
        if memory.share <= memory.most:
            why = (
                f"{max(0, memory.kv) / GIB:.1f} GiB are left for KV, which hold "
                f"{_tokens(engine, memory):,} of the {needed:,} tokens of rollout.max_model_len"
            )
        problem = f"with {memory.share:g}, {engine.name} does not start {case}: {why}"
        yield Mistake(f"{section}.{flag}", problem, fix)
        return
