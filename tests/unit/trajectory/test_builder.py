"""What a workflow hands to the builder, right and wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest

from areal_async.trajectory import (
    Episode,
    EpisodeBuilder,
    InvariantError,
    Sampling,
    SegmentKind,
    pack,
    unpack,
)
from areal_async.trajectory.builder import anchor_of
from areal_async.trajectory.layout import Call, SegmentFlag
from tests.unit.trajectory.conftest import add_call, one_call, with_columns


@pytest.fixture
def builder() -> EpisodeBuilder:
    return EpisodeBuilder("job", "task", "group#0", 4, attempt=2)


def test_the_example_is_built_as_told(two_turns):
    episode = two_turns.build()
    header, segments, units = episode.header, episode.segments, episode.units
    assert segments.parent.tolist() == [-1, 0, 1, 2, 0]
    assert segments.kind.tolist() == [0, 1, 2, 1, 1]
    assert segments.offset.tolist() == [0, 3, 5, 7, 10]
    assert segments.length.tolist() == [3, 2, 2, 3, 2]
    assert segments.turn.tolist() == [0, 0, 1, 1, 0]
    assert segments.flags.tolist() == [0, 0, 0, int(SegmentFlag.TRUNCATED), 0]
    assert segments.reward[3] == 0.5
    assert np.isnan(segments.reward[[0, 1, 2, 4]]).all()
    assert segments.anchor.tolist() == [0, 0, anchor_of("state-7"), 0, 0]
    assert units.token_id.tolist() == [11, 12, 13, 21, 22, 31, 32, 41, 42, 43, 51, 52]
    assert units.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    assert units.version.tolist() == [-1, -1, -1, 4, 4, -1, -1, 5, 5, 6, 6, 6]
    np.testing.assert_allclose(units.logprob, [0, 0, 0, -0.5, -0.25, 0, 0, -1.5, -0.125, -2, -1, -3])
    assert header.epochs == [(3, 0), (9, 1)]
    assert [call.finish_reason for call in header.calls] == ["stop", "length", "abort"]
    assert header.rewards == {"tests_passed": 0.75}
    assert header.media[0].first_unit == 1
    assert header.metadata["nested"] == {"k": [1, None, True]}
    assert (header.prompt_text, header.response_text) == ("what is this?", "a größer plot")
    assert episode.episode_id == "abcdef01:3:0#1.2"
    assert (episode.min_version, episode.max_version, episode.min_epoch, episode.n_sampled) == (4, 6, 0, 7)


def test_lists_arrays_and_other_integer_types_give_the_same_episode():
    def built(ids, logprobs, versions, epoch):
        return one_call(ids, logprobs, versions, epoch=epoch)

    plain = built([1, 2], [-1.0, -2.0], [3, 3], [5, 5])
    assert built((1, 2), (-1, -2), 3, 5) == plain
    assert built(range(1, 3), np.array([-1, -2.0]), np.array([3, 3]), np.array([5, 5])) == plain
    for dtype in (np.int32, np.int64, np.uint8, ">i4"):
        assert built(np.array([1, 2], dtype), np.array([-1, -2], np.float16), 3, 5) == plain
    assert built(np.array([9, 1, 9, 2, 9])[1::2], np.array([-1, 0, -2], np.float32)[::2], 3, 5) == plain
    assert built(b"\x01\x02", [-1.0, -2.0], np.int64(3), np.int32(5)) == plain


NO_IDS = [[1.5], [2**31], [-(2**31) - 1], ["a"], [None], None]
NO_ARRAYS = [np.array([1.0]), np.array([2**31]), np.array([2**63], np.uint64), np.array([[1]])]


@pytest.mark.parametrize("ids", [*NO_IDS, *NO_ARRAYS])
def test_ids_that_are_not_32_bit_integers_are_refused_and_nothing_is_added(builder, ids):
    with pytest.raises(InvariantError, match="ids"):
        builder.prompt(ids)
    builder.prompt([1])
    assert builder.build().units.token_id.tolist() == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": [-1.0]},
        {"logprobs": ["a", "b"]},
        {"logprobs": np.array([[-1.0, -1.0]])},
        {"logprobs": np.array([1, 2])},
        {"versions": [1]},
        {"versions": 2**31},
        {"versions": [1.0, 1.0]},
        {"epoch": [1]},
        {"epoch": [1, 2**31]},
        {"logprobs": [None, None, None]},
        {"mask": [1]},
        {"mask": [1, 256]},
        {"mask": [1, -1]},
    ],
)
def test_columns_that_do_not_fit_the_ids_are_refused_and_nothing_is_added(builder, wrong):
    good = {"logprobs": [-1.0, -1.0], "versions": 1, "epoch": 0}
    with pytest.raises(InvariantError):
        add_call(builder, [1, 2], **{**good, **wrong})
    add_call(builder, [1, 2], **good)
    assert builder.build().n_units == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda b: b.observed(SegmentKind.SAMPLED, [1], None),
        lambda b: b.prompt([1], parent=0),
        lambda b: b.prompt([1], parent=-2),
        lambda b: b.prompt([1], agent=1),
        lambda b: b.prompt([1], turn=-1),
        lambda b: b.prompt([1], turn=2**31),
        lambda b: b.prompt([-1]),
        lambda b: add_call(b, [1], [0.5], 0),
        lambda b: add_call(b, [1], [math.nan], 0),
        lambda b: add_call(b, [1], [-1e300], 0),
        lambda b: add_call(b, [1], [-1.0], -1),
        lambda b: add_call(b, [1], [-1.0], 0, epoch=-1),
        lambda b: add_call(b, [1], [-1.0], 0, agent=7),
        lambda b: add_call(b, [1], [-1.0], 0, mask=[2]),
        lambda b: b.reward(b.prompt([1]), math.inf),
        lambda b: b.reward(b.prompt([1]), 1e300),
        lambda b: b.reward(b.prompt([1]), "high"),
        lambda b: b.episode_reward("x", math.nan),
        lambda b: b.reward(0, 1.0),
        lambda b: b.anchor(-1, "k"),
        lambda b: b.flag(0, SegmentFlag.TERMINAL),
        lambda b: b.column("value", 0, []),
        lambda b: b.column("value", b.prompt([1]), [1.0, 2.0]),
        lambda b: b.column("mask", b.prompt([1]), [1.0]),
        lambda b: b.media(b.prompt([1]), "sha256:0", "image/png", 1, start=1, n_units=1),
        lambda b: None,
    ],
)
def test_a_contradiction_is_refused_at_the_latest_in_build(builder, wrong):
    def attempt():
        wrong(builder)
        builder.build()

    with pytest.raises(InvariantError):
        attempt()


def plain(n_prompt=2, ids=(3, 4), logprobs=(-1.0, -0.5), versions=(6, 7), **how):
    """One prompt and one answer, and nothing else."""
    identity = {"group": "group#0", "sample": 1, "attempt": 0} | how.pop("identity", {})
    b = EpisodeBuilder("job", "task", identity["group"], identity["sample"], identity["attempt"])
    parent = b.prompt([1] * n_prompt)
    b.text(prompt="a", response="b")
    add_call(b, ids, logprobs, versions, parent=how.pop("parent", parent), **how)
    return b


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"n_prompt": 0},
        {"ids": range(600), "logprobs": [-1.0] * 600, "versions": 3},
        {"epoch": 4},
        {"epoch": [4, 5]},
        {"mask": [1, 0]},
        {"mask": [0, 0]},
        {"logprobs": (1e-4, -3e38)},
        {"ids": (), "logprobs": (), "versions": ()},
    ],
)
def test_an_episode_of_one_answer_is_what_the_check_of_any_episode_makes_of_it(how):
    built = plain(**how).build()
    checked = Episode(built.header, built.segments, built.units)
    assert built == checked
    facts = [{k: v for k, v in vars(e).items() if k not in ("segments", "units")} for e in (built, checked)]
    assert facts[0] == facts[1]
    assert unpack(pack(built)) == built


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": (3, -1)},
        {"logprobs": (-1.0, 0.5)},
        {"logprobs": (-1.0, math.nan)},
        {"logprobs": (-math.inf, -1.0)},
        {"logprobs": (-math.inf, math.inf)},
        {"versions": (6, -1)},
        {"versions": (-2, -2), "mask": [0, 0]},
        {"mask": [1, 2]},
        {"epoch": -1},
        {"agent": 1},
        {"turn": -1},
        {"parent": 1},
        {"sampling": Sampling(temperature=math.nan)},
        {"sampling": Sampling(top_p=0.0)},
        {"sampling": Sampling(top_k=-1)},
        {"sampling": Sampling(max_new_tokens=-1)},
        {"sampling": Sampling(seed=2**64)},
        {"identity": {"group": ""}},
        {"identity": {"sample": -1}},
        {"identity": {"attempt": 2**31}},
    ],
)
def test_an_episode_of_one_answer_is_refused_for_whatever_is_wrong_with_it(wrong):
    assert plain().build().n_sampled == 2
    with pytest.raises(InvariantError):
        plain(**wrong).build()


def test_build_may_be_repeated_and_what_it_returned_does_not_change(builder):
    prompt = builder.prompt([1, 2])
    first = builder.build()
    add_call(builder, [3], [-1.0], 7, parent=prompt)
    builder.meta(more=True)
    second = builder.build()
    assert (first.n_units, first.header.calls, first.header.metadata) == (2, [], {})
    assert (second.n_units, second.max_version) == (3, 7)
    assert second == builder.build()


def test_what_is_built_cannot_be_changed(two_turns):
    episode = two_turns.build()
    units = episode.units
    for array in (units.token_id, units.mask, episode.segments.table, units.columns["value"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_call_takes_the_policy_of_its_agent():
    b = EpisodeBuilder("j", "t", "g", 0, policies=("a", "b"), agents=(("x", 0), ("y", 1)))
    for agent in (0, 1):
        add_call(b, [1], [-1.0], agent=agent)
    calls = b.build().header.calls
    assert calls == [Call(i, p, Sampling(), "stop", "sampled") for i, p in enumerate((0, 1))]
    assert (b.agent("y"), b.agent("y", 1), b.agent("z", 1)) == (1, 1, 2)
    with pytest.raises(InvariantError, match="agent 'y' speaks for b"):
        b.agent("y", 0)


def test_epochs_run_over_segments_and_skip_what_is_not_trained(builder):
    def sampled(n, epoch, mask=None):
        add_call(builder, [1] * n, [-1.0] * n, epoch=epoch, mask=mask)

    sampled(1, 2, mask=[0])
    assert builder.began() is None
    sampled(2, 3)
    builder.prompt([1])
    sampled(2, 3)
    sampled(0, 9)
    sampled(3, 4, mask=[0, 0, 1])
    sampled(4, [4, 5, 6, 5], mask=[1, 1, 0, 1])
    assert builder.build().header.epochs == [(1, 3), (8, 4), (10, 5)]
    assert builder.began() == (3, builder.build().units.version[1])


def test_equal_anchors_meet_across_episodes_and_none_is_zero():
    keys = ["", "a", "b", "ä", b"a", b"\x00"]
    assert anchor_of("a") == anchor_of(b"a")
    assert len({anchor_of(k) for k in keys}) == len(keys) - 1
    assert all(anchor_of(k) != 0 for k in keys)
    assert anchor_of("state-7") == int.from_bytes(
        blake2b(b"state-7", digest_size=8).digest(), "little", signed=True
    )


def test_episodes_compare_by_content(two_turns):
    episode = two_turns.build()
    assert episode == two_turns.build()
    assert episode != with_columns(episode, {"ref": np.zeros(12, np.float32)})
    assert episode != "episode"
    two_turns.meta(tool_seconds=0.25)
    assert episode != two_turns.build()


GOOD = {"ids": [7, 8], "logprobs": [-1.0, -0.5], "versions": [3, 4], "epochs": [1, 2]}
TYPES = (np.int32, np.float32, np.int32, np.int32)


def answered(builder: EpisodeBuilder, **columns: list) -> Episode:
    """Return sample 4 of a group: the answer with these columns to a prompt of three units."""
    call = Call(1, 0, Sampling(seed=5))
    parts = zip((GOOD | columns).values(), TYPES, strict=True)
    return unpack(builder.alike().blob(4, call, "text", *(np.array(part, of) for part, of in parts)))


@pytest.mark.parametrize("n", [1, 64, 65])
def test_an_episode_of_a_group_has_the_units_of_its_answer(builder, n):
    builder.prompt([1, 2, 3])
    columns = {"ids": [5] * n, "logprobs": [-1.0] * n, "versions": [3] * (n - 1) + [9], "epochs": [2] * n}
    episode = answered(builder, **columns)
    assert (episode.n_units, episode.n_sampled) == (3 + n, n)
    assert (episode.min_version, episode.max_version, episode.min_epoch) == (3 if n > 1 else 9, 9, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": [7, -1]},
        {"logprobs": [math.nan, -1.0]},
        {"logprobs": [-1.0, -math.inf]},
        {"logprobs": [math.inf, -math.inf]},
        {"logprobs": [-1.0, 0.5]},
        {"versions": [3, -1]},
        {"epochs": [-1, 0]},
        {"versions": [3]},
    ],
)
def test_a_wrong_answer_makes_no_episode_of_a_group(builder, wrong):
    builder.prompt([1, 2, 3])
    assert answered(builder).min_version == 3
    with pytest.raises(InvariantError):
        answered(builder, **wrong)


def test_a_group_whose_prompt_or_call_is_wrong_makes_no_episode(builder):
    builder.prompt([1, 2, 3])
    group = builder.alike()
    columns = [np.array(part, of) for part, of in zip(GOOD.values(), TYPES, strict=True)]
    with pytest.raises(InvariantError, match="token_id"):
        replace(group, prompt=-group.prompt).blob(4, Call(1), "text", *columns)
    with pytest.raises(InvariantError, match="agent 0 of 0"):
        replace(group, agents=[]).blob(4, Call(1), "text", *columns)
    with pytest.raises(InvariantError, match="header"):
        group.blob(-1, Call(1), "text", *columns)
    for call in (Call(0), Call(1, policy=1), Call(1, sampling=Sampling(temperature=math.nan))):
        with pytest.raises(InvariantError, match="call"):
            group.blob(4, call, "text", *columns)
