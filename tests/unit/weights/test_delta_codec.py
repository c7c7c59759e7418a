"""The delta of one block: lossless whatever the bits, and closed to hostile bytes."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_async.base.errors import SnapshotError
from areal_async.weights.delta_codec import apply, encode

FLOATS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def made_again(base: np.ndarray, new: np.ndarray, width: int) -> bytes:
    data = encode(base, new, width)
    target = base.copy()
    changed = apply(target, data, width)
    assert changed == int((base.view(f"u{width}") != new.view(f"u{width}")).sum())
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
    assert (not made_again(base, new, width)) == (share == 0)


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
    assert len(made_again(bytes_of(quiet), bytes_of(payload), width)) > 0
    zero = torch.zeros(4, dtype=dtype)
    assert len(made_again(bytes_of(zero), bytes_of(-zero), width)) > 0


def test_one_step_in_the_last_place_of_a_percent_of_bf16_takes_a_hundredth_of_the_bytes():
    base = bytes_of(torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16())
    new = base.copy()
    at = torch.rand(200_000, generator=torch.Generator().manual_seed(1)) < 0.01
    new.view(np.int16)[at.numpy()] += 1
    assert len(made_again(base, new, 2)) < 0.0125 * base.nbytes


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


GOOD = frame(b"\xff" + bytes(16))  # all of eight elements, by 0
EIGHT = {
    "too few values": frame(b"\xff" + bytes(14)),
    "too many values": frame(b"\x7f" + bytes(16)),
    "no values": frame(b"\x80"),
    "no positions": frame(b""),
    "values without a change": frame(b"\0" + bytes(2)),
    "more values than elements": frame(b"\xff" + bytes(18)),
    "no frame": b"\xff" + bytes(16),
    "a frame that says nothing of its size": zstandard.ZstdCompressor(write_content_size=False).compress(
        b"\xff" + bytes(16)
    ),
    "a bomb of values": frame(bytes(1 << 20)),
    "two frames": GOOD + GOOD,
    "half a frame": GOOD[:-3],
    "bytes behind the frame": GOOD + b"x",
}


@pytest.mark.parametrize("name", EIGHT)
def test_hostile_bytes_are_refused_and_nothing_outside_is_touched(name):
    guarded = np.full(48, 7, np.uint8)
    with pytest.raises(SnapshotError):
        apply(guarded[16:32], EIGHT[name], 2)
    assert (guarded[:16] == 7).all()
    assert (guarded[32:] == 7).all()


@pytest.mark.parametrize("size", [0, 18, 1 << 20])
def test_sizes_that_no_part_has_are_refused_before_anything_is_unpacked(size):
    with pytest.raises(SnapshotError, match=f"a delta's frame of {size} bytes is not one of its part"):
        apply(np.zeros(16, np.uint8), frame(bytes(size)), 2)


@given(st.data(), st.floats(0.001, 1), st.sampled_from([1, 2, 4]))
@settings(max_examples=200)
def test_a_damaged_delta_is_refused_or_makes_a_block(data, share, width):
    """Whatever is cut or flipped: `SnapshotError`, or a result that the hash of the part will judge."""
    base, new = with_share(width, 5000, share)
    good = bytearray(encode(base, new, width))
    assume(good)
    if data.draw(st.booleans()):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        bad = good
        for _ in range(data.draw(st.integers(1, 4))):
            bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    target = base.copy()
    try:
        apply(target, bytes(bad), width)
    except SnapshotError:
        return
    assert target.shape == new.shape
