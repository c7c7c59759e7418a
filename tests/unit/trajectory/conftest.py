"""Random episodes, told twice: as an `Episode`, and as the plain log of an engine that knows no tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from areal_async.trajectory import Call, Episode, EpisodeBuilder, EpisodeLimits, Sampling, SegmentKind
from areal_async.trajectory.layout import DEFAULT_LIMITS, SegmentFlag, Units


@dataclass
class EngineCall:
    """What the engine saw and said in one call, token by token."""

    segment: int
    seen: list[int]
    said: list[int]
    logprobs: list[float]
    versions: list[int]
    epochs: list[int]
    mask: list[int]


@dataclass
class History:
    """An episode and the log it must agree with."""

    episode: Episode
    calls: list[EngineCall] = field(default_factory=list)
    contexts: dict[int, list[int]] = field(default_factory=dict)
    """Per segment, all tokens from the root to its end."""

    def trained(self, what: str) -> list[int]:
        return [x for call in self.calls for x, m in zip(getattr(call, what), call.mask, strict=True) if m]


_tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
_logprobs = st.floats(-50, 0, width=32)
_names = st.sampled_from(["value", "ref", "prox", "entropy"])
_samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 100),
    max_new_tokens=st.integers(1, 4096),
    stop=st.lists(st.text(max_size=4), max_size=2).map(tuple),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@st.composite
def histories(draw: st.DrawFn, max_segments: int = 8) -> History:
    policies = draw(st.sampled_from([("policy",), ("policy", "critic")]))
    agents = [("main", 0), ("judge", len(policies) - 1)][: draw(st.integers(1, 2))]
    builder = EpisodeBuilder(
        "job", "t:0:0", "t:0:0#1", draw(st.integers(0, 9)), draw(st.integers(0, 3)), policies, agents
    )
    contexts: dict[int, list[int]] = {}
    calls: list[EngineCall] = []
    for index in range(draw(st.integers(1, max_segments))):
        parent = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        seen = contexts[parent] if parent is not None else []
        kind = draw(st.sampled_from(SegmentKind))
        ids = draw(_tokens)
        agent, turn = draw(st.integers(0, len(agents) - 1)), draw(st.integers(0, 5))
        exactly = {"min_size": len(ids), "max_size": len(ids)}
        if kind == SegmentKind.SAMPLED:
            n = len(ids)
            mask = draw(st.one_of(st.none(), st.lists(st.integers(0, 1), **exactly)))
            one_epoch = draw(st.booleans())
            one = draw(st.integers(0, 3))
            epochs = [one] * n if one_epoch else draw(st.lists(st.integers(0, 2), **exactly))
            call = EngineCall(
                segment=index,
                seen=seen,
                said=ids,
                logprobs=draw(st.lists(_logprobs, **exactly)),
                versions=draw(st.lists(st.integers(0, 4), **exactly)),
                epochs=epochs,
                mask=[1] * n if mask is None else mask,
            )
            got = builder.sampled(
                ids,
                call.logprobs,
                call.versions,
                parent=parent,
                call=Call(
                    sampling=draw(_samplings),
                    finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
                ),
                epoch=one if one_epoch else epochs,
                agent=agent,
                turn=turn,
                mask=mask,
            )
            calls.append(call)
        else:
            got = builder.observed(kind, ids, parent, agent, turn)
        assert got == index
        contexts[index] = seen + ids
        if draw(st.booleans()):
            builder.reward(index, draw(st.floats(-10, 10, width=32)))
        if draw(st.booleans()):
            builder.anchor(index, draw(st.text(max_size=4)))
        if draw(st.booleans()):
            builder.flag(index, SegmentFlag.TERMINAL)
        if draw(st.booleans()):
            name = draw(_names)
            builder.column(name, index, draw(st.lists(_logprobs, **exactly)))
    builder.text(prompt=draw(st.text(max_size=9)), response=draw(st.text(max_size=9)))
    builder.meta(
        note=draw(st.one_of(st.none(), st.integers(-9, 9), st.lists(st.text(max_size=3), max_size=3)))
    )
    return History(builder.build(), calls, contexts)


@pytest.fixture
def two_turns() -> EpisodeBuilder:
    """prompt(3) → sampled(2) → tool(2) → sampled(3), and a second answer(2) to the prompt.

    10 units before the branch, 12 in all; versions 4 to 6, epochs 0 and 1, a value column, one medium.
    """
    sampling = Sampling(
        temperature=0.8, top_p=0.95, top_k=50, max_new_tokens=64, stop=("\n",), seed=2**63 + 5
    )
    builder = EpisodeBuilder("job", "abcdef01:3:0", "abcdef01:3:0#1", 2, attempt=1)
    prompt = builder.prompt([11, 12, 13])
    first = builder.sampled(
        [21, 22], [-0.5, -0.25], [4, 4], parent=prompt, call=Call(sampling=sampling), epoch=0
    )
    tool = builder.observed(SegmentKind.TOOL, [31, 32], first, turn=1)
    second = builder.sampled(
        np.array([41, 42, 43]),
        np.array([-1.5, -0.125, -2.0]),
        np.array([5, 5, 6], np.int32),
        parent=tool,
        call=Call(sampling=sampling, finish_reason="length"),
        epoch=[0, 0, 1],
        turn=1,
    )
    builder.sampled(
        [51, 52], [-1.0, -3.0], 6, parent=prompt, call=Call(sampling=sampling, finish_reason="abort"), epoch=1
    )
    builder.reward(second, 0.5)
    builder.episode_reward("tests_passed", 0.75)
    builder.anchor(tool, "state-7")
    builder.flag(second, SegmentFlag.TRUNCATED)
    builder.column("value", second, [0.1, 0.2, 0.3])
    builder.media(prompt, "sha256:00ff", "image/png", 1234, start=1, n_units=2)
    builder.text(prompt="what is this?", response="a größer plot")
    builder.meta(tool_seconds=0.5, tags=["a", "b"], nested={"k": [1, None, True]})
    return builder


def add_call(builder: EpisodeBuilder, ids: Any, logprobs: Any, versions: Any = 0, **how: Any) -> int:
    """Add a sampled segment of the builder's first agent, which begins a tree unless `parent` is given."""
    call = Call(sampling=how.pop("sampling", Sampling()))
    return builder.sampled(ids, logprobs, versions, call=call, **{"parent": None} | how)


def one_call(ids: Any, logprobs: Any, versions: Any = 0, **how: Any) -> Episode:
    """An episode of nothing else."""
    builder = EpisodeBuilder("j", "t", "g", 0)
    add_call(builder, ids, logprobs, versions, **how)
    return builder.build()


def with_columns(
    episode: Episode, columns: Mapping[str, np.ndarray], *, limits: EpisodeLimits = DEFAULT_LIMITS
) -> Episode:
    """A copy that has these optional unit columns too."""
    units = episode.units
    merged = Units(units.token_id, units.mask, units.logprob, units.version, {**units.columns, **columns})
    return Episode(episode.header, episode.segments, merged, limits=limits)
