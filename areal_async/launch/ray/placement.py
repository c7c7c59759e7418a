"""Resources that each process of a job needs, and which processes are placed together. The module is pure.

Three placement groups exist. The ranks of a trainer are packed on as few nodes as possible. The first workers
of a job and its evaluator are spread. The buffer and the reward service are the third group. A buffer with
its own Redis runs on the home host, so it is in no group. Ray reserves either all places of a group or
none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_async.base.topology import Role, ServicePlace
from areal_async.config.devices import evaluation_rollout, first_threads, width_of
from areal_async.config.job import JobConfig, ShapeSection

Strategy = Literal["PACK", "SPREAD"]
BUILT_IN = ("CPU", "GPU", "memory")  # Resources that Ray defines itself
LIGHT_CPUS = 0.0
"""Cores that buffer and reward service reserve by default. The two services share the cores of their node."""


@dataclass(frozen=True)
class Need:
    """Resources and labels that one process needs."""

    resources: Mapping[str, float]
    """Amounts by the names that Ray uses: CPU, GPU, memory in bytes, and custom resources."""
    labels: Mapping[str, str]
    """Labels that its node must have."""


@dataclass(frozen=True)
class PlacedTogether:
    """A group of processes. Ray reserves their places together."""

    name: str
    places: Sequence[ServicePlace]
    strategy: Strategy


def together(services: Sequence[ServicePlace]) -> list[PlacedTogether]:
    """Return the groups of the first processes of a job, in the order of reservation."""
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
    """Return the needs of a process. Needs that `placement` does not set follow from its devices and
    threads."""
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
    """Return the total needs of these services."""
    total: Counter[str] = Counter()
    for place in services:
        total.update(need_of(job, place.role).resources)
    return dict(total)


def needs_in_words(job: JobConfig, services: Sequence[ServicePlace]) -> str:
    """Return the total needs of these services as text: `CPU 4, GPU 2`."""
    return in_words(needs_of(job, services)) or "no resources"


def in_words(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(amounts.items()))


def by_node(nodes: Sequence[str]) -> list[int]:
    """Return the indices of a placement group's bundles in an order in which bundles of one node follow each
    other. `nodes` has the node of each bundle. Nodes with most bundles come first.

    Ranks take bundles in this order, because ranks that follow each other exchange most data."""
    count, first = Counter(nodes), {node: nodes.index(node) for node in {*nodes}}
    return sorted(range(len(nodes)), key=lambda at: (-count[nodes[at]], first[nodes[at]], at))


def lacking(needs: Sequence[Need], nodes: Sequence[Mapping[str, str]]) -> str:
    """Return the needed labels that none of `nodes` has, as the end of a sentence. The text is empty if no
    label is missing.

    Labels with expressions such as `in(a,b)` are left to Ray."""
    wanted = {label for need in needs for label in need.labels.items() if not set(label[1]) & set("!(")}
    nowhere = sorted(wanted - {label for node in nodes for label in node.items()})
    shown = ", ".join(f"{name}={value}" for name, value in nowhere)
    return f"; no node has {shown} (`ray start --labels`)" if nowhere else ""
