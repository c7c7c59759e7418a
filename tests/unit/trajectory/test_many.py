"""Many episodes read at once, and headers alone."""

from __future__ import annotations

import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.trajectory import (
    Call,
    CodecError,
    Episode,
    EpisodeBuilder,
    Sampling,
    TrajectoryError,
    pack,
    read_header,
    unpack,
    unpack_many,
)
from areal_async.trajectory.codec import SEGMENT_BYTES

PREFIX = struct.Struct("<4sHHQII")
HEAD, TABLE, TOKENS, LOGPROBS, VERSIONS, MASK = range(6)


def episode(sample: int = 0, *, turns: int = 1, trained: bool = True, units: int = 3) -> Episode:
    builder = EpisodeBuilder("job", "t", "t#0", sample)
    segment = None
    for turn in range(turns):
        segment = builder.observed(0 if turn == 0 else 2, [5, 6, 7], segment, turn=turn)
        segment = builder.sampled(
            list(range(turn, turn + units)),
            [-0.5] * units,
            [2 + n % 2 for n in range(units)],
            parent=segment,
            call=Call(sampling=Sampling(seed=sample)),
            epoch=1,
            mask=None if trained else [0] * units,
        )
    builder.text("what", f"answer {sample}")
    return builder.build()


def outcome(blob: Any) -> Any:
    try:
        return unpack(blob)
    except TrajectoryError as error:
        return type(error), str(error)


def outcomes(blobs: list[Any]) -> list[Any]:
    return [
        (type(found), str(found)) if isinstance(found, TrajectoryError) else found
        for found in unpack_many(blobs)
    ]


def altered(blob: bytes, frame: int, at: int, value: bytes) -> bytes:
    """Return the blob with other bytes in a frame, and a right checksum."""
    start, _ = struct.unpack_from("<2Q", blob, PREFIX.size + 16 * frame)
    data = bytearray(blob)
    data[start + at : start + at + len(value)] = value
    magic, schema, frames, size, _, zero = PREFIX.unpack_from(data)
    data[: PREFIX.size] = PREFIX.pack(magic, schema, frames, size, zlib.crc32(data[PREFIX.size :]), zero)
    return bytes(data)


def of_table(row: int, segment: int, segments: int = 2) -> int:
    """Return where a cell of the segment table begins in its frame."""
    return 8 * segments + 4 * (row * segments + segment)


I32 = struct.Struct("<i").pack
F32 = struct.Struct("<f").pack
FORGED = {
    "parent": (TABLE, of_table(0, 0), I32(0)),
    "parent below none": (TABLE, of_table(0, 1), I32(-2)),
    "kind": (TABLE, of_table(1, 0), I32(9)),
    "prompt as sampled": (TABLE, of_table(1, 0), I32(1)),
    "answer as prompt": (TABLE, of_table(1, 1), I32(0)),
    "agent": (TABLE, of_table(2, 1), I32(1)),
    "turn": (TABLE, of_table(3, 0), I32(-1)),
    "offset": (TABLE, of_table(4, 1), I32(2)),
    "length": (TABLE, of_table(5, 1), I32(4)),
    "negative length": (TABLE, of_table(5, 0), I32(-3)),
    "flags": (TABLE, of_table(6, 0), I32(4)),
    "reward": (TABLE, 2 * SEGMENT_BYTES - 8, F32(float("inf"))),
    "token": (TOKENS, 0, I32(-1)),
    "logprob above 0": (LOGPROBS, 12, F32(0.5)),
    "logprob not a number": (LOGPROBS, 12, F32(float("nan"))),
    "logprob infinite": (LOGPROBS, 12, F32(float("-inf"))),
    "version": (VERSIONS, 12, I32(-2)),
    "version of a prompt": (VERSIONS, 0, I32(1)),
    "trained without a version": (VERSIONS, 12, I32(-1)),
    "mask": (MASK, 3, b"\x02"),
    "trained prompt": (MASK, 0, b"\x01"),
    "epochs begin elsewhere": (MASK, 3, b"\x00"),
}


def test_many_episodes_are_read_as_each_alone() -> None:
    made = [
        *(episode(sample, units=1 + sample % 5) for sample in range(20)),
        *(episode(sample, turns=3) for sample in range(20, 24)),
        episode(30, trained=False),
    ]
    found = unpack_many([pack(each) for each in made])
    assert found == made
    for one, each in zip(found, made, strict=True):
        assert isinstance(one, Episode)
        assert one.versions == each.versions
        assert (one.n_sampled, one.min_version, one.max_version, one.min_epoch) == (
            each.n_sampled,
            each.min_version,
            each.max_version,
            each.min_epoch,
        )
        for array in (one.segments.table, one.segments.reward, one.segments.anchor, one.units.token_id):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_a_long_episode_and_one_with_columns_are_read_too() -> None:
    builder = EpisodeBuilder("job", "t", "t#0", 0)
    prompt = builder.prompt([1])
    answer = builder.sampled([2, 3], [-1.0, -2.0], 1, parent=prompt, epoch=1)
    builder.column("entropy", answer, [0.5, 0.25])
    made = [episode(), episode(1, units=9000), builder.build()]
    assert unpack_many([pack(each) for each in made]) == made


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_episode_has_the_error_of_unpack_and_costs_no_other(what: str) -> None:
    forged = altered(pack(episode(1)), *FORGED[what])
    blobs = [pack(episode(0)), forged, pack(episode(2))]
    assert isinstance(outcome(forged), tuple), "unpack refuses it"
    assert outcomes(blobs) == [episode(0), outcome(forged), episode(2)]


@given(st.integers(0, 2**32), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_noise_has_the_outcome_of_unpack(seed: int, kind: int) -> None:
    rng = random.Random(seed)
    blobs = [pack(episode(n, turns=1 + rng.randrange(2))) for n in range(3)]
    frame, at, value = rng.randrange(6), rng.randrange(24), rng.randbytes(rng.choice([1, 4]))
    if kind == 0:
        blobs[1] = altered(blobs[1], frame, at, value)
    elif kind == 1:
        blobs[1] = blobs[1][: rng.randrange(len(blobs[1]))]
    else:
        data = bytearray(blobs[1])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        blobs[1] = bytes(data)
    assert outcomes(blobs) == [outcome(blob) for blob in blobs]


def test_a_header_is_read_alone() -> None:
    made = episode(4, units=5)
    header, n_sampled = read_header(memoryview(pack(made)))
    assert (header, n_sampled) == (made.header, 5)
    with pytest.raises(CodecError, match="checksum"):
        read_header(pack(made)[:-1] + b"x")


def test_nothing_is_read_from_nothing() -> None:
    assert unpack_many([]) == []
    assert np.all([isinstance(each, CodecError) for each in unpack_many([b"", b"xyz"])])
