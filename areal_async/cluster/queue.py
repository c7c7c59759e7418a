"""Whose turn it is: by priority, then by submission. Pure.

A job starts when what it needs is free. The first that does not fit waits, and everybody behind it waits with
it: a small job of low priority that slipped in would take what the first waits for, again and again. Nothing
that runs is stopped for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_async.cluster.resources import Resources


@dataclass(frozen=True)
class Waiting:
    """A job that waits. Of equal priorities the smaller `id` was submitted first."""

    id: int
    name: str
    priority: int
    needs: Resources


@dataclass(frozen=True)
class Turns:
    """Ids of the jobs that start now, in their order, and what each of the others waits for, in words."""

    starts: tuple[int, ...]
    waits: Mapping[int, str]


def order_of(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Those that wait, the next first."""
    return sorted(waiting, key=lambda job: (-job.priority, job.id))


def take_turns(waiting: Sequence[Waiting], free: Resources) -> Turns:
    """Who starts with `free` there, and who waits for what."""
    starts: list[int] = []
    waits: dict[int, str] = {}
    first: Waiting | None = None  # The first that does not fit
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
    """The lowest GPUs, by number, that nobody holds. There must be as many as `needed`."""
    taken = {gpu for gpus in held for gpu in gpus}
    free = [gpu for gpu in range(total) if gpu not in taken]
    assert needed <= len(free)
    return tuple(free[:needed])
