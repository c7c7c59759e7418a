"""The ledger's own history: which of the buffer's decisions came true, and what they made of every group.

The buffer writes each decision down before it sends it (`decided`), what Redis has confirmed (`confirmed`),
and the whole ledger whenever a front takes it over (`loaded`). From these a second ledger is computed here,
with none of the buffer's code, and compared with each `loaded`: what differs was lost or made up.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Violation:
    promise: str
    """Which promise is broken, in one or two words: `lost`, `trained_twice`, …"""
    text: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


@dataclass
class Held:
    """A group as the fold has it."""

    state: str
    step: int
    stored: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class End:
    """How a group ended: "COMMITTED" or "DROPPED", and the reasons its decision counted."""

    kind: str
    reasons: frozenset[str]
    step: int
    mono_s: float


@dataclass
class Decided:
    """One decision: `fate` is "true", "lost" (confirmed, and not there any more) or "never"."""

    event: Event
    fate: str
    confirmed_s: float | None
    """When the buffer knew that Redis had it; None if it never did."""

    @property
    def mono_s(self) -> float:
        return float(self.event["mono_s"])

    def get(self, name: str, default: Any) -> Any:
        return self.event.get(name, default)


@dataclass
class Front:
    """The reign of one front: what it loaded and what it decided, in order."""

    loaded: Event
    decided: list[Decided]
    lost_confirmed: int = 0
    lost_s: float = 0.0
    """Age of the oldest lost decision when the newest confirmation came."""

    @property
    def identity(self) -> tuple[int, int]:
        return self.loaded["front_epoch"], self.loaded["pid"]


def fronts_of(events: Iterable[Event]) -> list[Front]:
    """The fronts in the order in which they reigned, each decision with its fate."""
    loads: list[Event] = []
    decided: dict[tuple[int, int], list[Event]] = {}
    confirmed: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        if event["event"] == "loaded":
            loads.append(event)
        elif event["event"] in ("decided", "confirmed"):
            kind = decided if event["event"] == "decided" else confirmed
            kind.setdefault((event["front_epoch"], event["pid"]), []).append(event)
    fronts = []
    for number, load in enumerate(loads):
        after = loads[number + 1] if number + 1 < len(loads) else None
        key = (load["front_epoch"], load["pid"])
        fronts.append(_reign(load, after, decided.get(key, []), confirmed.get(key, [])))
    return fronts


def _reign(load: Event, after: Event | None, decided: list[Event], confirmed: list[Event]) -> Front:
    found = None if after is None else after["revision"]
    front = Front(load, [])
    latest_s = 0.0
    highest = list(itertools.accumulate((one["revision"] for one in confirmed), max))
    for event in decided:
        first = bisect.bisect_right(highest, event["revision"])  # the first that confirms a later one
        sure = confirmed[first]["mono_s"] if first < len(confirmed) else None
        if found is not None and event["revision"] >= found:
            fate = "never" if sure is None else "lost"
        elif sure is None and after is None:
            fate = "never"
        else:
            fate = "true"
            if sure is None and after is not None:
                sure = after["mono_s"]
        if fate == "lost":
            front.lost_confirmed += 1
            latest_s = latest_s or max(one["mono_s"] for one in confirmed)
            front.lost_s = max(front.lost_s, latest_s - event["mono_s"])
        front.decided.append(Decided(event, fate, sure))
    return front


@dataclass
class Ledger:
    """The fold. `advance` applies one true decision, `resume` compares with what a front has loaded."""

    groups: dict[str, Held] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)
    """The last end of each group id; an id can live again after an older checkpoint was resumed."""
    unstored: Counter[str] = field(default_factory=Counter)
    place: dict[str, int] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def resume(self, load: Event, *, first: bool, lost: bool) -> Iterator[Violation]:
        found = {id_: Held(state, step, set(stored)) for id_, (state, step, stored) in load["groups"].items()}
        if first and found:
            yield Violation("log", f"the first front found {len(found)} groups that no event tells of")
        for group_id in () if first else sorted(self.groups.keys() | found.keys()):
            mine, theirs = self.groups.get(group_id), found.get(group_id)
            if mine != theirs:
                yield Violation(
                    "lost", f"front {load['front_epoch']} found {group_id} as {theirs}, not {mine}"
                )
        self.groups = found
        for group_id in found:
            self.ends.pop(group_id, None)
        place = _place_of(load)
        if not first and place != self.place:
            yield Violation("lost", f"front {load['front_epoch']} found {place}, not {self.place}")
        if not first and not lost and self.place:
            yield from _monotone(self.place, place, f"front {load['front_epoch']}")
        self.place = place

    def advance(self, decision: Decided) -> Iterator[Violation]:
        event, counts = decision.event, decision.get("counts", {})
        name = f"{event['command']} at revision {event['revision']} of front {event['front_epoch']}"
        self.reasons.update(counts)
        ended: Counter[str] = Counter()
        for group_id, (was, becomes, step) in decision.get("moved", {}).items():
            held = self.groups.get(group_id)
            if (held.state if held else "") != was:
                yield Violation("log", f"{name}: {group_id} was {held}, not {was}")
            if becomes:
                self.groups[group_id] = Held(becomes, step, held.stored if held else set())
                self.ends.pop(group_id, None)
                continue
            self.groups.pop(group_id, None)
            covered = was in ("TRAINED", "BATCHED") and ended["COMMITTED"] < counts.get("committed", 0)
            kind = "COMMITTED" if covered else "DROPPED"
            ended[kind] += 1
            reasons = frozenset(reason for reason in counts if reason.startswith("dropped"))
            self.ends[group_id] = End(kind, reasons, step, decision.mono_s)
        if ended["COMMITTED"] != counts.get("committed", 0):
            yield Violation(
                "no_reason",
                f"{name}: {ended['COMMITTED']} groups committed, counted {counts.get('committed', 0)}",
            )
        dropped = sum(times for reason, times in counts.items() if reason.startswith("dropped:"))
        if ended["DROPPED"] > dropped:
            yield Violation("no_reason", f"{name}: {ended['DROPPED']} groups dropped, reasons for {dropped}")
        yield from self._samples(decision, name)
        place = _place_of(event)
        if event["command"] != "OpenedWith":
            yield from _monotone(self.place, place, name)
        elif self.place and place["trainer_epoch"] <= self.place["trainer_epoch"]:
            yield Violation("goes_back", f"{name}: trainer epoch {place['trainer_epoch']} is not new")
        self.place = place

    def _samples(self, decision: Decided, name: str) -> Iterator[Violation]:
        for episode_id, *_ in decision.get("stored", []):
            group_id, sample = place_of(episode_id)
            if group_id in self.groups:
                self.groups[group_id].stored.add(sample)
        unstored = decision.get("unstored", [])
        for episode_id in unstored:
            group_id, sample = place_of(episode_id)
            self.unstored[episode_id] += 1
            if group_id in self.groups:
                self.groups[group_id].stored.discard(sample)
        counts = decision.get("counts", {}).items()
        told = sum(n for reason, n in counts if reason.startswith(("episode_dropped:", "episode_masked:")))
        if len(unstored) > told:
            yield Violation("no_reason", f"{name}: {len(unstored)} episodes dropped, reasons for {told}")


def _place_of(event: Event) -> dict[str, int]:
    return {name: event[name] for name in ("trainer_epoch", "v_train", "checkpoint", "position")}


def _monotone(before: dict[str, int], after: dict[str, int], name: str) -> Iterator[Violation]:
    for field_name in before:
        if after[field_name] < before[field_name]:
            yield Violation("goes_back", f"{name}: {field_name} {before[field_name]} → {after[field_name]}")


def place_of(episode_id: str) -> tuple[str, int]:
    group_id, _, sample = episode_id.rpartition(".")
    return group_id, int(sample)
