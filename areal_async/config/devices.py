"""Which GPU is whose: the trainer's ranks, the rollout's engines with their widths, the evaluation's. Pure:
how many are visible is passed in.

The rule. GPUs are counted as a process sees them, from 0. A rank of the trainer takes one. An engine takes
`width` of them: 1, or for a server what its parallel sizes in `rollout.server.arguments` multiply to.

- `cpu`: none.
- `cuda:N`: exactly N, and those after it (`trainer.ranks`, or the engine's width), whoever else has them: so
  is said that several share a GPU. All engines of a worker's kind share these.
- `cuda`: the trainer's ranks have the GPUs from 0 on. The engines come one after the other on those that no
  rank has: the k-th engine of the job has the width · k-th to width · (k + 1) - 1st of them; workers come in
  the order of their numbers, each with its replicas, and after all of `rollout.workers` the evaluation's
  engine.

What the job file asks for must be there without a GPU being used twice. There are three exceptions. Where a
single GPU is visible everyone has that one. The evaluation's engine, and workers that join later, go round to
the engines' first GPU again. And on another host than the trainer's all GPUs are the engines'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from areal_async.base.mistakes import Mistake
from areal_async.config.engines import declared_engine, evaluation_engine
from areal_async.config.job import JobConfig
from areal_async.config.rollout import RolloutSection, ServerSection

MANY = 1 << 20  # GPUs, where it does not matter how many are visible


def width_of(rollout: RolloutSection) -> int:
    """GPUs of one engine; 1 while it is in a file of the user's that was not run yet."""
    part = declared_engine(rollout.engine)
    return part.width(rollout) if part is not None else 1


def first_threads(torch_threads: int | Literal["auto"]) -> int:
    """The CPU threads with which a rank or an engine begins."""
    return 1 if torch_threads == "auto" else torch_threads


def rank_device(device: str, rank: int) -> str:
    """The device of one rank of a trainer with `trainer.device`, as torch names it."""
    kind, _, number = device.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(number or 0) + rank}"


def trainer_gpus(job: JobConfig) -> range:
    """The GPUs of the trainer, one for each rank in their order, whether or not they are visible."""
    kind, _, number = job.trainer.device.partition(":")
    first = int(number or 0)
    return range(first, first + job.trainer.ranks) if kind == "cuda" else range(0)


def evaluation_rollout(job: JobConfig) -> RolloutSection:
    """`rollout` as the evaluation's engine is to see it: it holds what `evaluation` says of it."""
    section, rollout = job.evaluation, job.rollout
    # Servers that the rollout is attached to are its own: an engine holds one version.
    server = rollout.server.model_copy(update={"urls": ()})
    if section.server != ServerSection():
        server = section.server
    arguments = section.engine_args or (rollout.engine_args if section.engine == "same" else {})
    changes = {
        "engine": evaluation_engine(job),
        "engine_args": arguments,
        "server": server,
        "device": section.device or rollout.device,
    }
    return rollout.model_copy(update=changes)


def engine_gpus(
    job: JobConfig, *, worker: int | None, replica: int, visible: int, beside_trainer: bool = True
) -> tuple[int, ...]:
    """The GPUs, 0 to `visible` - 1, of one engine of a worker with this number; `worker` None: the
    evaluation's. `beside_trainer` False is for one on another host. Empty on a CPU. Raises `ValueError` for
    GPUs that are not there."""
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
    """The GPUs that engines with `cuda` have, in their order."""
    taken = trainer_gpus(job) if beside_trainer and visible > 1 else range(0)
    return [gpu for gpu in range(visible) if gpu not in taken]


def _of_workers(job: JobConfig) -> int:
    """How many of the free GPUs the engines of `rollout.workers` have by rule."""
    rollout = job.rollout
    takes_turns = rollout.device == "cuda" and not rollout.server.urls
    return rollout.workers * rollout.replicas * width_of(rollout) if takes_turns else 0


def names_of(gpus: Sequence[int], variables: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs as a child process of a process with the environment `variables` must be told of them, in its
    `CUDA_VISIBLE_DEVICES`."""
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(names[gpu] if names else str(gpu) for gpu in gpus)


def rollout_gpus(job: JobConfig, visible: int | None = None) -> frozenset[int]:
    """All GPUs of the rollout's engines, by default with as many visible as are needed. Raises `ValueError`
    where they are too few."""
    rollout = job.rollout
    if visible is None:
        visible = max(2, len(trainer_gpus(job)) + _of_workers(job), trainer_gpus(job).stop)
        visible += int(rollout.device.partition(":")[2] or 0) + width_of(rollout)
    engines = (
        engine_gpus(job, worker=worker, replica=replica, visible=visible)
        for worker in range(rollout.workers)
        for replica in range(rollout.replicas)
    )
    return frozenset(gpu for engine in engines for gpu in engine)


def shared_with_engines(job: JobConfig, visible: int | None = None) -> Iterator[Mistake]:
    """Why NCCL cannot join the trainer with the rollout's engines: they are on one GPU."""
    try:
        shared = rollout_gpus(job, visible).intersection(trainer_gpus(job))
    except ValueError:
        return  # they are too few, which is said elsewhere
    if shared:
        yield Mistake(
            "weights.channel",
            f"trainer and engine are on one GPU (cuda:{min(shared)}), and NCCL takes only one member from "
            "each",
            "Set it to auto, or one of the devices to another GPU",
            ("rollout.device", "trainer.device"),
        )


def device_mistakes(job: JobConfig, visible: int) -> Iterator[Mistake]:
    """What the job asks of the GPUs of this host that the `visible` ones are too few for."""
    rollout, evaluation, ranks = job.rollout, job.evaluation, trainer_gpus(job)
    if ranks and ranks.stop > visible:
        problem = _too_few(job.trainer.device, len(ranks), ranks.stop, visible, "the trainer's ranks")
        yield Mistake("trainer.device", problem, _fix(visible), ("trainer.ranks",))
        return
    if job.kind != "rl":
        return
    # The GPUs of a server that runs already are its own affair.
    asked: list[tuple[str, int | None]] = [("rollout.device", 0)] if not rollout.server.urls else []
    if evaluation.device is not None and not evaluation_rollout(job).server.urls:
        asked.append(("evaluation.device", None))
    for field, worker in asked:
        try:
            engine_gpus(job, worker=worker, replica=0, visible=visible)
        except ValueError as error:
            yield Mistake(field, str(error), _fix(visible), ("trainer.device", "trainer.ranks"))
            return
    needed, free = _of_workers(job), len(_free(job, visible))
    if needed > free:
        beside = f", of which the trainer has {visible - free}" if free < visible else ""
        yield Mistake(
            "rollout.device",
            f"each engine has GPUs of its own: {rollout.workers} workers × {rollout.replicas} replicas × "
            f"{_gpus(width_of(rollout))} need {needed}, and {visible} are visible{beside}",
            "Lower rollout.workers, rollout.replicas or trainer.ranks, or name the one GPU that all engines "
            "are to share (cuda:0)",
            ("rollout.workers", "rollout.replicas", "trainer.ranks", "trainer.device"),
        )


def _too_few(device: str, count: int, needed: int, visible: int, whose: str = "one engine") -> str:
    return f"{device} with {_gpus(count)} for {whose} needs {needed}, and {visible} are visible"


def _fix(visible: int) -> str:
    if not visible:
        return "Set it to cpu, or make a GPU visible (CUDA_VISIBLE_DEVICES, and a torch built for it)"
    return f"Use the GPUs 0 to {visible - 1}, or make more visible (CUDA_VISIBLE_DEVICES)"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
