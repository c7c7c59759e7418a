"""Assignment of GPUs to the trainer's ranks, the rollout's engines and the evaluation's engine. The caller
passes the number of visible GPUs.

GPUs are counted from 0, as a process sees them. A rank of the trainer takes one GPU. An engine takes `width`
GPUs. The width is 1, or for a server the product of the parallel sizes in `rollout.server.arguments`.

- `cpu`: no GPU.
- `cuda:N`: exactly GPU N and the GPUs after it (`trainer.ranks`, or the engine's width), even if other
  processes already use them. Several processes can thus share a GPU. All engines of `rollout.workers` share
  the GPUs of their `cuda:N`.
- `cuda`: the trainer's ranks take the GPUs from 0 on. The engines take the other GPUs in order, `width` GPUs
  each: engine k starts at position width · k. Workers come in the order of their numbers, each with its
  replicas. The evaluation's engine comes after all of `rollout.workers`.

A job must find enough GPUs without using a GPU twice, with three exceptions. If only one GPU is visible, all
processes use it. After the last GPU, the evaluation's engine and workers that join later start again at the
engines' first GPU. On a host without the trainer, the engines take all GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

from areal_async.base.mistakes import Mistake
from areal_async.config.engines import declared_engine, evaluation_engine
from areal_async.config.job import JobConfig
from areal_async.config.rollout import RolloutSection, ServerSection

MANY = 1 << 20  # Number of visible GPUs if it does not matter


def width_of(rollout: RolloutSection) -> int:
    """Return the number of GPUs of one engine. Return 1 if the engine is in a user's file that has not been
    run yet."""
    part = declared_engine(rollout.engine)
    return part.width(rollout) if part is not None else 1


def first_threads(torch_threads: int | Literal["auto"]) -> int:
    """Return the number of CPU threads of a rank or an engine at its start."""
    return 1 if torch_threads == "auto" else torch_threads


def rank_device(device: str, rank: int) -> str:
    """Return torch's name of the device of one rank. `device` is `trainer.device`."""
    kind, _, number = device.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(number or 0) + rank}"


def trainer_gpus(job: JobConfig) -> range:
    """Return the GPUs of the trainer, one per rank in order. Does not check that they are visible."""
    kind, _, number = job.trainer.device.partition(":")
    first = int(number or 0)
    return range(first, first + job.trainer.ranks) if kind == "cuda" else range(0)


def evaluation_rollout(job: JobConfig) -> RolloutSection:
    """Return the section `rollout` for the evaluation's engine, with the fields of `evaluation`."""
    section, rollout = job.evaluation, job.rollout
    # The rollout has attached servers for itself: an engine holds only one version.
    server = rollout.server.model_copy(update={"urls": ()})
    server = section.server if section.server != ServerSection() else server
    arguments = section.engine_args or (rollout.engine_args if section.engine == "same" else {})
    changes = {"engine": evaluation_engine(job), "engine_args": arguments, "server": server}
    return rollout.model_copy(update=changes | {"device": section.device or rollout.device})


def engine_gpus(
    job: JobConfig, *, worker: int | None, replica: int, visible: int, beside_trainer: bool = True
) -> tuple[int, ...]:
    """Return the GPUs of one engine, from 0 to `visible` - 1; on a CPU, return none. `worker` is the worker's
    number, or None for the evaluation's engine. `beside_trainer` is False on a host without the trainer.
    Raises `ValueError` for GPUs that do not exist."""
    rollout = job.rollout if worker is not None else evaluation_rollout(job)
    kind, _, number = rollout.device.partition(":")
    width = width_of(rollout)
    if kind == "cpu":
        return ()
    if number:
        if (needed := int(number) + width) > visible:
            raise ValueError(_too_few(rollout.device, width, needed, visible))
        return tuple(range(int(number), needed))
    free = _free(job, visible, beside_trainer)
    if width > len(free):
        raise ValueError(_too_few(rollout.device, width, width + visible - len(free), visible))
    first = (worker * rollout.replicas + replica) * width if worker is not None else _of_workers(job)
    return tuple(free[(first + i) % len(free)] for i in range(width))


def _free(job: JobConfig, visible: int, beside_trainer: bool = True) -> list[int]:
    """Return the visible GPUs that engines with the device `cuda` may use, in order."""
    taken = trainer_gpus(job) if beside_trainer and visible > 1 else range(0)
    return [gpu for gpu in range(visible) if gpu not in taken]


def _of_workers(job: JobConfig) -> int:
    """Return the number of free GPUs that the engines of `rollout.workers` take."""
    rollout = job.rollout
    takes_turns = rollout.device == "cuda" and not rollout.server.urls
    return rollout.workers * rollout.replicas * width_of(rollout) if takes_turns else 0


def rollout_gpus(job: JobConfig, visible: int | None = None) -> frozenset[int]:
    """Return all GPUs of the rollout's engines. Without `visible`, assume that as many GPUs are visible as
    the job needs. Raises `ValueError` if there are too few."""
    rollout, ranks = job.rollout, trainer_gpus(job)
    if visible is None:
        visible = max(2, len(ranks) + _of_workers(job), ranks.stop) + width_of(rollout)
        visible += int(rollout.device.partition(":")[2] or 0)
    places = itertools.product(range(rollout.workers), range(rollout.replicas))
    engines = (engine_gpus(job, worker=worker, replica=n, visible=visible) for worker, n in places)
    return frozenset(gpu for engine in engines for gpu in engine)


def shared_with_engines(job: JobConfig, visible: int | None = None) -> Iterator[Mistake]:
    """Refuse a job if NCCL would connect the trainer and an engine of the rollout on the same GPU."""
    try:
        shared = rollout_gpus(job, visible).intersection(trainer_gpus(job))
    except ValueError:
        return  # Another rule reports too few GPUs
    if shared:
        gpu = f"one GPU (cuda:{min(shared)})"
        problem = f"trainer and engine are on {gpu}, and NCCL takes only one member from each"
        fix = "Set it to auto, or one of the devices to another GPU"
        yield Mistake("weights.channel", problem, fix)


def device_mistakes(job: JobConfig, visible: int) -> Iterator[Mistake]:
    """Refuse a job that needs more GPUs of this host than are visible."""
    rollout, evaluation, ranks = job.rollout, job.evaluation, trainer_gpus(job)
    if ranks and ranks.stop > visible:
        problem = _too_few(job.trainer.device, len(ranks), ranks.stop, visible, "the trainer's ranks")
        yield Mistake("trainer.device", problem, _fix(visible))
        return
    # A running server manages its GPUs itself.
    asked: list[tuple[str, int | None]] = []
    if job.kind == "rl" and not rollout.server.urls:
        asked.append(("rollout.device", 0))
    if job.kind == "rl" and evaluation.device is not None and not evaluation_rollout(job).server.urls:
        asked.append(("evaluation.device", None))
    for field, worker in asked:
        try:
            engine_gpus(job, worker=worker, replica=0, visible=visible)
        except ValueError as error:
            yield Mistake(field, str(error), _fix(visible))
            return
    engine = engine_gpus(job, worker=0, replica=0, visible=visible) if job.placement.share else ()
    if engine != tuple(ranks) and job.placement.share:
        problem = f"nothing is shared: {visible} GPUs are visible, and trainer and engine each have their own"
        fix = "Remove it, or name the GPU in both trainer.device and rollout.device (cuda:0)"
        yield Mistake("placement.share", problem, fix)
    needed, free = _of_workers(job), len(_free(job, visible))
    if job.kind == "rl" and needed > free:
        beside = f", of which the trainer has {visible - free}" if free < visible else ""
        problem = (
            f"each engine has GPUs of its own: {rollout.workers} workers × {rollout.replicas} replicas × "
            f"{_gpus(width_of(rollout))} need {needed}, and {visible} are visible{beside}"
        )
        fix = (
            "Lower rollout.workers, rollout.replicas or trainer.ranks, or name the one GPU that all engines "
            "are to share (cuda:0)"
        )
        yield Mistake("rollout.device", problem, fix)


def _too_few(device: str, count: int, needed: int, visible: int, whose: str = "one engine") -> str:
    return f"{device} with {_gpus(count)} for {whose} needs {needed}, and {visible} are visible"


def _fix(visible: int) -> str:
    if not visible:
        return "Set it to cpu, or make a GPU visible (CUDA_VISIBLE_DEVICES, and a torch built for it)"
    return f"Use the GPUs 0 to {visible - 1}, or make more visible (CUDA_VISIBLE_DEVICES)"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
