"""Each invariant broken on purpose, one at a time."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from areal_async.trajectory import (
    Episode,
    EpisodeBuilder,
    EpisodeLimits,
    InvariantError,
    Sampling,
    SchemaError,
    SizeError,
    pack,
    unpack,
)
from areal_async.trajectory.episode import LOGPROB_SLACK
from areal_async.trajectory.layout import Agent, Media, Segments, Units
from tests.unit.trajectory.conftest import add_call, with_columns

PARENT, KIND, AGENT, TURN, OFFSET, LENGTH, FLAGS = range(7)
N_UNITS = 12


def rebuilt(
    episode, *, table=None, reward=None, anchor=None, header=None, columns=None, sampling=None, **unit_columns
):
    """The same episode with one change: (row, segment, value) of the table, (index, value) of a column, the
    sampling of every call."""
    if sampling is not None:
        calls = [msgspec.structs.replace(call, sampling=sampling) for call in episode.header.calls]
        header = {"calls": calls}

    def edited(array, change):
        array = array.copy()
        if change is not None:
            array[change[0]] = change[1]
        return array

    segments = Segments(
        edited(episode.segments.table, table and (table[:2], table[2])),
        edited(episode.segments.reward, reward),
        edited(episode.segments.anchor, anchor),
    )
    units = episode.units
    units = Units(
        *(edited(getattr(units, n), unit_columns.get(n)) for n in ("token_id", "mask", "logprob", "version")),
        columns=units.columns if columns is None else columns,
    )
    return Episode(msgspec.structs.replace(episode.header, **(header or {})), segments, units)


@pytest.fixture
def episode(two_turns) -> Episode:
    return two_turns.build()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({"table": (PARENT, 0, 0)}, "parent", id="a segment is its own parent"),
        pytest.param({"table": (PARENT, 1, 3)}, "parent", id="a parent comes later"),
        pytest.param({"table": (PARENT, 1, -2)}, "parent", id="a parent below -1"),
        pytest.param({"table": (KIND, 0, 4)}, "kind", id="unknown kind"),
        pytest.param({"table": (KIND, 0, -1)}, "kind", id="negative kind"),
        pytest.param({"table": (AGENT, 2, 1)}, "agent", id="agent out of range"),
        pytest.param({"table": (AGENT, 2, -1)}, "agent", id="negative agent"),
        pytest.param({"table": (TURN, 0, -1)}, "turn", id="negative turn"),
        pytest.param({"table": (FLAGS, 0, 4)}, "flags", id="unknown flag"),
        pytest.param({"table": (FLAGS, 0, -1)}, "flags", id="negative flags"),
        pytest.param({"table": (OFFSET, 0, 1)}, "offset", id="first offset is not 0"),
        pytest.param({"table": (OFFSET, 1, 4)}, "offset", id="a hole between segments"),
        pytest.param({"table": (LENGTH, 4, 3)}, "lengths", id="the last segment is too long"),
        pytest.param({"table": (LENGTH, 4, 1)}, "lengths", id="the last segment is too short"),
        pytest.param({"table": (LENGTH, 0, -3)}, "offset", id="negative length"),
        pytest.param({"reward": (0, math.inf)}, "reward", id="infinite reward"),
        pytest.param({"reward": (3, -math.inf)}, "reward", id="reward of minus infinity"),
        pytest.param({"token_id": (0, -1)}, "token_id", id="negative token"),
        pytest.param({"mask": (4, 2)}, "a mask is 0 or 1", id="mask of 2"),
        pytest.param({"mask": (0, 1)}, "version", id="a prompt unit is trained"),
        pytest.param({"version": (0, 4)}, "segment 0", id="a prompt unit has a version"),
        pytest.param({"version": (6, 4)}, "segment 2", id="a tool unit has a version"),
        pytest.param({"version": (4, -1)}, "version", id="a trained unit has no version"),
        pytest.param({"version": (0, -2)}, "version", id="version below -1"),
        pytest.param({"logprob": (3, math.nan)}, "logprob", id="NaN log-prob"),
        pytest.param({"logprob": (0, math.nan)}, "logprob", id="NaN log-prob first, outside the mask"),
        pytest.param({"logprob": (11, math.nan)}, "logprob", id="NaN log-prob last"),
        pytest.param({"logprob": (3, -math.inf)}, "logprob", id="log-prob of minus infinity"),
        pytest.param({"logprob": (3, math.inf)}, "logprob", id="infinite log-prob"),
        pytest.param({"logprob": (3, 0.01)}, "logprob", id="probability above 1"),
        pytest.param({"header": {"group_id": ""}}, "group_id", id="no group"),
        pytest.param({"header": {"sample": -1}}, "sample", id="negative sample"),
        pytest.param({"header": {"sample": 2**31}}, "sample", id="sample beyond 32 bits"),
        pytest.param({"header": {"attempt": -1}}, "attempt", id="negative attempt"),
        pytest.param({"header": {"attempt": 2**31}}, "attempt", id="attempt beyond 32 bits"),
        pytest.param({"header": {"policies": ["a", "a"]}}, "unique", id="policy named twice"),
        pytest.param({"header": {"agents": [Agent("a"), Agent("a")]}}, "unique", id="agent named twice"),
        pytest.param({"header": {"agents": [Agent("main", 1)]}}, "policy 1 of 1", id="agent of no policy"),
        pytest.param({"header": {"agents": [Agent("main", -1)]}}, "policy -1", id="agent of policy -1"),
        pytest.param({"header": {"agents": []}}, "agent", id="no agents"),
        pytest.param({"header": {"rewards": {"x": math.nan}}}, "rewards", id="NaN as a named reward"),
        pytest.param({"header": {"calls": []}}, "calls", id="no calls"),
        pytest.param({"header": {"epochs": []}}, "epochs", id="no epochs"),
        pytest.param({"header": {"epochs": [(0, 0)]}}, "epochs", id="epochs start at the prompt"),
        pytest.param({"header": {"epochs": [(4, 0)]}}, "epochs", id="epochs start late"),
        pytest.param({"header": {"epochs": [(3, -1)]}}, "epoch", id="negative epoch"),
        pytest.param({"header": {"epochs": [(3, 2**31)]}}, "epoch", id="epoch beyond 32 bits"),
        pytest.param({"header": {"epochs": [(3, 0), (4, 0)]}}, "epoch", id="a run split in two"),
        pytest.param({"header": {"epochs": [(3, 0), (3, 1)]}}, "epochs", id="an empty run"),
        pytest.param({"header": {"epochs": [(3, 0), (9, 1), (4, 0)]}}, "epochs", id="falling runs"),
        pytest.param({"header": {"epochs": [(3, 0), (5, 1)]}}, "epochs", id="a run starts at a tool unit"),
        pytest.param({"header": {"epochs": [(3, 0), (12, 1)]}}, "epochs", id="a run starts past the end"),
        pytest.param({"header": {"media": [Media("sha256", "i", 1, 0)]}}, "digest", id="no hash name"),
        pytest.param({"header": {"media": [Media("a:0", "i", -1, 0)]}}, "size", id="media of negative size"),
        pytest.param({"header": {"media": [Media("a:0", "i", 1, 5)]}}, "segment 5", id="no segment"),
        pytest.param({"header": {"media": [Media("a:0", "i", 1, -1)]}}, "segment -1", id="segment -1"),
        pytest.param({"header": {"media": [Media("a:0", "i", 1, 0, 1, -1)]}}, "segment", id="-1 units"),
        pytest.param({"header": {"media": [Media("a:0", "i", 1, 0, 1, 3)]}}, "outside", id="past its end"),
        pytest.param({"header": {"media": [Media("a:0", "i", 1, 1, 2, 1)]}}, "outside", id="before it"),
        pytest.param({"columns": {"mask": np.zeros(N_UNITS)}}, "mask", id="a column shadows a core one"),
        pytest.param({"columns": {"": np.zeros(N_UNITS)}}, "column", id="a column without a name"),
        pytest.param({"columns": {"a\n": np.zeros(N_UNITS)}}, "column", id="a column with a bad name"),
        pytest.param({"columns": {"a" * 65: np.zeros(N_UNITS)}}, "column", id="a column with a long name"),
        pytest.param({"columns": {"a": np.zeros(N_UNITS - 1)}}, "column a", id="a short column"),
        pytest.param({"columns": {"a": np.zeros((N_UNITS, 1, 1))}}, "column a", id="a 3-d column"),
        pytest.param({"columns": {"a": np.zeros(N_UNITS, complex)}}, "column a", id="a complex column"),
        pytest.param({"columns": {"a": np.zeros(N_UNITS, ">f4")}}, "column a", id="a big-endian column"),
    ],
)
def test_a_broken_invariant_is_refused_and_named(episode, change, named):
    with pytest.raises(InvariantError, match=named):
        rebuilt(episode, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"segment": 0}, "calls"),
        ({"policy": 1}, "policy 1 of 1"),
        ({"policy": -1}, "policy -1 of 1"),
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"sampling": Sampling(temperature=math.nan)}, "temperature"),
        ({"sampling": Sampling(temperature=math.inf)}, "temperature"),
        ({"sampling": Sampling(top_p=0)}, "top_p"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(max_new_tokens=-1)}, "max_new_tokens"),
        ({"sampling": Sampling(seed=2**64)}, "seed"),
        ({"sampling": Sampling(seed=-(2**63) - 1)}, "seed"),
    ],
)
def test_a_call_out_of_range_is_refused(episode, change, named):
    calls = episode.header.calls
    with pytest.raises(InvariantError, match=named):
        rebuilt(episode, header={"calls": [calls[0], msgspec.structs.replace(calls[1], **change), calls[2]]})


@pytest.mark.parametrize(
    "change",
    [
        {"logprob": (3, np.nextafter(np.float32(LOGPROB_SLACK), np.float32(0)))},
        {"logprob": (3, np.finfo(np.float32).min)},
        {"token_id": (0, 2**31 - 1)},
        {"version": (9, 2**31 - 1)},
        {"table": (KIND, 0, 3)},
        {"table": (FLAGS, 0, 3)},
        {"table": (TURN, 0, 2**31 - 1)},
        {"table": (PARENT, 4, 3)},
        {"reward": (0, np.finfo(np.float32).max)},
        {"anchor": (0, -(2**63))},
        {"header": {"sample": 2**31 - 1, "attempt": 2**31 - 1}},
        {"header": {"epochs": [(3, 2**31 - 1), (9, 0)]}},
        {"header": {"epochs": [(3, 0), (11, 1)]}},
        {"header": {"media": [Media("a:0", "i", 0, 0, 0, 3), Media("a:0", "i", 0, 0, 0, 0)]}},
        {"header": {"media": [Media("a:0", "i", 0, 4, 12, 0), Media("a:0", "i", 0, 4, 10, 2)]}},
        {"columns": {"a" * 64: np.zeros(N_UNITS)}},
        {"columns": {}},
        {"sampling": Sampling(temperature=0, top_p=1, top_k=0, max_new_tokens=0, seed=-(2**63))},
        {"sampling": Sampling(1e9, 1e-9, top_k=2**40, max_new_tokens=2**40, seed=2**64 - 1)},
    ],
)
def test_values_at_the_edge_are_valid_and_survive_the_codec(episode, change):
    edited = rebuilt(episode, **change)
    assert unpack(pack(edited)) == edited


def test_calls_must_be_one_per_sampled_segment(episode):
    calls = episode.header.calls
    for wrong in (calls[:2], [*calls, calls[2]], calls[::-1]):
        with pytest.raises(InvariantError, match="calls"):
            rebuilt(episode, header={"calls": wrong})


def test_another_schema_is_refused_as_such(episode):
    with pytest.raises(SchemaError, match="schema 2"):
        rebuilt(episode, header={"schema": 2})


@pytest.mark.parametrize(
    "change",
    [
        {"token_id": lambda a: a.astype(np.int64)},
        {"mask": lambda a: a.astype(bool)},
        {"logprob": lambda a: a.astype(np.float64)},
        {"version": lambda a: a.astype(np.uint32)},
        {"token_id": lambda a: a.astype(">i4")},
        {"mask": lambda a: a[:-1]},
        {"logprob": lambda a: a[:, None]},
        {"version": lambda a: a[1:]},
        {"table": lambda a: a.astype(np.int64)},
        {"table": lambda a: a[:6]},
        {"reward": lambda a: a.astype(np.float64)},
        {"reward": lambda a: a[1:]},
        {"anchor": lambda a: a.astype(np.int32)},
        {"anchor": lambda a: a[1:]},
        {"table": lambda a: a[:, :0], "reward": lambda a: a[:0], "anchor": lambda a: a[:0]},
    ],
)
def test_arrays_of_another_type_or_length_are_refused(episode, change):
    segments = {name: getattr(episode.segments, name) for name in ("table", "reward", "anchor")}
    units = {name: getattr(episode.units, name) for name in ("token_id", "mask", "logprob", "version")}
    for columns in (segments, units):
        columns |= {name: alter(columns[name]) for name, alter in change.items() if name in columns}
    with pytest.raises(InvariantError):
        Episode(episode.header, Segments(**segments), Units(**units))


@pytest.mark.parametrize(
    "limits", [EpisodeLimits(segments=4), EpisodeLimits(units=N_UNITS - 1), EpisodeLimits(columns=0)]
)
def test_an_episode_above_a_limit_is_refused(episode, limits):
    with pytest.raises(SizeError):
        Episode(episode.header, episode.segments, episode.units, limits=limits)


def test_a_column_wider_than_the_limit_is_refused(episode):
    wide = with_columns(episode, {"experts": np.zeros((N_UNITS, 3), np.uint16)})
    Episode(wide.header, wide.segments, wide.units, limits=EpisodeLimits(column_width=3))
    with pytest.raises(SizeError, match="width 3"):
        Episode(wide.header, wide.segments, wide.units, limits=EpisodeLimits(column_width=2))
    with pytest.raises(SizeError, match="width 0"):
        with_columns(episode, {"experts": np.zeros((N_UNITS, 0), np.uint16)})


def test_sampled_units_left_out_of_training_keep_their_version(two_turns):
    parent = two_turns.prompt([1])
    add_call(two_turns, [2, 3, 4], [-1.0, -1.0, 0.0], [1, 9, -1], parent=parent, epoch=7, mask=[0, 1, 0])
    episode = two_turns.build()
    assert episode.units.version[-3:].tolist() == [1, 9, -1]
    assert (episode.n_sampled, episode.min_version, episode.max_version) == (8, 4, 9)
    assert episode.header.epochs[-1] == (14, 7)


def test_an_episode_with_nothing_sampled_has_no_versions_and_no_epochs():
    def facts(e):
        return e.n_units, e.n_sampled, e.min_version, e.max_version, e.min_epoch

    builder = EpisodeBuilder("j", "t", "g", 0)
    builder.prompt([])
    empty = builder.build()
    builder.prompt([1, 2])
    seen = builder.build()
    assert (facts(empty), facts(seen)) == ((0, 0, -1, -1, -1), (2, 0, -1, -1, -1))
    for episode in (empty, seen):
        with pytest.raises(InvariantError, match="epochs"):
            rebuilt(episode, header={"epochs": [(0, 0)]})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_id": (0, -1)}, "token_id"),
        ({"mask": (4, 2)}, "a mask is 0 or 1"),
        ({"version": (0, 4)}, "segment 0"),
        ({"version": (4, -1)}, "version"),
        ({"version": (0, -2)}, "version"),
        ({"logprob": (3, math.nan)}, "logprob"),
        ({"logprob": (3, math.inf)}, "logprob"),
        ({"logprob": (3, -math.inf)}, "logprob"),
        ({"logprob": (3, 0.01)}, "logprob"),
    ],
)
def test_a_long_episode_is_checked_as_a_short_one_is(change, named):
    builder = EpisodeBuilder("job", "t", "g", 0)
    prompt = builder.prompt([1, 2, 3])
    add_call(builder, [7] * 128, [-0.5] * 128, 4, parent=prompt)
    with pytest.raises(InvariantError, match=named):
        rebuilt(builder.build(), **change)
