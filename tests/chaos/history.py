"""The history checker: did a run keep its promises? A pure function over the event logs of its processes.

`check(events, promise)` returns every violation and the figures of the run. It shares no code with what it
judges: who says what is in `areal_async/observe/events.py`, and everything else is worked out from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.fold import Decided, End, Event, Front, Ledger, Violation, fronts_of, place_of
from tests.chaos.lineage import Batched, Trainers

TRIED_AGAIN = frozenset(f"dropped:{reason}" for reason in ("stale", "overtaken", "abandoned", "age"))
"""Reasons to end a group that leave its task to be tried again."""
UNKNOWN_TO_CHECKPOINT = "dropped:not_in_checkpoint"


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


@dataclass
class Verdict:
    violations: list[Violation] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def kinds(self) -> set[str]:
        return {violation.promise for violation in self.violations}


def check(events: Sequence[Event], promise: Promise) -> Verdict:
    """All of it. `events` as `read_events` gives them, ordered by `mono_s`."""
    return _History(events, promise).verdict()


class _History:
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
        self.first_of_group: dict[str, float] = {}
        self.lost_episodes: set[str] = set()
        self.acknowledged: set[str] = set()

    def verdict(self) -> Verdict:
        found = list(self._fold())
        for look in (
            self._acknowledged_is_kept,
            self._finished,
            self._trained_once,
            self._ends_as_it_should,
            self._staleness,
            self._whole,
            self._redone,
            self._on_lineage,
            self._versions_are_true,
            self._versions_monotone,
            self._not_freed_early,
            self._tasks,
        ):
            found += look()
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
                    self.first_of_group.setdefault(group_id, one.mono_s)
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
                if self.promise.task_at(position) != _task(group_id):
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
        task, attempt = _task(group_id), int(group_id.rpartition("#")[2])
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
                if not any(one.confirmed_s <= ack["mono_s"] for one in sure):  # type: ignore[operator]
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

    # --- training ---

    def _finished(self) -> Iterator[Violation]:
        yield from (Violation("log", problem) for problem in self.trainers.problems)
        if self.trainers.finished is None:
            yield Violation("unfinished", "no final model was written")
            return
        if len(self.lineage) != self.promise.steps:
            yield Violation("unfinished", f"{len(self.lineage)} steps made the final model")
        for step, batch in self.lineage.items():
            if batch is None:
                yield Violation("unfinished", f"nobody trained step {step} of the final model")

    def _trained_once(self) -> Iterator[Violation]:
        steps_of: dict[str, list[int]] = {}
        for step, batch in self.lineage.items():
            for group_id in batch.groups if batch else ():
                steps_of.setdefault(group_id, []).append(step)
        for group_id, steps in steps_of.items():
            if len(steps) > self.promise.max_reuse:
                yield Violation("trained_twice", f"{group_id} is in the steps {steps} of the final model")
        attempts = Counter(_task(group_id) for group_id in steps_of)
        for task, times in attempts.items():
            if times > 1:
                yield Violation("trained_twice", f"task {task} was trained as {times} groups")

    def _ends_as_it_should(self) -> Iterator[Violation]:
        """What is in the final model ends as COMMITTED, if it ends."""
        undone = {group_id for one in self.decided if one.fate == "lost" for group_id in one.get("moved", {})}
        for step, batch in self.lineage.items():
            for group_id in batch.groups if batch else ():
                end = self.ledger.ends.get(group_id)
                if end is not None and end.kind != "COMMITTED" and group_id not in undone:
                    yield Violation(
                        "dropped", f"{group_id} was trained in step {step}, and dropped: {end.reasons}"
                    )

    def _staleness(self) -> Iterator[Violation]:
        for batch in self.batched:
            for episode_id, version in batch.versions.items():
                age = batch.step - version
                if version >= 0 and not 0 <= age <= self.promise.max_staleness:
                    yield Violation(
                        "stale",
                        f"{episode_id} of version {version} in step {batch.step} of epoch {batch.epoch}",
                    )

    def _whole(self) -> Iterator[Violation]:
        for batch in self.batched:
            if len(batch.groups) != self.promise.batch_groups:
                yield Violation("not_whole", f"step {batch.step} has {len(batch.groups)} groups")
            expected = {f"{g}.{sample}" for g in batch.groups for sample in range(self.promise.group_size)}
            if expected != batch.versions.keys():
                odd = sorted(expected ^ batch.versions.keys())[:4]
                yield Violation(
                    "not_whole", f"step {batch.step} of epoch {batch.epoch} is not whole groups: {odd}"
                )
            for episode_id, version in batch.versions.items():
                known = {stored[2] for _, stored in self.stores.get(episode_id, [])}
                if version not in known:
                    yield Violation(
                        "not_stored", f"{episode_id} of version {version} is in step {batch.step}"
                    )

    def _redone(self) -> Iterator[Violation]:
        """A step done again has the groups it had, but for those of abandoned weights."""
        planned: dict[int, list[list[str]]] = {}
        undone = {
            tuple(groups)
            for one in self.decided
            if one.fate != "true"
            for groups in one.get("batches", {}).values()
            if groups
        }
        for one in self.decided:
            for step, groups in one.get("batches", {}).items():
                if groups:
                    planned.setdefault(int(step), []).append(groups)
        latest: dict[int, Batched] = {}
        for batch in self.batched:
            if batch.groups not in planned.get(batch.step, []):
                yield Violation(
                    "batch", f"step {batch.step} of epoch {batch.epoch} is no batch of the buffer's"
                )
            before, latest[batch.step] = latest.get(batch.step), batch
            if before is None or before.groups == batch.groups or tuple(before.groups) in undone:
                continue
            kept = [group_id for group_id in before.groups if group_id in batch.groups]
            gone = [group_id for group_id in before.groups if group_id not in batch.groups]
            unexplained = [
                group_id
                for group_id in gone
                if not any(
                    end.reasons & {"dropped:abandoned", UNKNOWN_TO_CHECKPOINT}
                    and before.mono_s < end.mono_s < batch.mono_s
                    for end in self.all_ends.get(group_id, [])
                )
            ]
            if batch.groups[: len(kept)] != kept or unexplained:
                if self.promise.lost_s and any(front.lost_confirmed for front in self.fronts):
                    continue
                yield Violation(
                    "batch",
                    f"step {batch.step} was {before.groups} in epoch {before.epoch} and is {batch.groups} in "
                    f"epoch {batch.epoch}, although {unexplained} were not abandoned",
                )

    def _on_lineage(self) -> Iterator[Violation]:
        """What was trained was sampled from weights that the trained model descends from."""
        for epoch in self.trainers.epochs.values():
            for step, batch in epoch.trained.items():
                for episode_id, version in batch.versions.items():
                    marks = {
                        (stored[1], stored[3])
                        for one, stored in self.stores.get(episode_id, [])
                        if stored[2] == version and one.mono_s < batch.mono_s
                    }
                    if version < 0 or not marks:
                        continue
                    if not any(
                        self.trainers.is_true(epoch.number, sampled, at)
                        for sampled, newest in marks
                        for at in (version, newest)
                    ):
                        yield Violation(
                            "abandoned",
                            f"step {step} of epoch {epoch.number} trained {episode_id} of version {version}, "
                            f"epochs {sorted(marks)}, which it does not descend from",
                        )

    def _not_freed_early(self) -> Iterator[Violation]:
        """TRAINED is what the trainer trained; COMMITTED is what a checkpoint on disk covers."""
        for one in self.decided:
            for group_id, (was, becomes, step) in one.get("moved", {}).items():
                if becomes == "TRAINED":
                    epoch = self.trainers.epochs.get(one.event["trainer_epoch"])
                    trained_s = epoch.trained_s.get(step) if epoch is not None else None
                    if trained_s is None or trained_s > one.mono_s:
                        yield Violation(
                            "untrained", f"{group_id} is TRAINED in step {step}, and was not trained"
                        )
                if was == "TRAINED" and not becomes and "committed" in one.get("counts", {}):
                    saved = [at for steps, at in self.trainers.saved_s.items() if steps > step]
                    if not any(at <= one.mono_s for at in saved):
                        yield Violation(
                            "freed_early", f"{group_id} of step {step} is freed before a checkpoint"
                        )

    # --- versions ---

    def _versions_are_true(self) -> Iterator[Violation]:
        """An episode's versions are those that its worker served between lease and put."""
        served: dict[int, list[tuple[float, int, int]]] = {}
        leased: dict[str, float] = {}
        puts: dict[str, list[Event]] = {}
        for event in self.events:
            if event["event"] == "served":
                served.setdefault(event["pid"], []).append(
                    (event["mono_s"], event["epoch"], event["version"])
                )
            elif event["event"] == "leased":
                leased[event["lease_id"]] = event["mono_s"]
            elif event["event"] == "put":
                for sample in event["samples"]:
                    puts.setdefault(f"{event['group_id']}.{sample}", []).append(event)
        for episode_id, stores in self.stores.items():
            for one, (_, epoch, oldest, newest) in stores:
                if newest < 0:
                    continue
                sent = [put for put in puts.get(episode_id, []) if put["mono_s"] <= one.mono_s]
                if not any(
                    _could_sample(
                        served[put["pid"]], leased[put["lease_id"]], put["mono_s"], epoch, oldest, newest
                    )
                    for put in sent
                    if put["pid"] in served and put["lease_id"] in leased
                ):
                    yield Violation(
                        "version",
                        f"{episode_id} says epoch {epoch}, {oldest} to {newest}, which nobody served",
                    )

    def _versions_monotone(self) -> Iterator[Violation]:
        last: dict[tuple[str, int, int], tuple[int, int]] = {}
        published = {(n, version) for n, epoch in self.trainers.epochs.items() for version in epoch.published}
        for event in self.events:
            kind = event["event"]
            if kind not in ("served", "published"):
                continue
            tag = (event["epoch"], event["version"])
            who = (kind, event["pid"], event["epoch"] if kind == "published" else 0)
            if who in last and (tag <= last[who] or (kind == "published" and tag[1] != last[who][1] + 1)):
                yield Violation("goes_back", f"{event['process']} {kind} {tag} after {last[who]}")
            last[who] = tag
            # A trainer may be killed between giving a snapshot out and writing so down.
            if kind == "served" and tag not in published and not self._may_have_published(tag):
                yield Violation("version", f"{event['process']} serves {tag}, which nobody published")

    def _may_have_published(self, tag: tuple[int, int]) -> bool:
        epoch = self.trainers.epochs.get(tag[0])
        return epoch is not None and tag[1] == max(epoch.published, default=epoch.start - 1) + 1

    # --- tasks ---

    def _tasks(self) -> Iterator[Violation]:
        """Every task up to the cursor was trained, is held, or ended for a reason that is its own."""
        if self.promise.task_at is None:
            return
        trained = {_task(g) for batch in self.lineage.values() if batch for g in batch.groups}
        held = [_task(group_id) for group_id in self.ledger.groups]
        for task, times in Counter(held).items():
            if times > 1:
                yield Violation("task_repeated", f"task {task} is held as {times} groups")
        ended: dict[str, list[tuple[int, End]]] = {}
        for group_id, end in self.ledger.ends.items():
            ended.setdefault(_task(group_id), []).append((int(group_id.rpartition("#")[2]), end))
        for position in range(self.ledger.place.get("position", 0)):
            task = self.promise.task_at(position)
            if task in trained or task in held:
                continue
            attempt, end = max(ended.get(task, []), key=lambda one: one[0], default=(0, None))
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


def _task(group_id: str) -> str:
    return group_id.rpartition("#")[0]


def _could_sample(
    served: list[tuple[float, int, int]], from_s: float, to_s: float, epoch: int, oldest: int, newest: int
) -> bool:
    begun = [tag for tag in served if tag[0] <= from_s]
    during = begun[-1:] + [tag for tag in served if from_s < tag[0] <= to_s]
    versions = {version for _, _, version in during}
    return oldest in versions and newest in versions and epoch in {its for _, its, _ in during}
