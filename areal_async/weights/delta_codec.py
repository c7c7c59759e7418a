"""Lossless differences between two byte arrays of one size. Pure; vector operations of numpy and zstandard.

    data = encode(base, new, width)
    apply(copy_of_base, Reader(data), width)        # in place: now bit for bit `new`

`docs/weights.md` says why it looks so. Elements of `width` bytes are compared as unsigned integers; what is
larger than `BLOCK_BYTES` is cut into blocks. A block has the distances between its changed elements, and for
each of them new - base modulo its size, zigzag-coded and split into byte planes.

Format of a block: u32 changed elements, u32 bytes of distances before and after compression, u32 bytes of
values after compression (little-endian), then both as zstandard frames; only the head where nothing changed.

Promises: hostile bytes raise `SnapshotError`: every size is checked against the largest size that the block
can need, and no position outside the block is written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from areal_async.base.errors import SnapshotError

BLOCK_BYTES = 4 << 20
LEVEL = 1
LONG_GAP = 255  # A byte of this value adds 255 to the distance that the next bytes go on with

_HEAD = struct.Struct("<IIII")

Elements = npt.NDArray[Any]


class Reader:
    """A reader of bytes in memory, from the front. `at` is the number of bytes read."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.size_bytes = len(self._data)
        self.at = 0

    def read(self, n: int) -> memoryview:
        """Return the next `n` bytes, and no fewer. Raises `SnapshotError` when there are not so many."""
        if n > self.size_bytes - self.at:
            raise SnapshotError("a delta ends before its time")
        self.at += n
        return self._data[self.at - n : self.at]


def blocks_of(size_bytes: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in bytes of each block of `size_bytes`."""
    return ((at, min(at + BLOCK_BYTES, size_bytes)) for at in range(0, size_bytes, BLOCK_BYTES))


def encode(base: Elements, new: Elements, width: int) -> bytes:
    """Return one block that makes `base` into `new`: uint8 arrays of one length, a multiple of `width`."""
    old, now = (array.view(f"<u{width}") for array in (base, new))
    at = np.flatnonzero(old != now)
    if not len(at):
        return _HEAD.pack(0, 0, 0, 0)
    positions = _gaps(at)
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    packed_positions, packed_values = compress(positions), compress(_planes(now[at] - old[at]))
    head = _HEAD.pack(len(at), len(positions), len(packed_positions), len(packed_values))
    return b"".join((head, packed_positions, packed_values))


def apply(target: Elements, source: Reader, width: int) -> int:
    """Change the block `target` (uint8) by the next block of `source`; returns how many elements changed.
    Raises `SnapshotError`; `target` is then of no use."""
    size = target.nbytes // width
    changed, raw_positions, packed_positions, packed_values = _HEAD.unpack(source.read(_HEAD.size))
    if changed > size or not changed <= raw_positions <= changed + size // LONG_GAP:
        raise SnapshotError(f"a delta's block of {size} elements cannot have {changed} changed so")
    if not changed:
        if raw_positions or packed_positions or packed_values:
            raise SnapshotError("an unchanged block has bytes")
        return 0
    positions = np.frombuffer(_unpack(source, packed_positions, raw_positions), np.uint8)
    values = _unpack(source, packed_values, changed * width)
    at = _from_gaps(positions)
    if len(at) != changed or at[-1] >= size:
        raise SnapshotError("the positions of a block are not those of its changed elements")
    target.view(f"<u{width}")[at] += _from_planes(values, width)
    return int(changed)


def _gaps(at: npt.NDArray[np.int64]) -> bytes:
    """Return the elements between one changed element and the next, a byte each; longer ones in several
    bytes."""
    gaps = np.diff(at, prepend=-1) - 1
    longs = gaps // LONG_GAP
    ends = np.cumsum(longs + 1)
    out = np.full(int(ends[-1]), LONG_GAP, np.uint8)
    out[ends - 1] = gaps - longs * LONG_GAP
    return out.tobytes()


def _from_gaps(gaps: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Rising positions, by construction; the last byte must end a gap."""
    if gaps[-1] == LONG_GAP:
        raise SnapshotError("the positions of a block end inside a gap")
    ends = np.flatnonzero(gaps != LONG_GAP)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))


def _planes(differences: Elements) -> bytes:
    """Zigzag, then the lowest bytes of all values, then the next ones, …"""
    signed = differences.view(f"<i{differences.itemsize}")
    zigzag = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    return np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, signed.itemsize).T).tobytes()


def _from_planes(data: bytes, width: int) -> Elements:
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    zigzag = np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{width}")
    one = zigzag.dtype.type(1)
    return (zigzag >> one) ^ (~(zigzag & one) + one)


def _unpack(source: Reader, packed: int, raw: int) -> bytes:
    """`raw` bytes out of a frame of `packed`. The frame's own word for its size is checked before anything is
    allocated by it."""
    if packed > raw + raw // 128 + 128:
        raise SnapshotError("a delta's frame is larger than what is in it")
    data = source.read(packed)
    try:
        if zstandard.frame_content_size(data) != raw:
            raise SnapshotError("a delta's frame does not hold what its block says")
        out = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SnapshotError(f"a delta's frame is damaged: {error}") from error
    if len(out) != raw:
        raise SnapshotError("a delta's frame ends before its time")
    return out
