"""What the checks look at: the events of a run, sorted, and what the run was to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.fold import Decided, End, Event, Front, Ledger, fronts_of
from tests.chaos.lineage import Trainers


@dataclass(frozen=True)
class Promise:
    """What the run was to keep."""

    steps: int
    batch_groups: int
    group_size: int
    max_staleness: int
    max_reuse: int = 1
    max_attempts: int = 3
    lost_s: float = 0.0
    """How much confirmed work Redis may come back without, in seconds before its last confirmation."""
    task_at: Callable[[int], str] | None = None
    """The task id at a position of the task order."""


class History:
    """The events of a run, put in the order in which the checks want them."""

    def __init__(self, events: Sequence[Event], promise: Promise) -> None:
        self.events = events
        self.promise = promise
        self.fronts: list[Front] = fronts_of(events)
        self.trainers = Trainers.of(e for e in events if e["process"].startswith("trainer"))
        self.ledger = Ledger()
        self.decided: list[Decided] = [one for front in self.fronts for one in front.decided]
        self.batched = [one for epoch in self.trainers.epochs.values() for one in epoch.batched]
        self.batched.sort(key=lambda one: one.mono_s)
        self.lineage = self.trainers.lineage()
        self.stores: dict[str, list[tuple[Decided, list[Any]]]] = {}
        for one in self.decided:
            for stored in one.get("stored", []):
                self.stores.setdefault(stored[0], []).append((one, stored))
        self.all_ends: dict[str, list[End]] = {}
        self.lost_episodes: set[str] = set()
        self.acknowledged: set[str] = set()


def task_of(group_id: str) -> str:
    return group_id.rpartition("#")[0]
