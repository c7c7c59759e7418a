"""An answer made under several versions of the weights: which unit is whose. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_async.rpc.messages import VersionTag
from rollout_service.engines.base import EngineError

_TAG = re.compile(r"e(0|[1-9][0-9]*)-v(0|[1-9][0-9]*)")


def format_tag(tag: VersionTag) -> str:
    """A tag as the text that a server carries: `e1-v7`."""
    return f"e{tag.epoch}-v{tag.version}"


def parse_tag(text: str) -> VersionTag:
    """The inverse of `format_tag`. Raises `EngineError` for a text that is no tag of ours."""
    match = _TAG.fullmatch(text)
    if match is None:
        raise EngineError(f"the server names its weights {text!r}, which is no version of this project's")
    return VersionTag(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Span:
    """Units `start` to `stop` (not included) of an answer were sampled by the weights `tag`."""

    tag: VersionTag
    start: int
    stop: int


def stamp(n_units: int, spans: Sequence[Span]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(versions `[n]`, epochs `[n]`) of the units. Raises `EngineError` unless the spans, in order, cover
    each unit exactly once: a unit without a version could be trained at a wrong staleness."""
    versions, epochs = np.empty(n_units, np.int32), np.empty(n_units, np.int32)
    at = 0
    for span in spans:
        if span.start != at or not at <= span.stop <= n_units:
            raise EngineError(f"the server's versions of an answer of {n_units} units do not fit it: {spans}")
        versions[at : span.stop], epochs[at : span.stop] = span.tag.version, span.tag.epoch
        at = span.stop
    if at != n_units:
        raise EngineError(f"the server names no version for units {at} to {n_units} of an answer")
    return versions, epochs
