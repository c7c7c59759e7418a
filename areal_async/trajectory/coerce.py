"""What a caller hands in (lists, arrays of any number type) as typed columns, or an InvariantError.

Nothing is cut to fit: a float is no token id, and a value beyond 32 bits is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.errors import InvariantError
from areal_async.trajectory.tables import F32, I32, U8

Ints = Sequence[int] | NDArray[Any]
Floats = Sequence[float] | NDArray[Any]


def epoch_runs(epoch: int | Ints, bits: bytes) -> list[tuple[int, int]]:
    """Runs (first unit, epoch) over the units of a segment whose bit is 1."""
    if isinstance(epoch, (int, np.integer)):
        first = bits.find(1)
        return [(first, int(epoch))] if first >= 0 else []
    epochs = ints(epoch, "epoch")
    if len(epochs) != len(bits):
        raise InvariantError(f"{len(bits)} ids and {len(epochs)} epochs do not match")
    units = np.flatnonzero(np.frombuffer(bits, U8))
    values = np.frombuffer(epochs.tobytes(), I32)[units]
    changes = np.ones(len(units), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return list(zip(units[changes].tolist(), values[changes].tolist(), strict=True))


def ints(values: Ints, what: str) -> array[int]:
    """Values as i32; a float, or what does not fit, is refused rather than cut."""
    out = array("i")
    try:
        if not isinstance(values, np.ndarray):
            if isinstance(values, (bytes, bytearray, memoryview)):
                values = list(values)  # array() would read bytes as raw memory
            return array("i", values)
        if values.dtype.kind not in "iub" or values.ndim != 1:
            raise InvariantError(f"{what}: a 1-D integer array is needed, not {values.dtype} {values.shape}")
        if values.dtype != I32:
            narrow = values.astype(I32)
            if not np.array_equal(narrow, values):
                raise InvariantError(f"{what}: a value does not fit 32 bits")
            values = narrow
        out.frombytes(values.tobytes())
    except (TypeError, OverflowError) as error:
        raise InvariantError(f"{what}: {error}") from error
    return out


def floats(values: Floats, what: str) -> array[float]:
    """Values as f32."""
    out = array("f")
    try:
        if not isinstance(values, np.ndarray):
            return array("f", values)
        if values.dtype.kind != "f" or values.ndim != 1:
            raise InvariantError(f"{what}: a 1-D float array is needed, not {values.dtype} {values.shape}")
        out.frombytes(values.astype(F32, copy=False).tobytes())
    except (TypeError, OverflowError) as error:
        raise InvariantError(f"{what}: {error}") from error
    return out


def mask_bytes(mask: Ints) -> bytes:
    try:
        return bytes(ints(mask, "mask").tolist())
    except ValueError as error:
        raise InvariantError(f"mask: {error}") from error
