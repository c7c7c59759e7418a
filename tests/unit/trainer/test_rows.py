"""From blobs to rows: what reaches the gradient, and what is refused before it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_async.trajectory import Call, EpisodeBuilder, Sampling, SegmentKind, pack, seen_by
from tests.golden.tables import Alone, episodes_of
from tests.unit.trainer.conftest import entry_of
from trainer_service.data.episode_rows import (
    EpisodeBytes,
    check_staleness,
    cut_rows,
    fetched_episodes,
    rows_of_episodes,
)
from trainer_service.data.loader import FetchedBytes
from trainer_service.data.microbatch import build_micro_batch
from trainer_service.data.rows import row_of
from trainer_service.data.units import build_units
from trainer_service.errors import BatchError, StalenessViolation, UntrainableEpisode


def _rows(episode, index=0, **changes):
    return _rows_of(pack(episode), entry_of(episode, **changes), index=index)


def _rows_of(blob, entry, lowest_version=0, *, index=0, places=None):
    return rows_of_episodes([EpisodeBytes(blob, entry, index, places)], lowest_version, policy="policy")


def _builder():
    return EpisodeBuilder("job", "t", "t#0", 0)


def _sampled(
    builder, ids, parent, version=0, logprobs=None, temperature=1.0, logprobs_of="sampled", **options
):
    logprobs = [-1.0 - i for i in range(len(ids))] if logprobs is None else logprobs
    sampling = options.pop("sampling", Sampling(temperature=temperature))
    call = Call(sampling=sampling, logprobs_of=logprobs_of)
    return builder.sampled(ids, logprobs, version, parent=parent, call=call, **options)


@st.composite
def branching_episodes(draw):
    """Random trees of sampled and observed segments; each sampled unit has a log-prob of its own."""
    builder = _builder()
    segments = [builder.prompt(list(range(draw(st.integers(1, 3)))))]
    serial = 0
    for _ in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from(segments))
        n = draw(st.integers(0, 4))
        if draw(st.booleans()):
            logprobs = [-float(serial + i + 1) for i in range(n)]
            serial += n
            versions = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
            ids = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
            segments.append(_sampled(builder, ids, parent, versions, logprobs))
        else:
            segments.append(builder.observed(SegmentKind.TOOL, [0] * n, parent))
    return builder.build()


@given(branching_episodes(), st.integers(0, 6))
def test_the_manifest_says_what_is_packed_whatever_is_masked(episode, lowest):
    entry = entry_of(episode, lowest_version=lowest)
    rows = _rows_of(pack(episode), entry, lowest)
    trained = [place for place, size in enumerate(entry.rows) if size != (0, 0, 0)]
    assert [(row.packed_length, len(row.position), 0) for row in rows] == [entry.rows[p] for p in trained]
    for place, row in zip(trained, rows, strict=True):
        (alone,) = _rows_of(pack(episode), entry, lowest, places=[place])
        assert alone.token_ids.tolist() == row.token_ids.tolist()
    wrong = [[*entry.rows, (1, 1, 0)], *([*entry.rows[:place], (0, 0, 0)] for place in trained[-1:])]
    for rows in wrong:
        with pytest.raises(BatchError, match=r"the batch names \(tokens, units, "):
            _rows_of(pack(episode), replace(entry, rows=rows), lowest)


@given(branching_episodes())
def test_every_sampled_unit_is_trained_exactly_once(episode):
    """Log-probs are unique, so they name the units: each is in the micro-batch once, with its own token."""
    rows = _rows(episode)
    sampled = episode.units.mask == 1
    want = sorted(
        zip(episode.units.logprob[sampled].tolist(), episode.units.token_id[sampled].tolist(), strict=True)
    )
    if not rows:
        assert not want
        return
    batch = build_micro_batch(rows)
    assert (
        sorted(
            zip(np.concatenate([row.behaviour for row in rows]).tolist(), batch.target.tolist(), strict=True)
        )
        == want
    )


def test_a_pack_feeds_what_came_before_each_unit():
    builder = _builder()
    root = builder.prompt([7, 8])
    first = _sampled(builder, [3, 4], root, 2)
    tool = builder.observed(SegmentKind.TOOL, [9], first)
    _sampled(builder, [5], tool, 3, [-3.0])
    builder.observed(SegmentKind.TOOL, [9, 9], 3)
    (row,) = _rows(builder.build(), index=1)
    ids, mask, logprobs = (
        np.array([1, 2], np.int32),
        np.array([0, 1], np.uint8),
        np.array([0, -4], np.float32),
    )
    short = row_of(0, ids, mask, logprobs, np.zeros(2, np.int32))
    batch = build_micro_batch([row, short])
    assert batch.input_ids.tolist() == [[7, 8, 3, 4, 9, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0]]
    assert batch.runs == [(1, 5), (1, 1)]
    assert batch.predict.tolist() == [1, 2, 4, 5]
    assert batch.target.tolist() == [3, 4, 5, 2]
    assert batch.episode.tolist() == [1, 1, 1, 0]
    units = build_units([row, short], episodes_of([1.0, 0.0], [5, 6]), Alone())
    assert units.behaviour.tolist() == [-1, -2, -3, -4]
    assert units.version.tolist() == [2, 2, 3, 0]
    assert units.episode.tolist() == [1, 1, 1, 0]
    assert units.group.tolist() == [6, 6, 6, 5]
    assert units["row_units"].tolist() == [3, 3, 3, 1]


def test_a_row_that_begins_with_a_sampled_unit_is_refused():
    one = np.ones(1, np.int32)
    with pytest.raises(BatchError, match="no token before it"):
        row_of(0, one, one.astype(np.uint8), one.astype(np.float32), one)


def test_bytes_that_are_not_what_the_manifest_names_are_refused():
    builder = _builder()
    _sampled(builder, range(2), builder.prompt([1]), version=4)
    episode = builder.build()
    assert len(_rows(episode)) == 1
    for changes in ({"episode_id": "t#0.1"}, {"n_sampled": 3}, {"min_version": 3}, {"max_version": 5}):
        with pytest.raises(BatchError, match="the bytes fetched hold"):
            _rows(episode, **changes)
    with pytest.raises(BatchError, match="cannot be read"):
        _rows_of(pack(episode)[:-3], entry_of(episode))


def test_each_unit_is_trained_at_the_temperature_of_its_call():
    builder = _builder()
    root = builder.prompt([1])
    hot = _sampled(builder, range(2), root, temperature=2.0)
    tool = builder.observed(SegmentKind.TOOL, [1], hot)
    cold = _sampled(builder, range(1), tool, temperature=0.5)
    _sampled(builder, range(1), cold, temperature=1.0, logprobs_of="raw")
    (row,) = _rows(builder.build())
    assert row.temperature.tolist() == [2.0, 2.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("sampling", "logprobs_of", "how"),
    [
        (Sampling(top_p=0.5), "sampled", "with top_p 0.5"),
        (Sampling(top_p=0.5), "temperature", "with top_p 0.5"),
        (Sampling(top_k=20), "sampled", "with top_k 20"),
        (Sampling(temperature=0.0), "sampled", "greedily"),
        (Sampling(temperature=0.0), "raw", "greedily"),
        (Sampling(temperature=0.6), "raw", "at temperature 0.6, but its log-probs are those of temper"),
    ],
)
def test_what_was_not_sampled_from_what_is_trained_reaches_no_gradient(sampling, logprobs_of, how):
    """As `ctx.generate(top_p=0.5)` samples it. The very same units are well as context."""
    for mask in (None, [0, 0], [0, 1]):
        builder = _builder()
        good = _sampled(builder, range(2), builder.prompt([1]))
        _sampled(builder, [3, 4], good, sampling=sampling, logprobs_of=logprobs_of, mask=mask)
        episode = builder.build()
        if mask == [0, 0]:
            (row,) = _rows(episode)
            assert row.position.tolist() == [1, 2]
            assert row.temperature.tolist() == [1.0, 1.0]
            continue
        with pytest.raises(UntrainableEpisode) as caught:
            _rows(episode)
        assert f"segment 2 of episode t#0.0 was sampled {how}" in str(caught.value)
        assert caught.value.restart_helps is False


def test_what_other_policies_sampled_is_context():
    agents = (("main", 0), ("judge", 1))
    builder = EpisodeBuilder("job", "t", "t#0", 0, policies=("policy", "judge"), agents=agents)
    first = _sampled(builder, range(2), builder.prompt([1, 2]), [0, 1])
    said = _sampled(builder, range(3), builder.prompt([3], parent=first), [7, 8, 9], agent=1)
    _sampled(builder, range(1), said, 1)
    episode = builder.build()
    blob = pack(episode)
    for policy, n_units, versions in (("policy", 3, {0, 1}), ("judge", 3, {7, 8, 9})):
        seen = seen_by(episode, policy)
        (row,) = rows_of_episodes([EpisodeBytes(blob, entry_of(seen), 0)], policy=policy)
        assert len(row.position) == n_units == seen.n_sampled
        assert set(row.version.tolist()) == versions
    silent = seen_by(episode, "critic")
    assert rows_of_episodes([EpisodeBytes(blob, entry_of(silent), 0)], policy="critic") == []


@given(st.lists(branching_episodes(), min_size=1, max_size=4), st.integers(0, 6))
def test_episodes_are_read_together_as_they_are_one_by_one(episodes, lowest):
    fetched = [
        EpisodeBytes(pack(episode), entry_of(episode, lowest_version=lowest), index)
        for index, episode in enumerate(episodes)
    ]
    together = rows_of_episodes(fetched, lowest, policy="policy")
    alone = [row for item in fetched for row in rows_of_episodes([item], lowest, policy="policy")]
    assert len(together) == len(alone)
    for mine, other in zip(together, alone, strict=True):
        assert mine.episode == other.episode
        for name in ("token_ids", "position", "behaviour", "version", "temperature"):
            assert getattr(mine, name).tolist() == getattr(other, name).tolist()


def _versioned(*versions):
    n = len(versions)
    mask = np.array([0] + [1] * n, np.uint8)
    return row_of(
        3, np.zeros(n + 1, np.int32), mask, np.zeros(n + 1, np.float32), np.array([-1, *versions], np.int32)
    )


def test_staleness_is_bounded_on_the_units_themselves():
    check_staleness([_versioned(6, 8), _versioned(10)], step=10, max_staleness=4)
    check_staleness([], step=10, max_staleness=0)
    with pytest.raises(
        StalenessViolation, match=r"episode 3 of step 10 .* version 5: staleness 5 is above max_stal"
    ):
        check_staleness([_versioned(10), _versioned(9, 5, 9)], step=10, max_staleness=4)
    with pytest.raises(StalenessViolation, match="not published"):
        check_staleness([_versioned(11)], step=10, max_staleness=4)
    with pytest.raises(StalenessViolation):
        check_staleness([_versioned(9)], step=10, max_staleness=0)


def test_units_below_the_lowest_version_are_in_no_row():
    builder = _builder()
    prompt = builder.prompt([1, 2, 3])
    first = _sampled(builder, range(2), prompt, version=1)
    _sampled(builder, range(3), first, version=2)
    episode = builder.build()
    entry = entry_of(episode)
    (row,) = _rows_of(pack(episode), entry)
    assert row.version.tolist() == [1, 1, 2, 2, 2]
    with pytest.raises(StalenessViolation):
        check_staleness([row], step=3, max_staleness=1)
    entry = entry_of(episode, lowest_version=2)
    (row,) = _rows_of(pack(episode), entry, 2)
    assert (row.version.tolist(), row.position.tolist()) == ([2, 2, 2], [5, 6, 7])
    check_staleness([row], step=3, max_staleness=1)
    entry = entry_of(episode, lowest_version=3)
    assert _rows_of(pack(episode), entry, 3) == []


def test_rows_have_the_images_of_their_tokens_and_an_image_without_bytes_is_named():
    builder = _builder()
    prompt = builder.prompt([1, 2, 3, 4])
    builder.media(prompt, "blake3:aa", "image/png", 3, 1, 2)
    for branch, name in enumerate(("bb", "cc")):
        call = _sampled(builder, [5], prompt)
        tool = builder.observed(SegmentKind.TOOL, [7, 8, 9], call)
        builder.media(tool, f"blake3:{name}", "image/png", 3, 0, 2)
        last = _sampled(builder, [6], tool)
        builder.media(
            builder.observed(SegmentKind.TOOL, [7], last), "blake3:dd", "image/png", 3, 0, 1 - branch
        )
    episode = builder.build()
    blobs = FetchedBytes({episode.episode_id: memoryview(pack(episode))})
    blobs.media = {f"blake3:{name}": name.encode() for name in ("aa", "bb", "cc", "dd")}
    assert entry_of(episode).rows == [(8, 2, 4)] * 2
    (item,) = fetched_episodes([entry_of(episode)], {0: [0, 1]}, blobs, {})

    def told(rows):
        return [
            [(each.digest, bytes(each.data), each.first, each.count) for each in row.images] for row in rows
        ]

    expected = [
        [("blake3:aa", b"aa", 1, 2), (f"blake3:{name}", name.encode(), 5, 2)] for name in ("bb", "cc")
    ]
    assert told(rows_of_episodes([item], policy="policy", with_places=True)) == expected
    assert told(cut_rows(episode, 0, lambda row: row.mask, "policy", [1], media=blobs.media)) == expected[1:]
    del blobs.media["blake3:cc"]
    with pytest.raises(BatchError, match=r"no bytes of the image blake3:cc of episode t#0\.0"):
        rows_of_episodes([item], policy="policy")
