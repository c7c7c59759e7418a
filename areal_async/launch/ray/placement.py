"""What each process of a job needs of a node, and how its processes are to lie to each other. Pure.

The ranks of a trainer are one placement group, packed: as few nodes as they fit on. The workers that a job
begins with, and its evaluation, are another, spread. Buffer and reward service are a third; a buffer that has
its own Redis stays on the node where its files are. Ray reserves each group as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_async.base.topology import Role, ServicePlace
from areal_async.config.devices import evaluation_rollout, first_threads, width_of
from areal_async.config.job import JobConfig, ShapeSection

Strategy = Literal["PACK", "SPREAD"]
LIGHT_CPUS = 0.0
"""Cores that buffer and reward service reserve where the job file does not say: they share what is there."""


@dataclass(frozen=True)
class Need:
    """What one process is to be given."""

    resources: Mapping[str, float]
    """By Ray's names: CPU, GPU, memory in bytes, and custom ones."""
    labels: Mapping[str, str]
    """Labels that its node must have."""


@dataclass(frozen=True)
class PlacedTogether:
    """Processes whose places are reserved as one."""

    name: str
    places: Sequence[ServicePlace]
    strategy: Strategy


def together(services: Sequence[ServicePlace]) -> list[PlacedTogether]:
    """The groups of the processes that a job begins with, in the order in which they are reserved."""
    groups: Mapping[str, tuple[Strategy, tuple[Role, ...]]] = {
        "services": ("PACK", ("buffer", "reward")),
        "trainer": ("PACK", ("trainer",)),
        "engines": ("SPREAD", ("rollout", "evaluator")),
    }
    found = [
        PlacedTogether(name, [place for place in services if place.role in roles], strategy)
        for name, (strategy, roles) in groups.items()
    ]
    return [group for group in found if group.places]


def need_of(job: JobConfig, role: Role) -> Need:
    """What a process of `role` needs: what `placement` of the job file says, and what its devices and threads
    do."""
    shape: ShapeSection = getattr(job.placement, role)
    cpus, gpus = LIGHT_CPUS, 0
    if role == "trainer":
        cpus = first_threads(job.trainer.torch_threads)
        gpus = int(job.trainer.device != "cpu")
    elif role == "rollout":
        cpus = first_threads(job.rollout.torch_threads)
        gpus = job.rollout.replicas * width_of(job.rollout) if job.rollout.device != "cpu" else 0
    elif role == "evaluator":
        rollout = evaluation_rollout(job)
        cpus = job.evaluation.torch_threads
        gpus = width_of(rollout) if rollout.device != "cpu" else 0
    resources = {
        "CPU": float(cpus if shape.cpus is None else shape.cpus),
        "GPU": float(gpus if shape.gpus is None else shape.gpus),
        "memory": float((shape.memory_gb or 0.0) * 2**30),
        **shape.resources,
    }
    return Need({name: amount for name, amount in resources.items() if amount}, shape.labels)


def needs_of(job: JobConfig, services: Sequence[ServicePlace]) -> dict[str, float]:
    """What all of these need together."""
    total: dict[str, float] = {}
    for place in services:
        for name, amount in need_of(job, place.role).resources.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def needs_in_words(job: JobConfig, services: Sequence[ServicePlace]) -> str:
    """What the job needs in all, for people: `CPU 4, GPU 2`."""
    total = needs_of(job, services)
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(total.items())) or "no resources"


def lacking(needs: Sequence[Need], nodes: Sequence[Mapping[str, str]]) -> str:
    """The labels that are needed and that none of `nodes` has, as the end of a sentence; empty where there is
    none. What is more than a value, such as `in(a,b)`, is Ray's to judge."""
    wanted = {label for need in needs for label in need.labels.items() if not set(label[1]) & set("!(")}
    nowhere = sorted(wanted - {label for node in nodes for label in node.items()})
    shown = ", ".join(f"{name}={value}" for name, value in nowhere)
    return f"; no node has {shown} (`ray start --labels`)" if nowhere else ""
