"""The blob and its frames: what is written, and what hostile bytes come to."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.trajectory import (
    CodecError,
    Episode,
    EpisodeBuilder,
    EpisodeLimits,
    InvariantError,
    Sampling,
    SchemaError,
    SizeError,
    TrajectoryError,
    pack,
    unpack,
)
from areal_async.trajectory.layout import EpisodeHeader
from tests.unit.trajectory.conftest import add_call, one_call, with_columns
from tests.waiting import LIMIT_S

PREFIX = struct.Struct("<4sHHQII")
HEAD = 0


@pytest.fixture
def episode(two_turns) -> Episode:
    return two_turns.build()


@pytest.fixture
def blob(episode) -> bytes:
    return pack(episode)


def sealed(blob: bytes) -> bytes:
    """The blob with its size and checksum made right again, so that what lies behind them is reached."""
    magic, schema, n_frames, _, _, zero = PREFIX.unpack_from(blob)
    crc = zlib.crc32(blob[PREFIX.size :])
    return PREFIX.pack(magic, schema, n_frames, len(blob), crc, zero) + blob[PREFIX.size :]


def frames_of(episode: Episode) -> list[bytes]:
    blob = pack(episode)
    n_frames = PREFIX.unpack_from(blob)[2]
    spans = struct.unpack_from(f"<{2 * n_frames}Q", blob, PREFIX.size)
    return [blob[at : at + size] for at, size in zip(spans[::2], spans[1::2], strict=True)]


def read(frames: list[bytes]) -> Episode:
    """The episode of a blob that has these frames."""
    spans, body = [], b""
    for frame in frames:
        spans += [PREFIX.size + 16 * len(frames) + len(body), len(frame)]
        body += frame + bytes(-len(frame) % 8)
    prefix = PREFIX.pack(b"ATRJ", 1, len(frames), 0, 0, 0)
    return unpack(sealed(prefix + struct.pack(f"<{len(spans)}Q", *spans) + body))


def with_head(episode: Episode, **changes) -> list[bytes]:
    """Frames whose head says something else."""
    frames = frames_of(episode)
    head = msgspec.msgpack.decode(frames[HEAD])
    head.update(changes)
    return [msgspec.msgpack.encode(head), *frames[1:]]


def with_header(episode: Episode, **changes) -> list[bytes]:
    header = msgspec.msgpack.decode(frames_of(episode)[HEAD])["header"]
    return with_head(episode, header={**header, **changes})


def outcome(data: bytes) -> str:
    """Read hostile bytes: only typed errors come out."""
    try:
        episode = unpack(data)
    except TrajectoryError as error:
        return type(error).__name__
    assert unpack(pack(episode)) == episode
    return "valid"


def test_decoded_arrays_are_read_only_views_of_the_buffer(blob):
    buffer = np.frombuffer(bytearray(blob), np.uint8)
    episode = unpack(memoryview(buffer))
    units, segments = episode.units, episode.segments
    arrays = [units.token_id, units.mask, units.logprob, units.version, *units.columns.values()]
    for array in [*arrays, segments.table, segments.reward, segments.anchor]:
        assert np.shares_memory(array, buffer)
        assert not array.flags.writeable
        assert array.flags.aligned


@pytest.mark.parametrize("shift", range(1, 8))
def test_a_blob_at_any_address_is_read_and_its_arrays_are_aligned(blob, shift):
    buffer = bytearray(shift) + blob
    episode = unpack(memoryview(buffer)[shift:])
    assert episode == unpack(blob)
    assert episode.units.logprob.flags.aligned
    assert episode.segments.anchor.flags.aligned
    assert not episode.segments.anchor.flags.writeable


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: memoryview(b).cast("I")])
def test_any_bytes_like_buffer_is_read(blob, kind):
    assert unpack(kind(blob)) == unpack(blob)


@pytest.mark.parametrize(
    "column",
    [
        np.arange(12, dtype=np.float16),
        np.full(12, np.nan, np.float32),
        np.linspace(0, 1, 12),
        np.arange(12, dtype=np.int8),
        np.arange(12, dtype=np.int16),
        np.arange(36, dtype=np.int32).reshape(12, 3),
        np.arange(24, dtype=np.int64).reshape(12, 2),
        np.arange(12, dtype=np.uint8)[:, None],
        np.arange(48, dtype=np.uint16).reshape(4, 12).T,
    ],
)
def test_optional_columns_of_every_type_and_width_come_back(episode, column):
    wanted = with_columns(episode, {"extra": column})
    got = unpack(pack(wanted))
    assert got == wanted
    np.testing.assert_array_equal(got.units.columns["extra"], column)
    assert got.units.columns["extra"].dtype == column.dtype
    assert list(got.units.columns) == ["value", "extra"]


def test_an_empty_episode_goes_through_the_codec():
    builder = EpisodeBuilder("j", "t", "g", 0)
    builder.prompt([])
    episode = with_columns(builder.build(), {"experts": np.zeros((0, 4), np.uint16)})
    assert unpack(pack(episode)) == episode


def test_a_long_episode_costs_at_most_15_bytes_per_token():
    builder, parent = EpisodeBuilder("job", "t:0:0", "t:0:0#0", 0), None
    sampling = Sampling(max_new_tokens=4096, stop=("</s>",), seed=2**60)
    for turn in range(16):
        parent = builder.prompt([turn] * 200, parent, turn=turn)
        how = {"parent": parent, "sampling": sampling, "turn": turn}
        parent = add_call(builder, [turn] * 312, [-1.0] * 312, 3, **how)
    episode = builder.build()
    assert episode.n_units == 8192
    assert len(pack(episode)) / episode.n_units <= 15


# --- hostile bytes -----------------------------------------------------------------------------------


def test_every_truncation_is_refused(blob):
    for size in range(len(blob)):
        assert outcome(blob[:size]) == "CodecError"
        if size >= PREFIX.size:
            assert outcome(sealed(blob[:size])) != "valid"


def test_trailing_bytes_are_refused(blob):
    assert outcome(blob + bytes(8)) == "CodecError"
    assert outcome(sealed(blob + bytes(8))) == "CodecError"


def test_every_flipped_bit_is_noticed(blob):
    for bit in range(8 * len(blob)):
        hurt = bytearray(blob)
        hurt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TrajectoryError):
            unpack(hurt)


def test_a_flipped_bit_under_a_valid_checksum_gives_a_typed_error_or_a_valid_episode(blob):
    seen = set()
    for bit in range(8 * PREFIX.size, 8 * len(blob)):
        hurt = bytearray(blob)
        hurt[bit // 8] ^= 1 << bit % 8
        seen.add(outcome(sealed(hurt)))
    assert seen >= {"valid", "CodecError", "InvariantError"}


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_give_a_typed_error(data):
    with pytest.raises(TrajectoryError):
        unpack(data)
    with pytest.raises(TrajectoryError):
        read([data] * 6)
    if len(data) >= PREFIX.size:
        spans = b"ATRJ" + struct.pack("<HH", 1, 6) + data[8:]
        with pytest.raises(TrajectoryError):
            unpack(sealed(spans))


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=6,
)
_fields = st.sampled_from([*EpisodeHeader.__struct_fields__, "header", "segments", "units", "columns"])


@settings(max_examples=300)
@given(field=_fields, value=_values, top=st.booleans())
def test_a_well_formed_head_with_wrong_contents_gives_a_typed_error_or_a_valid_episode(field, value, top):
    episode = one_call([1], [-1.0], 0)
    frames = with_head(episode, **{field: value}) if top else with_header(episode, **{field: value})
    try:
        got = read(frames)
    except TrajectoryError:
        return
    assert unpack(pack(got)) == got


@pytest.mark.parametrize(
    ("prefix", "error"),
    [
        ((b"ATRK", 1, 7, 0), CodecError),
        ((b"ATRJ", 2, 7, 0), SchemaError),
        ((b"ATRJ", 0, 7, 0), SchemaError),
        ((b"ATRJ", 1, 5, 0), CodecError),
        ((b"ATRJ", 1, 6, 0), CodecError),
        ((b"ATRJ", 1, 8, 0), CodecError),
        ((b"ATRJ", 1, 65535, 0), CodecError),
        ((b"ATRJ", 1, 7, 1), CodecError),
    ],
)
def test_a_wrong_prefix_is_refused(blob, prefix, error):
    magic, schema, n_frames, zero = prefix
    crc = zlib.crc32(blob[PREFIX.size :])
    with pytest.raises(error):
        unpack(PREFIX.pack(magic, schema, n_frames, len(blob), crc, zero) + blob[PREFIX.size :])


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("field", range(14))
def test_huge_and_tiny_spans_in_the_frame_table_are_refused(blob, field, size):
    hurt = bytearray(blob)
    struct.pack_into("<Q", hurt, PREFIX.size + 8 * field, size)
    with pytest.raises(TrajectoryError):
        unpack(sealed(hurt))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"segments": 2**62}, SizeError),
        ({"segments": -1}, SizeError),
        ({"segments": 4}, CodecError),
        ({"segments": 0}, CodecError),
        ({"units": 2**64 - 1}, SizeError),
        ({"units": -1}, SizeError),
        ({"units": 11}, CodecError),
        ({"columns": []}, CodecError),
        ({"columns": [("value", "f32", 0)] * 2}, CodecError),
        ({"columns": [("value", "f33", 0)]}, CodecError),
        ({"columns": [("value", "f64", 0)]}, CodecError),
        ({"columns": [("value", "f32", 2)]}, CodecError),
        ({"columns": [("value", "f32", 2**63)]}, SizeError),
        ({"columns": [("value", "f32", -1)]}, SizeError),
        ({"columns": [("mask", "f32", 0)]}, InvariantError),
    ],
)
def test_a_head_that_disagrees_with_its_frames_is_refused(episode, changes, error):
    with pytest.raises(error):
        read(with_head(episode, **changes))


def test_a_repeated_column_is_refused(episode):
    frames = with_head(episode, columns=[("value", "f32", 0)] * 2)
    with pytest.raises(CodecError, match="repeated"):
        read([*frames, frames[-1]])


@pytest.mark.parametrize("frame", range(1, 7))
@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_frame_of_the_wrong_size_is_refused(episode, frame, cut):
    for wrong in (frames_of(episode)[frame][:-cut], frames_of(episode)[frame] + bytes(cut), b""):
        frames = frames_of(episode)
        frames[frame] = wrong
        with pytest.raises(CodecError):
            read(frames)


def test_too_few_and_too_many_frames_are_refused(episode):
    frames = frames_of(episode)
    for wrong in ([], frames[:5], [*frames, b""], frames * 9):
        with pytest.raises(CodecError):
            read(wrong)


def test_a_size_claimed_in_the_head_allocates_nothing():
    """In a process of its own: threads that other tests left allocate here."""
    code = f"import {__name__} as here; print(here.most_bytes_of_claims())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8 << 20


def most_bytes_of_claims() -> int:
    """Read arrays and maps of four thousand million items, claimed at every level of the head."""
    claims = [kind + b"\xff" * 4 for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")]
    frames = frames_of(one_call([1], [-1.0]))
    tracemalloc.start()
    for claim in claims:
        for field in ("calls", "agents", "epochs", "media", "metadata", "policies", "rewards", "job"):
            header = b"\x81" + msgspec.msgpack.encode(field) + claim + b"\x01"
            for head in (claim, b"\x81" + msgspec.msgpack.encode("header") + header):
                with pytest.raises(CodecError):
                    read([head, *frames[1:]])
    return tracemalloc.get_traced_memory()[1]


def test_a_deeply_nested_head_is_refused(episode):
    for nest in (b"\x91", b"\x81\x00", b"\x81\xa1a"):
        deep = b"\x81\xa6header\x81\xa8metadata\x81\xa1k" + nest * 200_000
        with pytest.raises(CodecError):
            read([deep, *frames_of(episode)[1:]])


def test_sizes_are_capped_before_anything_is_read(episode, blob):
    small = len(blob) - 1
    for limits in ({"blob_bytes": small}, {"head_bytes": 10}, {"units": 11}, {"segments": 4}):
        with pytest.raises(SizeError):
            unpack(blob, limits=EpisodeLimits(**limits))
    with pytest.raises(CodecError):
        unpack(blob, limits=EpisodeLimits(columns=0))
    for limits in ({"blob_bytes": small}, {"head_bytes": 10}):
        with pytest.raises(SizeError):
            pack(episode, limits=EpisodeLimits(**limits))
    wide = pack(with_columns(episode, {"experts": np.zeros((12, 3), np.uint16)}))
    head = len(frames_of(unpack(wide))[HEAD])
    exact = EpisodeLimits(len(wide), head, units=12, segments=5, columns=2, column_width=3)
    assert pack(unpack(wide, limits=exact), limits=exact) == wide
    with pytest.raises(SizeError):
        unpack(wide, limits=EpisodeLimits(column_width=2))


def test_more_optional_columns_than_by_default_need_a_wider_limit(episode):
    limits = EpisodeLimits(columns=50)
    wide = with_columns(episode, {f"c{i}": np.zeros(12, np.float32) for i in range(49)}, limits=limits)
    blob = pack(wide, limits=limits)
    assert unpack(blob, limits=limits) == wide
    with pytest.raises(CodecError):
        unpack(blob)


@pytest.mark.parametrize("value", [object(), {1, frozenset}, 2**70, "\ud800", np.float32(1)])
def test_metadata_that_msgpack_cannot_hold_is_a_typed_error(two_turns, value):
    two_turns.meta(bad=value)
    with pytest.raises(CodecError):
        pack(two_turns.build())
