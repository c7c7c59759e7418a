"""The invariants over random DAGs, each against the plain log of an engine."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings

from areal_async.trajectory import pack, training_rows, unpack
from tests.unit.trajectory.conftest import histories

drawn = settings(max_examples=60)


@drawn
@given(histories())
def test_a_root_to_leaf_path_is_exactly_what_the_engine_saw(history):
    episode = history.episode
    for segment, context in history.contexts.items():
        assert episode.token_ids(segment).tolist() == context
    assert [c.segment for c in episode.header.calls] == [c.segment for c in history.calls]
    for call in history.calls:
        assert episode.token_ids(call.segment).tolist() == call.seen + call.said


@drawn
@given(histories())
def test_each_sampled_unit_is_trained_in_exactly_one_row_on_the_context_it_was_sampled_in(history):
    offset = history.episode.segments.offset
    expected = {
        int(offset[call.segment]) + i: (call.seen + call.said[:i], call.said[i], logprob, call.versions[i])
        for call in history.calls
        for i, logprob in enumerate(call.logprobs)
        if call.mask[i]
    }
    trained = Counter()
    for row in training_rows(history.episode):
        spans = zip(offset[list(row.path)], row.lengths, strict=True)
        units = np.concatenate([np.arange(first, first + n) for first, n in spans])
        assert len(row.token_ids) == len(row.mask) == len(row.logprobs) == len(row.versions) == len(units)
        assert row.mask.any()
        for t in np.flatnonzero(row.mask):
            context, token, logprob, version = expected[int(units[t])]
            trained[int(units[t])] += 1
            assert row.token_ids[:t].tolist() == context
            assert row.token_ids[t] == token
            assert row.logprobs[t] == np.float32(logprob)
            assert row.versions[t] == version
    assert trained == Counter(dict.fromkeys(expected, 1))


@drawn
@given(histories())
def test_rows_are_whole_paths_and_carry_every_column(history):
    episode = history.episode
    parents = set(episode.segments.parent.tolist())
    for row in training_rows(episode):
        assert row.path[-1] not in parents
        assert list(row.path) == episode.path(row.path[-1])
        assert row.token_ids.tolist() == episode.token_ids(row.path[-1]).tolist()
        owner = np.repeat(row.path, row.lengths)
        for name, column in episode.units.columns.items():
            at = episode.segments.offset[owner] + np.concatenate([np.arange(n) for n in row.lengths])
            np.testing.assert_array_equal(row.columns[name], column[at])


@drawn
@given(histories())
def test_the_codec_returns_what_it_was_given_bit_for_bit(history):
    episode = history.episode
    blob = pack(episode)
    assert unpack(blob) == episode
    assert pack(unpack(blob)) == blob
    assert len(blob) % 8 == 0


@drawn
@given(histories())
def test_what_an_episode_says_of_itself_agrees_with_the_log(history):
    episode = history.episode
    assert episode.n_units == sum(episode.segments.length.tolist())
    assert episode.n_sampled == len(history.trained("versions"))
    header = history.episode.header
    by_policy: dict[str, list[tuple[int, int]]] = {}
    for call, told in zip(history.calls, header.calls, strict=True):
        units = zip(call.versions, call.epochs, call.mask, strict=True)
        trained = [(version, epoch) for version, epoch, mask in units if mask]
        by_policy.setdefault(header.policies[told.policy], []).extend(trained)
    expected = {
        policy: (min(v for v, _ in units), max(v for v, _ in units), min(e for _, e in units))
        for policy, units in by_policy.items()
        if units
    }
    assert episode.versions == expected
