"""Results of scoring. Every scoring request ends in exactly one verdict, and only a `Score` is a reward.

A model must not be able to avoid its judgement by making the reward fail. Each failure therefore names the
side at fault. If the answer itself is at fault, the failure counts as a score (`settled`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

VerdictKind = Literal["score", "timeout", "error", "abstain"]


class FaultOf(StrEnum):
    """The side at fault for a failed judgement."""

    ANSWER = "answer"
    """The answer is at fault: the reward would have judged another answer to the same task.

    The episode gets the score `reward.on_fault.score`.
    """
    INFRASTRUCTURE = "infrastructure"
    """Any other cause, including a bug of the reward or the workflow. The episode has no score and is tried
    again."""


class Parts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rewards of parts of an episode, beside the episode's own reward."""

    segments: dict[int, float] = {}
    """Rewards of segments, by their index in the episode."""
    agents: dict[str, float] = {}
    """Rewards of agents, by name."""
    units: list[float] = []
    """One reward for each unit of the episode, in order. Rewards of units that no policy sampled are
    ignored."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the verdicts."""


class Score(Outcome, frozen=True, tag="score"):
    """A successful score. `value` is the episode's reward, and `components` are its named parts."""

    value: float
    components: dict[str, float] = {}
    parts: Parts | None = None
    sandbox: str = ""
    """Name of the isolation in which untrusted code ran, or empty if none ran."""
    detail: str = ""
    """One line of further information, such as a module that a program could not import."""
    at_fault: str = ""
    """Reason, as `kind: message`, if the answer was at fault and could not be judged.

    `value` is then `reward.on_fault.score`.
    """


class Timeout(Outcome, frozen=True, tag="timeout"):
    """The reward did not answer within its deadline of `limit_ms`."""

    limit_ms: int
    sandbox: str = ""


class Failure(Outcome, frozen=True, tag="error"):
    """The reward raised an error, died, or could not judge the answer.

    It counts as a score only if `fault` is `FaultOf.ANSWER`.
    """

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
    """Return the final verdict. If the answer is at fault, a failure becomes a `Score` with the value
    `score`."""
    if isinstance(verdict, Failure) and verdict.fault is FaultOf.ANSWER:
        return Score(score, sandbox=verdict.sandbox, at_fault=f"{verdict.kind}: {verdict.message}")
    return verdict


def message_of(verdict: Verdict) -> str:
    """Return one line about the verdict: the reason if there is no score or the answer was at fault,
    otherwise the detail of the score."""
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
