"""Rules for keeping, evaluating and overwriting snapshots. Pure; callers pass the time.

These snapshots are kept:
- the newest `keep`
- snapshots pinned for evaluation, until they are evaluated
- snapshots that were announced to a receiver, until it acknowledges them or its hold expires
- snapshots that a delta in progress reads

At most `MAX_PENDING` pinned snapshots wait for evaluation, in addition to version 0 and the final version.
Beyond this limit the oldest is dropped, so that slow evaluation does not fill the memory. Each receiver holds
at most `MAX_HOLDS` snapshots per purpose.

The bytes of a retired snapshot may be overwritten (`reusable`), unless a hold on it expired without an
acknowledgement. In that case a process may still be reading the files, so they may only be unlinked.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from areal_async.base.versions import VersionTag

Purpose = Literal["serve", "evaluate"]
MAX_PENDING = 2
MAX_HOLDS = 2


class Retired(NamedTuple):
    tag: VersionTag
    reusable: bool


class RetentionPolicy:
    """The kept snapshots. All times are milliseconds of one monotonic clock."""

    def __init__(self, keep: int, hold_ms: int) -> None:
        self._keep = keep
        self._hold_ms = hold_ms
        self._tags: list[VersionTag] = []
        self._final: VersionTag | None = None
        self._pins: list[VersionTag] = []
        self._holds: dict[tuple[str, Purpose], dict[VersionTag, int]] = {}
        self._doubtful: set[VersionTag] = set()
        self._used: Counter[VersionTag] = Counter()

    @property
    def newest(self) -> VersionTag | None:
        return self._tags[-1] if self._tags else None

    @property
    def pending_evaluations(self) -> list[VersionTag]:
        """Return the pinned versions that are not yet evaluated, oldest first."""
        return list(self._pins)

    @property
    def n_pinned_alone(self) -> int:
        """Return the number of snapshots that are kept only for their evaluation."""
        return len(set(self._pins) - {*self._tags[-self._keep :]})

    def is_final(self, tag: VersionTag) -> bool:
        return tag == self._final

    def add(self, tag: VersionTag, *, evaluate: bool, final: bool) -> None:
        """Add a new, complete snapshot. Raises `ValueError` unless it is newer than all before it."""
        if self._tags and tag <= self._tags[-1]:
            raise ValueError(f"{tag} is not newer than {self._tags[-1]}")
        self._tags.append(tag)
        if final:
            self._final = tag
        if evaluate:
            self._pins.append(tag)
            told = {
                held for (_, purpose), holds in self._holds.items() if purpose == "evaluate" for held in holds
            }
            waiting = [p for p in self._pins if p.version != 0 and p != self._final and p not in told]
            for pin in waiting[:-MAX_PENDING]:
                self._pins.remove(pin)

    @property
    def previous(self) -> VersionTag | None:
        """Return the snapshot before the newest. It is the base of a delta to the newest."""
        return self._tags[-2] if len(self._tags) > 1 else None

    def use(self, *tags: VersionTag) -> None:
        """Keep the snapshots until `release` is called for them."""
        self._used.update(tags)

    def release(self, *tags: VersionTag) -> None:
        self._used.subtract(tags)
        self._used += Counter()  # drops entries with count 0

    def serve(self, receiver: str, after: VersionTag | None, now_ms: int) -> VersionTag | None:
        """Return the newest snapshot if it is newer than `after`, and hold it for the receiver."""
        newest = self.newest
        if newest is None or (after is not None and newest <= after):
            return None
        self._hold(receiver, "serve", newest, now_ms)
        return newest

    def evaluate(self, receiver: str, after: VersionTag | None, now_ms: int) -> VersionTag | None:
        """Return the oldest pinned snapshot newer than `after`, and hold it for the receiver."""
        tag = next((pin for pin in self._pins if after is None or pin > after), None)
        if tag is not None:
            self._hold(receiver, "evaluate", tag, now_ms)
        return tag

    def acknowledge(self, receiver: str, purpose: Purpose, tag: VersionTag) -> None:
        """End the receiver's holds on `tag` and on all older snapshots. A repeated call is harmless."""
        holds = self._holds.get((receiver, purpose), {})
        for held in [held for held in holds if held <= tag]:
            del holds[held]
        if not holds:
            self._holds.pop((receiver, purpose), None)
        if purpose == "evaluate" and tag in self._pins:
            self._pins.remove(tag)

    def retire(self, now_ms: int) -> list[Retired]:
        """Forget every snapshot that no rule keeps, and return the forgotten snapshots."""
        self._expire(now_ms)
        kept = {*self._tags[-self._keep :], *self._pins, *self._used}.union(*self._holds.values())
        gone = [tag for tag in self._tags if tag not in kept]
        self._tags = [tag for tag in self._tags if tag in kept]
        retired = [Retired(tag, tag not in self._doubtful) for tag in gone]
        self._doubtful.difference_update(gone)
        return retired

    def _hold(self, receiver: str, purpose: Purpose, tag: VersionTag, now_ms: int) -> None:
        holds = self._holds.setdefault((receiver, purpose), {})
        holds.pop(tag, None)
        holds[tag] = now_ms + self._hold_ms
        while len(holds) > MAX_HOLDS:
            oldest = min(holds)
            del holds[oldest]
            self._doubtful.add(oldest)

    def _expire(self, now_ms: int) -> None:
        for key, holds in list(self._holds.items()):
            for tag in [tag for tag, end_ms in holds.items() if end_ms <= now_ms]:
                del holds[tag]
                self._doubtful.add(tag)
            if not holds:
                del self._holds[key]
