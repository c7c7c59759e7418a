"""Why groups were dropped and episodes masked, as the buffer's metrics and log say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_async.status.samples import Samples, by_label

COUNTER = "areal_buffer_transitions_total"
DROPPED, MASKED = "dropped:", "episode_masked:"
BY_VERDICT = "verdict_"
MOST_KINDS = 8


@dataclass(frozen=True)
class NoScoreText:
    """Verdicts of one kind that were no score: how many, and what the newest of them says."""

    kind: str
    count: int
    message: str

    @property
    def text(self) -> str:
        return f"{self.kind} ×{self.count}: {self.message}"


@dataclass(frozen=True)
class Dropped:
    """What a run has lost so far, the most frequent reason first."""

    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups dropped, by reason."""
    masked: Mapping[str, int] = field(default_factory=dict)
    """Episodes masked, by the kind of their verdict."""
    no_scores: tuple[NoScoreText, ...] = ()
    """By kind, the newest last."""

    @property
    def by_verdict(self) -> int:
        """Groups dropped because scoring them gave no score."""
        return sum(count for reason, count in self.groups.items() if reason.startswith(BY_VERDICT))

    @property
    def groups_text(self) -> str:
        """Empty when none was dropped."""
        return f"{_total(self.groups)} groups ({_reasons(self.groups)})" if self.groups else ""

    @property
    def masked_text(self) -> str:
        """Empty when none was masked."""
        return f"{_total(self.masked)} episodes masked ({_reasons(self.masked)})" if self.masked else ""

    @property
    def text(self) -> str:
        """One line; empty when nothing was lost."""
        return ", ".join(part for part in (self.groups_text, self.masked_text) if part)


class DropWatch:
    """Collects it: `feed_samples` with what the buffer exposes, `feed_log` with its records."""

    def __init__(self) -> None:
        self._groups: Mapping[str, int] = {}
        self._masked: Mapping[str, int] = {}
        self._no_scores: dict[str, NoScoreText] = {}
        self._by_verdict_then = 0

    def feed_samples(self, samples: Samples) -> None:
        lost = lost_in(dict(by_label(samples, COUNTER, "reason")))
        self._groups, self._masked = lost.groups, lost.masked

    def feed_log(self, record: Mapping[str, Any]) -> None:
        kind, count = record.get("kind"), record.get("count")
        if isinstance(kind, str) and isinstance(count, int):
            self._no_scores.pop(kind, None)
            self._no_scores[kind] = NoScoreText(kind, count, str(record.get("message", "")))
            for oldest in list(self._no_scores)[:-MOST_KINDS]:
                del self._no_scores[oldest]

    def mark(self) -> None:
        """The trainer gets on: what is dropped from here on may be why it does not."""
        self._by_verdict_then = self.so_far().by_verdict

    @property
    def by_verdict_since(self) -> int:
        """Groups dropped since the mark because scoring them gave no score."""
        return max(0, self.so_far().by_verdict - self._by_verdict_then)

    @property
    def newest(self) -> str:
        """What the newest verdict without a score says; empty when nothing is known of it."""
        return next((note.text for note in reversed(self._no_scores.values())), "")

    def so_far(self) -> Dropped:
        return Dropped(self._groups, self._masked, tuple(self._no_scores.values()))


def lost_in(transitions: Mapping[str, float]) -> Dropped:
    """What the buffer's counts of transitions say was lost."""
    return Dropped(_under(transitions, DROPPED), _under(transitions, MASKED))


def _under(counts: Mapping[str, float], prefix: str) -> dict[str, int]:
    found = {
        reason.removeprefix(prefix): int(count)
        for reason, count in counts.items()
        if reason.startswith(prefix) and count
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _total(counts: Mapping[str, int]) -> int:
    return sum(counts.values())


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items())
