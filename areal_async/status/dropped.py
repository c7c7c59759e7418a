"""Why groups were dropped and episodes masked, as the buffer says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_async.rpc.messages import NoScore

DROPPED, MASKED = "dropped:", "episode_masked:"
BY_VERDICT = "verdict_"


@dataclass(frozen=True)
class DropReport:
    """What a run has lost so far, the most frequent reason first."""

    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups dropped, by reason."""
    masked: Mapping[str, int] = field(default_factory=dict)
    """Episodes masked, by the kind of their verdict."""
    no_scores: Sequence[NoScore] = ()
    """Verdicts without a score by kind, the newest last."""

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
    def newest(self) -> str:
        """What the newest verdict without a score says; empty when there is none."""
        return no_score_text(self.no_scores[-1]) if self.no_scores else ""

    @property
    def text(self) -> str:
        """One line; empty when nothing was lost."""
        return ", ".join(part for part in (self.groups_text, self.masked_text) if part)


def lost_in(transitions: Mapping[str, float], no_scores: Sequence[NoScore] = ()) -> DropReport:
    """What the buffer's counts of transitions, and its verdicts without a score, say was lost."""
    newest_last = sorted(no_scores, key=lambda note: -note.age_ms)
    return DropReport(_under(transitions, DROPPED), _under(transitions, MASKED), newest_last)


def no_score_text(note: NoScore) -> str:
    return f"{note.kind} ×{note.count}: {note.message}"


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
