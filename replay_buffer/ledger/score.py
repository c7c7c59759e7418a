"""A score as it may be stored: checked, bounded by its episode, and back as it travels to the trainer."""

from __future__ import annotations

import math
import sys
from array import array

from areal_async.rpc.verdicts import Abstain, Failure, Parts, Score, Timeout, Verdict
from replay_buffer.ledger.records import EpisodeRecord, StoredParts

MOST_NAMES = 256
"""Components of one score, and agents that it names."""
LARGEST_UNIT = 3.4028234e38
"""Of float32."""


def checked(verdict: Verdict, episode: EpisodeRecord) -> Verdict:
    """A score whose numbers are numbers, and no more of them than the episode has parts. One that is not so
    is an error of the reward, never a 0."""
    if not isinstance(verdict, Score):
        return verdict
    if not math.isfinite(verdict.value):
        return Failure("not_finite", f"the reward returned {verdict.value}")
    if len(verdict.components) > MOST_NAMES:
        return Failure("return_type", f"{len(verdict.components)} components are more than {MOST_NAMES}")
    if not all(map(math.isfinite, verdict.components.values())):
        return Failure("not_finite", "a component is not a finite number")
    return verdict if verdict.parts is None else _problem(verdict.parts, episode) or verdict


def _problem(parts: Parts, episode: EpisodeRecord) -> Failure | None:
    """What is wrong with the rewards of parts; None when nothing is."""
    what = ""
    if len(parts.units) not in (0, episode.n_units):
        what = f"{len(parts.units)} rewards of units for an episode of {episode.n_units} units"
    elif len(parts.segments) > episode.n_units or any(segment < 0 for segment in parts.segments):
        what = f"rewards of segments {sorted(parts.segments)[:5]} in an episode of {episode.n_units} units"
    elif len(parts.agents) > MOST_NAMES:
        what = f"rewards of {len(parts.agents)} agents are more than {MOST_NAMES}"
    if what:
        return Failure("return_type", what)
    if not all(map(math.isfinite, (*parts.segments.values(), *parts.agents.values()))):
        return Failure("not_finite", "the reward of a segment or agent is not a finite number")
    if not all(abs(value) <= LARGEST_UNIT for value in parts.units):
        return Failure("not_finite", "the reward of a unit is not a finite number of single precision")
    return None


def stored_parts(parts: Parts | None) -> StoredParts | None:
    """As the ledger keeps them: rewards of units in single precision."""
    if parts is None:
        return None
    return StoredParts(parts.segments, parts.agents, _little_endian(array("f", parts.units)).tobytes())


def parts_of(episode: EpisodeRecord) -> Parts | None:
    """As they travel."""
    stored = episode.parts
    if stored is None:
        return None
    return Parts(stored.segments, stored.agents, _little_endian(array("f", stored.units)).tolist())


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def detailed_kind(verdict: Verdict) -> str:
    """`timeout`, `abstain`, or `error:` and the failure's own kind."""
    match verdict:
        case Timeout():
            return "timeout"
        case Failure():
            return f"error:{verdict.kind[:40]}"
        case Abstain():
            return "abstain"
        case Score():
            return "score"


def message_of(verdict: Verdict) -> str:
    """What a verdict that is no score says, on one line."""
    match verdict:
        case Timeout():
            text = f"no answer within {verdict.limit_ms / 1000:g} s"
        case Failure():
            text = verdict.message
        case Abstain():
            text = verdict.reason or "it gave no reason"
        case Score():
            text = ""
    return " ".join(text.split())
