"""The delta of one block: lossless whatever the bits, and closed to hostile bytes."""

import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_async.base.errors import SnapshotError
from areal_async.weights.delta_codec import BLOCK_BYTES, Reader, apply, blocks_of, encode

HEAD = struct.Struct("<IIII")
FLOATS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def made_again(base: np.ndarray, new: np.ndarray, width: int) -> bytes:
    data = encode(base, new, width)
    target, source = base.copy(), Reader(data)
    changed = apply(target, source, width)
    assert changed == int((base.view(f"u{width}") != new.view(f"u{width}")).sum())
    assert source.at == len(data)
    assert target.tobytes() == new.tobytes()
    return data


def with_share(width: int, n: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Any bits at all, and the same with a share of the elements changed, as uint8."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, n * width, dtype=np.uint8)
    new = old.copy().view(f"u{width}")
    at = rng.random(n) < share
    new[at] += rng.integers(1, 200, int(at.sum())).astype(new.dtype)
    return old, new.view(np.uint8)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("share", [0, 0.0005, 0.01, 0.6, 1])
def test_every_share_of_changes_comes_back(width, share):
    base, new = with_share(width, 10_001, share)
    assert (len(made_again(base, new, width)) == HEAD.size) == (share == 0)


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3000),
    st.lists(st.tuples(st.integers(0, 11_999), st.integers(0, 255)), max_size=40),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=200)
def test_any_change_of_any_bytes_comes_back(width, n, changes, seed):
    old = np.random.default_rng(seed).integers(0, 256, n * width, dtype=np.uint8)
    new = old.copy()
    for at, byte in changes:
        if at < len(new):
            new[at] = byte
    made_again(old, new, width)


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_compares_equal_or_unequal_to_itself_is_told_apart_by_its_bits(dtype):
    width = dtype.itemsize
    values = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), torch.finfo(dtype).tiny / 4, 1.0]
    for one in values:
        for other in values:
            pair = (torch.tensor([value, 1.0], dtype=dtype) for value in (one, other))
            made_again(*map(bytes_of, pair), width)
    quiet = torch.tensor([float("nan")] * 4, dtype=dtype)
    payload = quiet.clone()
    payload.view(FLOATS[dtype])[2] += 1
    assert torch.isnan(payload).all()
    assert len(made_again(bytes_of(quiet), bytes_of(payload), width)) > HEAD.size
    zero = torch.zeros(4, dtype=dtype)
    assert len(made_again(bytes_of(zero), bytes_of(-zero), width)) > HEAD.size


def test_one_step_in_the_last_place_of_a_percent_of_bf16_takes_a_hundredth_of_the_bytes():
    base = bytes_of(torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16())
    new = base.copy()
    at = torch.rand(200_000, generator=torch.Generator().manual_seed(1)) < 0.01
    new.view(np.int16)[at.numpy()] += 1
    assert len(made_again(base, new, 2)) < 0.0125 * base.nbytes


def test_blocks_cover_every_byte_once():
    assert list(blocks_of(0)) == []
    assert list(blocks_of(2 * BLOCK_BYTES + 1)) == [
        (0, BLOCK_BYTES),
        (BLOCK_BYTES, 2 * BLOCK_BYTES),
        (2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1),
    ]


def block(changed: int, raw: int, positions: bytes, values: bytes) -> bytes:
    packed = [zstandard.ZstdCompressor().compress(d) if d else b"" for d in (positions, values)]
    return HEAD.pack(changed, raw, len(packed[0]), len(packed[1])) + packed[0] + packed[1]


def with_values(frame: bytes) -> bytes:
    """A block of eight changed elements with these bytes for the frame of its values."""
    positions = zstandard.ZstdCompressor().compress(bytes(8))
    return HEAD.pack(8, 8, len(positions), len(frame)) + positions + frame


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 20))
SMALL = zstandard.ZstdCompressor().compress(bytes(16))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(range(16)))
EIGHT = {
    "unchanged with positions": block(0, 0, b"\0", b""),
    "unchanged with bytes": HEAD.pack(0, 0, 0, 9) + b"123456789",
    "more changes than elements": block(9, 9, bytes(9), bytes(18)),
    "a position behind the block": block(1, 1, b"\x08", b"\2\0"),
    "positions that run out of the block": block(5, 5, b"\1" * 5, bytes(10)),
    "fewer positions than changes": block(2, 2, b"\0", bytes(4)),
    "more positions than changes": block(1, 2, b"\0\0", bytes(2)),
    "a gap without end": block(1, 1, b"\xff", bytes(2)),
    "too few values": block(1, 1, b"\0", b"\2"),
    "too many values": block(8, 8, bytes(8), bytes(18)),
    "no values": block(8, 8, bytes(8), b""),
    "no positions": HEAD.pack(8, 8, 0, len(SMALL)) + SMALL,
    "no frame": with_values(bytes(16)),
    "a frame that says nothing of its size": with_values(UNSIZED),
    "a bomb of values": with_values(BOMB),
    "a frame of absurd size": with_values(b"")[:-4] + struct.pack("<I", 1 << 31) + bytes(100),
    "two frames": with_values(SMALL + SMALL),
    "nothing but a head": HEAD.pack(8, 8, 10, 10),
    "half a head": b"\1\0",
}


@pytest.mark.parametrize("name", EIGHT)
def test_hostile_bytes_are_refused_and_nothing_outside_is_touched(name):
    guarded = np.full(48, 7, np.uint8)
    with pytest.raises(SnapshotError):
        apply(guarded[16:32], Reader(EIGHT[name]), 2)
    assert (guarded[:16] == 7).all()
    assert (guarded[32:] == 7).all()


@pytest.mark.parametrize(("changed", "raw"), [(9, 9), (1, 1 << 30)])
def test_counts_that_no_block_has_are_refused_before_anything_is_unpacked(changed, raw):
    with pytest.raises(SnapshotError, match=f"a delta's block of 8 elements cannot have {changed} changed"):
        apply(np.zeros(16, np.uint8), Reader(HEAD.pack(changed, raw, 1, 1)), 2)


@given(st.data(), st.floats(0.001, 1), st.sampled_from([1, 2, 4]))
@settings(max_examples=200)
def test_a_damaged_delta_is_refused_or_makes_a_block(data, share, width):
    """Whatever is cut or flipped: `SnapshotError`, or a result that the hash of the part will judge."""
    base, new = with_share(width, 5000, share)
    good = bytearray(encode(base, new, width))
    assume(len(good) > HEAD.size)
    if data.draw(st.booleans()):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        bad = good
        for _ in range(data.draw(st.integers(1, 4))):
            bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    target = base.copy()
    try:
        apply(target, Reader(bytes(bad)), width)
    except SnapshotError:
        return
    assert target.shape == new.shape
