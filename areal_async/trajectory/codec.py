"""An episode as frames: a msgpack head and raw little-endian arrays. `docs/trajectory.md` is the format.

Reading trusts nothing: whatever the bytes are, the outcome is a valid Episode or a TrajectoryError. The
arrays of a decoded episode are read-only views of the frames (a frame whose memory is not aligned for its
type is copied).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.episode import Episode
from areal_async.trajectory.errors import CodecError, SizeError
from areal_async.trajectory.header import Header
from areal_async.trajectory.limits import DEFAULT_LIMITS, Limits
from areal_async.trajectory.tables import (
    COLUMN_DTYPES,
    F32,
    I32,
    I64,
    TABLE_COLUMNS,
    U8,
    Segments,
    Units,
    frozen,
)

Buffer = bytes | bytearray | memoryview

CORE_FRAMES = 6
"""head, segments, token_id, logprob, version, mask; optional columns follow."""

SEGMENT_BYTES = I64.itemsize + len(TABLE_COLUMNS) * I32.itemsize + F32.itemsize

_TABLE_WIDTH = len(TABLE_COLUMNS)
_DTYPE_NAMES = {dtype: name for name, dtype in COLUMN_DTYPES.items()}


class Head(msgspec.Struct, frozen=True):
    """The first frame: the header, and the sizes that the other frames must have.

    `columns` describes the optional frames in order: (name, element type, width); width 0 is one plain value
    per unit, k > 0 a row of k values.
    """

    header: Header
    segments: int
    units: int
    columns: list[tuple[str, str, int]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)


def encode(episode: Episode, *, limits: Limits = DEFAULT_LIMITS) -> list[memoryview]:
    """The frames of an episode; all but the head are views of its arrays.

    Raises CodecError when metadata does not fit msgpack, SizeError when the head is too long.
    """
    return [_bytes_of(part) for part in parts_of(episode, limits)]


def decode(frames: Sequence[Buffer], *, limits: Limits = DEFAULT_LIMITS) -> Episode:
    """The episode of these frames. Raises a TrajectoryError for anything that is not one."""
    if not CORE_FRAMES <= len(frames) <= CORE_FRAMES + limits.columns:
        raise CodecError(f"{len(frames)} frames are not an episode")
    head = _decode_head(frames[0], limits)
    if len(head.columns) != len(frames) - CORE_FRAMES:
        raise CodecError(f"the head names {len(head.columns)} optional columns, {len(frames)} frames came")
    n_segments, n_units = head.segments, head.units
    if not (0 <= n_segments <= limits.segments and 0 <= n_units <= limits.units):
        raise SizeError(f"{n_segments} segments, {n_units} units: limits {limits.segments}, {limits.units}")
    if len(frames[1]) != n_segments * SEGMENT_BYTES:
        raise CodecError(f"the segment frame has {len(frames[1])} bytes for {n_segments} segments")
    table_at = I64.itemsize * n_segments
    reward_at = table_at + _TABLE_WIDTH * I32.itemsize * n_segments
    segments = Segments(
        _array(frames[1], I32, (_TABLE_WIDTH, n_segments), table_at),
        _array(frames[1], F32, (n_segments,), reward_at),
        _array(frames[1], I64, (n_segments,)),
    )
    token_id, logprob, version, mask = frames[2:CORE_FRAMES]
    if not len(token_id) == len(logprob) == len(version) == n_units * I32.itemsize or len(mask) != n_units:
        raise CodecError(f"the unit frames do not have the sizes of {n_units} units")
    units = Units(
        _array(token_id, I32, (n_units,)),
        _array(mask, U8, (n_units,)),
        _array(logprob, F32, (n_units,)),
        _array(version, I32, (n_units,)),
        _optional_columns(head, frames, limits) if head.columns else None,
    )
    return Episode(head.header, segments, units, limits=limits)


def parts_of(episode: Episode, limits: Limits) -> list[bytes | NDArray]:
    """The frames as what `bytes.join` takes, in order."""
    segments, units = episode.segments, episode.units
    columns = units.columns
    specs = [(n, _DTYPE_NAMES[c.dtype], c.shape[1] if c.ndim == 2 else 0) for n, c in columns.items()]
    try:
        head = _encoder.encode(Head(episode.header, len(segments), len(units), specs))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise CodecError(f"the header does not fit msgpack: {error}") from error
    if len(head) > limits.head_bytes:
        raise SizeError(f"a head of {len(head)} bytes, the limit is {limits.head_bytes}")
    table = b"".join((segments.anchor.tobytes(), segments.table.tobytes(), segments.reward.tobytes()))
    core: list[bytes | NDArray] = [head, table, units.token_id, units.logprob, units.version, units.mask]
    core.extend(columns.values())
    return [part if isinstance(part, bytes) else np.ascontiguousarray(part) for part in core]


def _bytes_of(part: bytes | NDArray) -> memoryview:
    if isinstance(part, bytes):
        return memoryview(part)
    # A view with a zero in its shape cannot be cast.
    return part.data.cast("B") if part.size else memoryview(b"")


def _decode_head(frame: Buffer, limits: Limits) -> Head:
    if len(frame) > limits.head_bytes:
        raise SizeError(f"a head of {len(frame)} bytes, the limit is {limits.head_bytes}")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError(f"unreadable head: {error}") from error


def _optional_columns(head: Head, frames: Sequence[Buffer], limits: Limits) -> dict[str, NDArray]:
    columns: dict[str, NDArray] = {}
    for (name, dtype_name, width), frame in zip(head.columns, frames[CORE_FRAMES:], strict=True):
        dtype = COLUMN_DTYPES.get(dtype_name)
        if dtype is None or name in columns:
            raise CodecError(
                f"optional column {name[:64]!r} of type {dtype_name[:16]!r}: unknown or repeated"
            )
        if not 0 <= width <= limits.column_width:
            raise SizeError(
                f"optional column {name[:64]!r}: width {width}, the limit is {limits.column_width}"
            )
        shape = (head.units, width) if width else (head.units,)
        if len(frame) != math.prod(shape) * dtype.itemsize:
            raise CodecError(f"optional column {name[:64]!r}: {len(frame)} bytes for {shape} {dtype_name}")
        columns[name] = _array(frame, dtype, shape)
    return columns


def _array(frame: Buffer, dtype: np.dtype, shape: tuple[int, ...], start: int = 0) -> NDArray:
    """A read-only array over `frame` from byte `start`; the caller has checked the size."""
    if not len(frame):
        return frozen(np.empty(shape, dtype))
    array: NDArray = np.ndarray(shape, dtype, frame, start)
    flags = array.flags
    if flags.aligned and not flags.writeable:
        return array
    return frozen(array if flags.aligned else array.copy())
