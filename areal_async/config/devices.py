"""Which GPUs an engine computes on. Pure: how many are visible is passed in.

The rule. GPUs are counted as a process sees them, from 0. An engine takes `width` of them: 1, or for a server
what its parallel sizes in `rollout.server.arguments` multiply to.

- `cpu`: none.
- `cuda:N`: exactly N (and the width - 1 after it), whichever engine it is: several share it.
- `cuda`: one engine after the other. The k-th engine of the job on this host has the GPUs from k · width on,
  modulo the visible ones; workers come in the order of their numbers, each with its replicas, and after all
  of `rollout.workers` the evaluation's engine.

What the job file asks for must be there without a GPU being used twice. Only what comes on top goes round to
the first GPU again: the evaluation's engine, and workers that join later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from areal_async.config.engines import declared_engine
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.config.rollout import RolloutSection

MANY = 1 << 30  # GPUs, where it does not matter how many are visible


def width_of(rollout: RolloutSection) -> int:
    """GPUs of one engine; 1 while it is in a file of the user's that was not run yet."""
    part = declared_engine(rollout.engine)
    return part.width(rollout) if part is not None else 1


def gpus_of(device: str, *, first: int, width: int, visible: int) -> tuple[int, ...]:
    """The GPUs, 0 to `visible` - 1, of an engine with `device`, when `first` of them are those of the engines
    before it. Empty on a CPU. Raises `ValueError` for a GPU that is not there."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return ()
    begin = int(number) if number else first
    highest = begin + width if number else width
    if highest > visible:
        raise ValueError(
            f"{device} with {_gpus(width)} for one engine needs {highest}, and {visible} are visible"
        )
    return tuple((begin + i) % visible for i in range(width))


def gpus_before(job: JobConfig, *, worker: int | None, replica: int) -> int:
    """How many GPUs the engines have that come before this one on the host, when all have `cuda`; `worker`
    is its worker's number, None for the evaluation's engine."""
    rollout = job.rollout
    if worker is not None:
        return (worker * rollout.replicas + replica) * width_of(rollout)
    takes_turns = rollout.device == "cuda" and not rollout.server.urls
    return rollout.workers * rollout.replicas * width_of(rollout) if takes_turns else 0


def names_of(gpus: Sequence[int], variables: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs as a child process of a process with the environment `variables` must be told of them, in its
    `CUDA_VISIBLE_DEVICES`."""
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(names[gpu] if names else str(gpu) for gpu in gpus)


def rollout_gpus(job: JobConfig) -> frozenset[int]:
    """All GPUs of the rollout's engines, however many are visible."""
    rollout = job.rollout
    width = width_of(rollout)
    firsts = range(0, rollout.workers * rollout.replicas * width, width)
    engines = (gpus_of(rollout.device, first=first, width=width, visible=MANY) for first in firsts)
    return frozenset(gpu for engine in engines for gpu in engine)


def device_mistakes(job: JobConfig, visible: int) -> Iterator[Mistake]:
    """What the job asks of the GPUs of this host that the `visible` ones are too few for."""
    rollout, evaluation = job.rollout, job.evaluation
    devices = [("trainer.device", job.trainer.device, 1)]
    # The GPUs of a server that runs already are its own affair.
    if job.kind == "rl" and not rollout.server.urls:
        devices.append(("rollout.device", rollout.device, width_of(rollout)))
    if job.kind == "rl" and evaluation.device is not None and not evaluation.server.urls:
        devices.append(("evaluation.device", evaluation.device, 1))
    for field, device, width in devices:
        try:
            gpus_of(device, first=0, width=width, visible=visible)
        except ValueError as error:
            yield Mistake(field, str(error), _fix(visible))
            return
    engines = rollout.workers * rollout.replicas
    needed = engines * width_of(rollout)
    if job.kind == "rl" and rollout.device == "cuda" and not rollout.server.urls and needed > visible:
        yield Mistake(
            "rollout.device",
            f"each engine has GPUs of its own: {rollout.workers} workers × {rollout.replicas} replicas × "
            f"{_gpus(width_of(rollout))} need {needed}, and {visible} are visible",
            "Lower rollout.workers or rollout.replicas, or name the one GPU that all are to share (cuda:0)",
            ("rollout.workers", "rollout.replicas"),
        )


def _fix(visible: int) -> str:
    if not visible:
        return "Set it to cpu, or make a GPU visible (CUDA_VISIBLE_DEVICES, and a torch built for it)"
    return f"Use the GPUs 0 to {visible - 1}, or make more visible (CUDA_VISIBLE_DEVICES)"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
