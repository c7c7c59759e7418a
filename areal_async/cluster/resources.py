"""Resources that a job needs, and resources of a machine. `resources_of` is pure."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from areal_async.config.cluster import ResourcesSection
from areal_async.config.devices import device_mistakes, engine_gpus, first_threads, rollout_gpus, trainer_gpus
from areal_async.config.job import JobConfig
from areal_async.launch.plan import services_of
from areal_async.launch.ray.placement import needs_of

NVIDIA_DEVICES = Path("/dev")


class Resources(msgspec.Struct, frozen=True):
    """Cores and GPUs that exist, or that a job needs."""

    cpus: int = 0
    gpus: int = 0

    def without(self, others: Collection[Resources]) -> Resources:
        """Return these resources minus `others`. Numbers are negative if `others` have more."""
        return Resources(
            self.cpus - sum(other.cpus for other in others), self.gpus - sum(other.gpus for other in others)
        )

    def lacks(self, needed: Resources) -> str:
        """Return the resources that are missing for `needed` as text, for example `2 GPUs`. The text is empty
        if `needed` fits."""
        short = []
        if needed.gpus > max(0, self.gpus):
            short.append("1 GPU" if needed.gpus == 1 else f"{needed.gpus} GPUs")
        if needed.cpus > max(0, self.cpus):
            short.append("1 core" if needed.cpus == 1 else f"{needed.cpus} cores")
        return " and ".join(short)


def resources_of(job: JobConfig, total: Resources, *, by_ray: bool = False) -> Resources:
    """Return the needs of `job` on a cluster that has `total`. With `by_ray`, return the resources that Ray
    reserves.

    The number of cores is the sum of the initial threads of the trainer's ranks, the workers' engines and the
    evaluator, but at most all cores. Each engine and each rank needs one GPU. On a cluster with one GPU, all
    of them share it, as `config/devices.py` describes."""
    if by_ray:
        reserved = needs_of(job, services_of(job))
        return Resources(math.ceil(reserved.get("CPU", 0)), math.ceil(reserved.get("GPU", 0)))
    cpus = 0
    for view in job.views.values():
        cpus += view.trainer.ranks * first_threads(view.trainer.torch_threads)
        cpus += job.rollout.workers * first_threads(view.rollout.torch_threads) if job.kind == "rl" else 0
    if job.kind == "rl" and job.tasks.evaluation is not None:
        cpus += job.evaluation.torch_threads
    gpus = max(_gpus_of(view, total.gpus) for view in job.views.values())
    return Resources(min(cpus, total.cpus), gpus)


def _gpus_of(job: JobConfig, total: int) -> int:
    used = set(trainer_gpus(job))
    if job.kind == "rl" and not job.rollout.server.urls:
        used |= rollout_gpus(job)
    section = job.evaluation
    if job.kind == "rl" and job.tasks.evaluation is not None and section.device not in (None, "cpu", "cuda"):
        used |= set(engine_gpus(job, worker=None, replica=0, visible=1 << 20))
    needed = max(used, default=-1) + 1
    if needed > total == 1 and not list(device_mistakes(job, 1)):
        return 1
    return needed


def machine_resources(given: ResourcesSection) -> Resources:
    """Return the `given` resources. Fields that are not set get the values of this machine."""
    return Resources(
        cpus=given.cpus or len(os.sched_getaffinity(0)),
        gpus=_visible_gpus() if given.gpus is None else given.gpus,
    )


def _visible_gpus() -> int:
    """Return the number of GPUs that torch would see. Torch is not imported, which would take seconds and
    half a gigabyte."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in named.split(",") if name.strip() not in ("", "-1")])
    return sum(path.name.removeprefix("nvidia").isdigit() for path in NVIDIA_DEVICES.glob("nvidia[0-9]*"))
