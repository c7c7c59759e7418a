"""Conversion of results and errors of rewards to verdicts that are validated, finite and of bounded size.
Pure.

This module does not import numpy, because only a reward that names parts of an episode needs to decode the
episode.
"""

from __future__ import annotations

import inspect
import math
import os
import sysconfig
import traceback
from numbers import Real
from pathlib import Path

from areal_async.base.verdicts import Abstain, Failure, FaultOf, Parts, Score, Timeout, Verdict
from reward_service import signatures
from reward_service.inputs import RewardInput

LONGEST_MESSAGE = 1000  # most characters of an error's text in a verdict
LONGEST_NAME = 100  # most characters of the name of a component, an agent, a kind or a sandbox
MOST_COMPONENTS = 64
LIBRARIES = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
    f"{os.path.dirname(__file__)}/",
    f"{Path(inspect.getfile(Score)).parents[1]}/",
    "<frozen ",
)
"""Folders of installed code, which is not the user's."""


class NoVerdict(Exception):
    """The result of a reward cannot be used. `verdict` is the error that the caller must use as the
    verdict."""

    def __init__(self, message: str, kind: str = "return_type") -> None:
        super().__init__(message)
        self.verdict = Failure(kind, message)


def as_verdict(result: object, given: RewardInput | None = None) -> Verdict:
    """Return the verdict for a reward's result about `given`.

    The verdict is a score only if every number in the result is real and finite, and every segment, agent and
    unit named in it belongs to the episode. A reward may also return `Failure` and `Timeout`.
    """
    try:
        match result:
            case Score():
                return _score(result, given)
            case Abstain():
                return Abstain(clip(str(result.reason)), _name(result.sandbox, "the sandbox"))
            case Failure():
                kind, sandbox = _name(result.kind, "the kind"), _name(result.sandbox, "the sandbox")
                return Failure(kind, clip(str(result.message)), sandbox, _fault(result.fault))
            case Timeout():
                limit_ms = int(_finite(result.limit_ms, "limit_ms"))
                return Timeout(limit_ms, _name(result.sandbox, "the sandbox"))
        return Score(_finite(result, "the score"))
    except NoVerdict as refused:
        return refused.verdict


def as_verdicts(results: object, inputs: list[RewardInput]) -> list[Verdict]:
    """Return the verdicts for the list of results of a batched or group reward."""
    if not isinstance(results, list | tuple) or len(results) != len(inputs):
        got = f"{len(results)}" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
        wanted = f"a list with one result for each of its {len(inputs)} inputs"
        return [Failure("return_type", f"it must return {wanted}, not {clip(got)}")] * len(inputs)
    return [as_verdict(result, given) for result, given in zip(results, inputs, strict=True)]


def _score(score: Score, given: RewardInput | None) -> Score:
    value = _finite(score.value, "the score")
    if not isinstance(score.components, dict) or len(score.components) > MOST_COMPONENTS:
        raise NoVerdict(f"components must be a dict of at most {MOST_COMPONENTS} numbers")
    components = {
        _name(name, "the name of a component"): _finite(part, f"component {clip(str(name))!r}")
        for name, part in score.components.items()
    }
    parts = None if score.parts is None else _parts(score.parts, given)
    return Score(value, components, parts, _name(score.sandbox, "the sandbox"), clip(str(score.detail)))


def _parts(parts: object, given: RewardInput | None) -> Parts:
    if not isinstance(parts, Parts):
        raise NoVerdict(f"parts is a {_kind(parts)}: give Parts(segments=, agents=, units=)")
    for field, kind in (("segments", dict), ("agents", dict), ("units", list | tuple)):
        if not isinstance(getattr(parts, field), kind):
            raise NoVerdict(f"parts.{field} is a {_kind(getattr(parts, field))}")
    if given is not None and given.blob:
        _parts_exist(parts, given)
    segments = {}
    for index, value in parts.segments.items():
        if not isinstance(index, int):
            raise NoVerdict(f"parts.segments has the key {clip(repr(index))}: give its index")
        segments[int(index)] = _finite(value, f"the reward of segment {index}")
    agents = {
        _name(name, "the name of an agent"): _finite(value, f"the reward of agent {clip(str(name))!r}")
        for name, value in parts.agents.items()
    }
    return Parts(segments, agents, [_finite(value, "the reward of a unit") for value in parts.units])


def _parts_exist(parts: Parts, given: RewardInput) -> None:
    """Raise `NoVerdict` unless every segment, agent and unit that the result names belongs to the episode."""
    episode = given.episode
    segments, units = len(episode.segments.kind), episode.n_units
    wrong = [index for index in parts.segments if not (isinstance(index, int) and 0 <= index < segments)]
    if wrong:
        raise NoVerdict(f"there is no segment {clip(repr(wrong[0]))}: the episode has {segments}")
    names = {agent.name for agent in episode.header.agents}
    for name in parts.agents.keys() - names:
        raise NoVerdict(f"there is no agent {clip(str(name))!r}: it has {', '.join(names)}")
    if parts.units and len(parts.units) != units:
        raise NoVerdict(f"parts.units holds {len(parts.units)} numbers, and the episode {units} units")


def _finite(value: object, what: str) -> float:
    if not isinstance(value, Real):
        raise NoVerdict(f"{what} is a {_kind(value)}: return a number, a Score or an Abstain")
    try:
        number = float(value)
    except OverflowError:
        raise NoVerdict(f"{what} is too large for a float", "not_finite") from None
    if not math.isfinite(number):
        raise NoVerdict(f"{what} is {number}", "not_finite")
    return number


def _name(name: object, what: str) -> str:
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise NoVerdict(f"{what} must be a text of at most {LONGEST_NAME} characters")
    return clip(name)


def _fault(value: object) -> FaultOf:
    try:
        return FaultOf(value if isinstance(value, str) else "")
    except ValueError:
        raise NoVerdict(f"the fault is {clip(repr(value))}: give FaultOf.ANSWER or none") from None


def _kind(value: object) -> str:
    return clip(type(value).__name__)


def describe(error: BaseException) -> str:
    """Return a text such as `ValueError: text (line 12 of reward.py)`.

    Its length is bounded, also if the error's own text is long or cannot be computed. The line is the last
    executed line of the user's own code, not of a library.
    """
    try:
        text = str(error)
    except Exception as second:
        text = f"<no text: {type(second).__name__}>"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    if not own and frames and frames[-1].filename != signatures.__file__:
        own = frames  # a built-in reward
    where = f" (line {own[-1].lineno} of {os.path.basename(own[-1].filename)})" if own else ""
    return clip(f"{type(error).__name__}: {text}" if text else type(error).__name__) + where


def clip(text: str) -> str:
    """Return the first `LONGEST_MESSAGE` characters of `text`, without characters that UTF-8 cannot
    encode."""
    short = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "…"
    return short.encode("utf-8", "replace").decode("utf-8")
