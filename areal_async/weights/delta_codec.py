"""Lossless differences between two byte arrays of equal size. The module is pure, and uses numpy and
zstandard.

    data = encode(base, new, width)
    apply(copy_of_base, data, width)        # in place: now bit for bit `new`

`docs/weights.md` gives the reasons for this format. Elements of `width` bytes are compared as unsigned
integers. The data is one zstandard frame, or empty if nothing changed. The frame first contains one bit per
element, which is set if the element changed. Then it contains, for each changed element, the difference new -
base (modulo 256**width), zigzag-coded and split into byte planes.

Promises: malicious bytes lead to `SnapshotError`. A size from the data is checked against the size of the
array before it is used, and no position outside the array is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from areal_async.base.errors import SnapshotError

LEVEL = 1

Elements = npt.NDArray[Any]


def encode(base: Elements, new: Elements, width: int) -> bytes:
    """Return the data that turns `base` into `new`. Both are uint8 arrays of the same length, which is a
    multiple of `width`."""
    old, now = (array.view(f"<u{width}") for array in (base, new))
    changed = old != now
    if not changed.any():
        return b""
    raw = np.packbits(changed).tobytes() + _planes(now[changed] - old[changed])
    return zstandard.ZstdCompressor(level=LEVEL).compress(raw)


def apply(target: Elements, data: bytes | memoryview, width: int) -> int:
    """Apply `data` to `target` (uint8) and return the number of changed elements.

    Raises `SnapshotError`; the content of `target` is then unusable.
    """
    if not len(data):
        return 0
    elements = target.view(f"<u{width}")
    n_bits = -(-len(elements) // 8)
    raw = _unpack(data, n_bits, n_bits + target.nbytes)
    changed = np.unpackbits(np.frombuffer(raw, np.uint8, n_bits), count=len(elements)).view(np.bool_)
    count = int(np.count_nonzero(changed))
    if len(raw) != n_bits + count * width:
        raise SnapshotError("the values of a delta are not those of its changed elements")
    elements[changed] += _from_planes(raw[n_bits:], width)
    return count


def _planes(differences: Elements) -> bytes:
    """Zigzag-code the differences. Return the lowest bytes of all values, then the second-lowest bytes of all
    values, and so on."""
    signed = differences.view(f"<i{differences.itemsize}")
    zigzag = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    return np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, signed.itemsize).T).tobytes()


def _from_planes(data: bytes, width: int) -> Elements:
    planes = np.frombuffer(data, np.uint8).reshape(width, -1)
    zigzag = np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{width}")
    one = zigzag.dtype.type(1)
    return (zigzag >> one) ^ (~(zigzag & one) + one)


def _unpack(data: bytes | memoryview, least: int, most: int) -> bytes:
    """Return the content of a frame, which must have between `least` and `most` bytes.

    The size field of the frame is checked before anything is allocated.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not least <= size <= most:
            raise SnapshotError(f"a delta's frame of {size} bytes is not one of its part")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SnapshotError(f"a delta's frame is damaged: {error}") from error
    if len(raw) != size:
        raise SnapshotError("a delta's frame ends before its time")
    return raw
