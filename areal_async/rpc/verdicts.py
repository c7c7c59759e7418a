"""What scoring returned. Every request to score ends in exactly one verdict; only a `Score` is a reward."""

from __future__ import annotations

from typing import Literal

import msgspec

VerdictKind = Literal["score", "timeout", "error", "abstain"]


class Parts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rewards of parts of an episode, beside the episode's own."""

    segments: dict[int, float] = {}
    """The rewards of segments, by their index in the episode."""
    agents: dict[str, float] = {}
    """The rewards of agents, by name."""
    units: list[float] = []
    """One for each unit of the episode, in its order; those of units that nobody sampled are ignored."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the verdicts."""


class Score(Outcome, frozen=True, tag="score"):
    """Scoring succeeded: `value` is the episode's reward; `components` names its parts."""

    value: float
    components: dict[str, float] = {}
    parts: Parts | None = None
    sandbox: str = ""
    """The isolation that untrusted code ran in; empty where none ran."""
    detail: str = ""
    """One line on what else is worth knowing, such as a module that a program could not import."""


class Timeout(Outcome, frozen=True, tag="timeout"):
    """The reward did not answer within its deadline of `limit_ms`."""

    limit_ms: int
    sandbox: str = ""


class Failure(Outcome, frozen=True, tag="error"):
    """The reward raised or died. Never a score of 0."""

    kind: str
    message: str
    sandbox: str = ""


class Abstain(Outcome, frozen=True, tag="abstain"):
    """The reward declined to judge."""

    reason: str = ""
    sandbox: str = ""


Verdict = Score | Timeout | Failure | Abstain


def kind_of(verdict: Verdict) -> VerdictKind:
    return verdict.__struct_config__.tag  # type: ignore[return-value]


def message_of(verdict: Verdict) -> str:
    """Return the message of a verdict that is no score, or the detail of a score, on one line."""
    match verdict:
        case Timeout():
            text = f"no answer within {verdict.limit_ms / 1000:g} s"
        case Failure():
            text = verdict.message
        case Abstain():
            text = verdict.reason or "it gave no reason"
        case Score():
            text = verdict.detail
    return " ".join(text.split())
