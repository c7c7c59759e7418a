"""The queue of waiting jobs, ordered by priority and then by submission. The module is pure.

A job starts when its resources are free. If the first job does not fit, all later jobs wait too, even if they
fit. Otherwise, small jobs of low priority would repeatedly take the resources that the first job needs. A
running job is never stopped for another job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_async.cluster.resources import Resources
from areal_async.cluster.store import ShownJob


@dataclass(frozen=True)
class Turns:
    """Ids of the jobs that start now, in order, and the reasons why the others wait."""

    starts: tuple[int, ...]
    waits: Mapping[int, str]


def order_of(waiting: Sequence[ShownJob]) -> list[ShownJob]:
    """Return the waiting jobs in order. Among equal priorities, the smaller id comes first, because it was
    submitted first."""
    return sorted(waiting, key=lambda job: (-job.priority, job.id))


def take_turns(waiting: Sequence[ShownJob], free: Resources) -> Turns:
    """Decide which jobs start with the `free` resources, and why the others wait."""
    starts: list[int] = []
    waits: dict[int, str] = {}
    first: ShownJob | None = None  # The first job that does not fit
    for job in order_of(waiting):
        if first is None and (lacking := free.lacks(job.needs)):
            first, waits[job.id] = job, f"waits for {lacking}"
        elif first is not None:
            waits[job.id] = f"waits behind {first.name}"
        else:
            starts.append(job.id)
            free = free.without([job.needs])
    return Turns(tuple(starts), waits)


def gpus_for(needed: int, total: int, held: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the free GPUs with the lowest numbers. At least `needed` GPUs must be free."""
    taken = {gpu for gpus in held for gpu in gpus}
    free = [gpu for gpu in range(total) if gpu not in taken]
    assert needed <= len(free)
    return tuple(free[:needed])
