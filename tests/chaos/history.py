"""The history checker: did a run keep its promises? A pure function over the event logs of its processes.

`check(events, promise)` returns every violation and the figures of the run. It shares no code with what it
judges: who says what is in `docs/metrics.md#event-log`, and everything else is worked out from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.fold import Decided, End, Event, Front, Violation, place_of
from tests.chaos.material import History, Promise, task_of
from tests.chaos.training import (
    UNKNOWN_TO_CHECKPOINT,
    ends_as_it_should,
    finished,
    in_order,
    not_freed_early,
    on_lineage,
    redone,
    staleness,
    trained_once,
    whole,
)
from tests.chaos.versions import versions_are_true, versions_monotone

TRIED_AGAIN = frozenset(f"dropped:{reason}" for reason in ("stale", "overtaken", "abandoned", "age"))
"""Reasons to end a group that leave its task to be tried again."""


@dataclass
class Verdict:
    violations: list[Violation] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def kinds(self) -> set[str]:
        return {violation.promise for violation in self.violations}


def check(events: Sequence[Event], promise: Promise) -> Verdict:
    """All of it. `events` as `read_events` gives them, ordered by `mono_s`."""
    return _Checker(events, promise).verdict()


class _Checker(History):
    def verdict(self) -> Verdict:
        found = list(self._fold())
        found += self._acknowledged_is_kept()
        for look in (
            finished,
            trained_once,
            ends_as_it_should,
            staleness,
            whole,
            redone,
            in_order,
            on_lineage,
            not_freed_early,
            versions_are_true,
            versions_monotone,
        ):
            found += look(self)
        found += self._tasks()
        return Verdict(found, self._figures(found))

    # --- the ledger ---

    def _fold(self) -> Iterator[Violation]:
        if not self.fronts:
            yield Violation("log", "no front has loaded a ledger")
        for number, front in enumerate(self.fronts):
            before = self.fronts[number - 1] if number else None
            lost = before is not None and before.lost_confirmed > 0
            yield from self.ledger.resume(front.loaded, first=number == 0, lost=lost)
            if before is not None:
                yield from self._lost_writes(before, front)
            if before is not None and not lost and front.identity[0] <= before.identity[0]:
                yield Violation("goes_back", f"front epoch {front.identity[0]} after {before.identity[0]}")
            for one in front.decided:
                if one.fate != "true":
                    continue
                yield from self._positions(one)
                yield from self.ledger.advance(one)
                for group_id, (_, becomes, _step) in one.get("moved", {}).items():
                    if not becomes:
                        self.all_ends.setdefault(group_id, []).append(self.ledger.ends[group_id])

    def _lost_writes(self, before: Front, front: Front) -> Iterator[Violation]:
        if before.lost_s > self.promise.lost_s:
            yield Violation(
                "lost",
                f"Redis came back to front {front.identity[0]} without {before.lost_confirmed} confirmed "
                f"writes, {before.lost_s:.2f} s of work; {self.promise.lost_s} s are allowed",
            )
        told = front.loaded["lost_writes"]
        came_back = front.loaded["pid"] == before.loaded["pid"]
        if told < before.lost_confirmed or (came_back and told > before.lost_confirmed):
            yield Violation(
                "undetected",
                f"front {front.identity[0]} says {told} writes were lost: {before.lost_confirmed}",
            )

    def _positions(self, one: Decided) -> Iterator[Violation]:
        """New tasks come in the order of the task file, as many as the cursor moves."""
        event = one.event
        if event["command"] == "OpenedWith":
            return
        name = f"{event['command']} at revision {event['revision']} of front {event['front_epoch']}"
        new = [g for g, (was, _, _step) in one.get("moved", {}).items() if was == "" and g.endswith("#0")]
        begin, end = self.ledger.place["position"], event["position"]
        if end - begin != len(new):
            yield Violation("task_order", f"{name}: the cursor goes {begin} → {end} for {len(new)} new tasks")
        elif self.promise.task_at is not None:
            for position, group_id in zip(range(begin, end), new, strict=True):
                if self.promise.task_at(position) != task_of(group_id):
                    yield Violation("task_order", f"{name}: {group_id} is not the task at {position}")
        for group_id, (was, becomes, _step) in one.get("moved", {}).items():
            if was and not becomes:
                yield from self._successor(group_id, one, name)

    def _successor(self, group_id: str, one: Decided, name: str) -> Iterator[Violation]:
        """A group that ends for a reason that says nothing against its task has a successor."""
        counts = one.get("counts", {})
        if counts.get("committed") and self.ledger.groups[group_id].state == "TRAINED":
            return
        reasons = {reason for reason in counts if reason.startswith("dropped:")}
        task, attempt = task_of(group_id), int(group_id.rpartition("#")[2])
        bad_luck = bool(reasons) and reasons <= TRIED_AGAIN and attempt + 1 < self.promise.max_attempts
        if bad_luck and f"{task}#{attempt + 1}" not in one.get("moved", {}):
            yield Violation("task_skipped", f"{name}: {group_id} ended by {reasons}, and was not tried again")

    # --- acknowledged ---

    def _acknowledged_is_kept(self) -> Iterator[Violation]:
        for ack in self.events:
            if ack["event"] != "put_acked":
                continue
            for sample in ack["stored"]:
                episode_id = f"{ack['group_id']}.{sample}"
                self.acknowledged.add(episode_id)
                stores = [one for one, _ in self.stores.get(episode_id, [])]
                sure = [one for one in stores if one.confirmed_s is not None]
                if not any(one.confirmed_s <= ack["mono_s"] for one in sure):
                    yield Violation(
                        "early_acknowledgement", f"{episode_id} was acknowledged, and not yet stored"
                    )
                if not any(one.fate == "true" for one in stores):
                    self.lost_episodes.add(episode_id)
        if self.promise.lost_s == 0:
            yield from (
                Violation("lost", f"{id_} was acknowledged, and is gone") for id_ in self.lost_episodes
            )
        for episode_id in self.acknowledged - self.lost_episodes:
            group_id, sample = place_of(episode_id)
            held = self.ledger.groups.get(group_id)
            ends = self.all_ends.get(group_id, []) or held is not None
            if not ends and self.promise.lost_s == 0:
                yield Violation("lost", f"{episode_id} was stored, and its group neither ended nor is held")
            if (
                held is not None
                and sample not in held.stored
                and not self.ledger.unstored[episode_id]
                and not self.all_ends.get(group_id)
                and self.promise.lost_s == 0
            ):
                yield Violation("lost", f"{episode_id} was stored, and its group is held without it")

    # --- tasks ---

    def _tasks(self) -> Iterator[Violation]:
        """Every task up to the cursor was trained, is held, or ended for a reason that is its own."""
        if self.promise.task_at is None:
            return
        trained = {task_of(g) for batch in self.lineage.values() if batch for g in batch.groups}
        held = [task_of(group_id) for group_id in self.ledger.groups]
        for task, times in Counter(held).items():
            if times > 1:
                yield Violation("task_repeated", f"task {task} is held as {times} groups")
        ended: dict[str, list[tuple[int, End]]] = {}
        for group_id, end in self.ledger.ends.items():
            ended.setdefault(task_of(group_id), []).append((int(group_id.rpartition("#")[2]), end))
        for position in range(self.ledger.place.get("position", 0)):
            task = self.promise.task_at(position)
            if task in trained or task in held:
                continue
            latest: tuple[int, End | None] = max(
                ended.get(task, []), key=lambda one: one[0], default=(0, None)
            )
            attempt, end = latest
            its_own = end is not None and bool(end.reasons - TRIED_AGAIN - {UNKNOWN_TO_CHECKPOINT})
            if not its_own and attempt + 1 < self.promise.max_attempts:
                yield Violation("task_skipped", f"task {task} at position {position} was passed over: {end}")

    # --- figures ---

    def _figures(self, found: Sequence[Violation]) -> dict[str, Any]:
        ages = [b.step - v for b in self.batched for v in b.versions.values() if v >= 0]
        trained = sum(len(epoch.trained) for epoch in self.trainers.epochs.values())
        return {
            "acknowledged_episodes": len(self.acknowledged),
            "lost_episodes": len(self.lost_episodes),
            "lost_writes": sum(front.lost_confirmed for front in self.fronts),
            "lost_work_s": round(max((front.lost_s for front in self.fronts), default=0.0), 3),
            "trained_twice": sum(violation.promise == "trained_twice" for violation in found),
            "max_staleness": max(ages, default=0),
            "steps": len(self.lineage),
            "steps_redone": trained - len(self.lineage),
            "trainer_epochs": len(self.trainers.epochs),
            "front_epochs": len(self.fronts),
            "events": len(self.events),
            "dropped": {
                reason: times
                for reason, times in sorted(self.ledger.reasons.items())
                if reason.startswith(("dropped", "episode_dropped", "refused"))
            },
            "violations": len(found),
        }
