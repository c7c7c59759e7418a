"""An answer of a server, which must account for each of its units. Pure.

An answer may be made under several versions of the weights: the server says which units are whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.rpc.schema import VersionTag
from areal_async.trajectory.layout import FinishReason, LogprobsOf
from rollout_service.engines.base import EngineError, GenerateResult


class VersionSpan(msgspec.Struct):
    """Units `start` to `end` (not included) were sampled by the weights that the server calls `version`."""

    version: str
    start: int
    end: int


def parse_tag(text: str) -> VersionTag:
    """The tag that a server carries. Raises `EngineError` for a text that is no tag of ours."""
    try:
        return VersionTag.parse(text)
    except ValueError:
        raise EngineError(
            f"the server names its weights {text!r}, which is no version of this project's"
        ) from None


def stamp(
    n_units: int, spans: Sequence[VersionSpan], tag_of: Callable[[str], VersionTag] = parse_tag
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(versions i32[n], epochs i32[n]) of the units. Raises `EngineError` unless the spans, in order, cover
    each unit exactly once: a unit without a version could be trained at a wrong staleness."""
    versions, epochs = np.empty(n_units, np.int32), np.empty(n_units, np.int32)
    at = 0
    for span in spans:
        if span.start != at or not at <= span.end <= n_units:
            raise EngineError(f"the server's versions of an answer of {n_units} units do not fit it: {spans}")
        tag = tag_of(span.version)
        versions[at : span.end], epochs[at : span.end] = tag.version, tag.epoch
        at = span.end
    if at != n_units:
        raise EngineError(f"the server names no version for units {at} to {n_units} of an answer")
    return versions, epochs


def result_of(
    ids: list[int],
    units: Sequence[tuple[int, float]],
    spans: Sequence[VersionSpan] | None,
    *,
    reason: str | None,
    text: str,
    logprobs_of: LogprobsOf,
    tag_of: Callable[[str], VersionTag] = parse_tag,
) -> GenerateResult:
    """What was sampled. `units` has each id with its log-prob in nats, NaN for one that is not finite;
    `spans` are the versions. Raises `EngineError` where the three do not agree, and what `tag_of` raises."""
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"the server ended a request by {reason!r}")
    if [i for i, _ in units] != ids:
        raise EngineError(f"the server gave {len(ids)} ids and log-probs of others: {list(units[:4])}")
    logprobs = np.array([logprob for _, logprob in units], np.float32)
    if not np.isfinite(logprobs).all():
        raise EngineError("the weights give logits that are not finite")
    versions, epochs = stamp(len(ids), spans or (), tag_of)
    return GenerateResult(
        token_ids=np.array(ids, np.int32),
        logprobs=logprobs,
        versions=versions,
        epochs=epochs,
        finish_reason=cast(FinishReason, reason),
        text=text,
        logprobs_of=logprobs_of,
    )
