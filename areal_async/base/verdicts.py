"""Results of scoring. Every request to score ends in exactly one verdict; only a `Score` is a reward.

A model must not be able to choose that it is not judged. So each failure says whose fault it was, and one
that is the answer's own counts as a score (`settled`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

VerdictKind = Literal["score", "timeout", "error", "abstain"]


class FaultOf(StrEnum):
    """The side at fault for something that could not be judged."""

    ANSWER = "answer"
    """The answer's own: another answer to the same task would have been judged. Scored
    `reward.on_fault.score`."""
    INFRASTRUCTURE = "infrastructure"
    """Anything else, a bug of the reward or of the workflow included: no score, and tried again."""


class Parts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rewards of parts of an episode, beside the episode's own."""

    segments: dict[int, float] = {}
    """The rewards of segments, by their index in the episode."""
    agents: dict[str, float] = {}
    """The rewards of agents, by name."""
    units: list[float] = []
    """One for each unit of the episode, in its order. Values of units that were not sampled are ignored."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the verdicts."""


class Score(Outcome, frozen=True, tag="score"):
    """Scoring succeeded: `value` is the episode's reward; `components` names its parts."""

    value: float
    components: dict[str, float] = {}
    parts: Parts | None = None
    sandbox: str = ""
    """The isolation in which untrusted code ran; empty if none ran."""
    detail: str = ""
    """One line on what else is worth knowing, such as a module that a program could not import."""
    at_fault: str = ""
    """Why the answer could not be judged, where that was its own fault, as `kind: message`; `value` is then
    `reward.on_fault.score`."""


class Timeout(Outcome, frozen=True, tag="timeout"):
    """The reward did not answer within its deadline of `limit_ms`."""

    limit_ms: int
    sandbox: str = ""


class Failure(Outcome, frozen=True, tag="error"):
    """The reward raised, died, or could not judge the answer. A score only where `fault` is the answer."""

    kind: str
    message: str
    sandbox: str = ""
    fault: FaultOf = FaultOf.INFRASTRUCTURE


class Abstain(Outcome, frozen=True, tag="abstain"):
    """The reward declined to judge."""

    reason: str = ""
    sandbox: str = ""


Verdict = Score | Timeout | Failure | Abstain


def kind_of(verdict: Verdict) -> VerdictKind:
    return verdict.__struct_config__.tag  # type: ignore[return-value]


def settled(verdict: Verdict, score: float) -> Verdict:
    """Return the final verdict: a failure by the answer's own fault becomes the score `score`."""
    if isinstance(verdict, Failure) and verdict.fault is FaultOf.ANSWER:
        return Score(score, sandbox=verdict.sandbox, at_fault=f"{verdict.kind}: {verdict.message}")
    return verdict


def message_of(verdict: Verdict) -> str:
    """Return the reason of a verdict that is no score or of an answer at fault, or the detail of a score, on
    one line."""
    match verdict:
        case Timeout():
            text = f"no answer within {verdict.limit_ms / 1000:g} s"
        case Failure():
            text = verdict.message
        case Abstain():
            text = verdict.reason or "it gave no reason"
        case Score():
            text = verdict.at_fault or verdict.detail
    return " ".join(text.split())
