"""The codec of episodes. An episode becomes frames: a msgpack head and raw little-endian arrays. The frames
are stored in one aligned blob.

The buffer stores blobs, and every service passes them on. `docs/buffer.md#trajectory-format` describes the
format. A blob has no routes (see `routes.py`).

Reading trusts no byte: each input gives a valid Episode or raises a TrajectoryError. The arrays of a decoded
episode are read-only views of the blob. A blob with unaligned memory is copied first.

All numbers of a blob are little-endian. The prefix is: magic `ATRJ`, u16 schema, u16 number of frames, u64
size, u32 CRC-32 of everything after the prefix, u32 zero. Then follow a table with u64 offset and u64 size of
each frame, and the frames, each at the next multiple of 8."""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.episode import Episode
from areal_async.trajectory.layout import (
    COLUMN_DTYPES,
    DEFAULT_LIMITS,
    F32,
    I32,
    I64,
    ROUTES,
    TABLE_COLUMNS,
    TRAJECTORY_SCHEMA,
    U8,
    CodecError,
    EpisodeHeader,
    EpisodeLimits,
    SchemaError,
    Segments,
    SizeError,
    Units,
)

Buffer = bytes | bytearray | memoryview

CORE_FRAMES = 6  # head, segments, token_id, logprob, version, mask; optional columns follow

SEGMENT_BYTES = I64.itemsize + len(TABLE_COLUMNS) * I32.itemsize + F32.itemsize

_TABLE_WIDTH = len(TABLE_COLUMNS)
_DTYPE_NAMES = {dtype: name for name, dtype in COLUMN_DTYPES.items()}

MAGIC = b"ATRJ"
ALIGNMENT = 8

_PREFIX = struct.Struct("<4sHHQII")
_FRAME_BYTES = 16
_PADDING = [bytes(-size % ALIGNMENT) for size in range(ALIGNMENT)]


class EpisodeHead(msgspec.Struct, frozen=True):
    """The first frame: the header, and the sizes of the other frames.

    `columns` describes the frames of optional columns in order, as (name, element type, width). Width 0 means
    one value per unit. Width k > 0 means a row of k values per unit."""

    header: EpisodeHeader
    segments: int
    units: int
    columns: list[tuple[str, str, int]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EpisodeHead)


def _episode_of(view: memoryview, spans: Sequence[tuple[int, int]], limits: EpisodeLimits) -> Episode:
    """Return the episode of a blob. `spans` has (offset, size) of each frame."""
    head = read_head(view, spans, limits)
    n_segments, n_units, table_at = head.segments, head.units, spans[1][0]
    token_id, logprob, version, mask = spans[2:CORE_FRAMES]
    columns = _columns_at(head, spans, limits) if head.columns else ()
    anchor = np.frombuffer(view, I64, n_segments, table_at)
    if not anchor.flags.aligned:  # Frames begin at multiples of 8, so all of them are aligned or none is
        view = memoryview(bytes(view))
        anchor = np.frombuffer(view, I64, n_segments, table_at)
    table_at += I64.itemsize * n_segments
    cells = _TABLE_WIDTH * n_segments
    table = np.frombuffer(view, I32, cells, table_at).reshape(_TABLE_WIDTH, n_segments)
    reward = np.frombuffer(view, F32, n_segments, table_at + I32.itemsize * cells)
    units = Units(
        np.frombuffer(view, I32, n_units, token_id[0]),
        np.frombuffer(view, U8, n_units, mask[0]),
        np.frombuffer(view, F32, n_units, logprob[0]),
        np.frombuffer(view, I32, n_units, version[0]),
        {name: np.ndarray(shape, dtype, view, at) for name, dtype, shape, at in columns},
    )
    return Episode(head.header, Segments(table, reward, anchor), units, limits=limits)


def read_head(view: memoryview, spans: Sequence[tuple[int, int]], limits: EpisodeLimits) -> EpisodeHead:
    """Return the head of a blob, checked against the sizes of its frames. `spans` has (offset, size) of each
    frame."""
    head_at, head_bytes = spans[0]
    head = _decode_head(view[head_at : head_at + head_bytes], limits)
    if len(head.columns) != len(spans) - CORE_FRAMES:
        raise CodecError(f"the head names {len(head.columns)} optional columns, {len(spans)} frames came")
    n_segments, n_units = head.segments, head.units
    if not (0 <= n_segments <= limits.segments and 0 <= n_units <= limits.units):
        raise SizeError(f"{n_segments} segments, {n_units} units: limits {limits.segments}, {limits.units}")
    if spans[1][1] != n_segments * SEGMENT_BYTES:
        raise CodecError(f"the segment frame has {spans[1][1]} bytes for {n_segments} segments")
    width = I32.itemsize * n_units
    token_id, logprob, version, mask = spans[2:CORE_FRAMES]
    if not token_id[1] == logprob[1] == version[1] == width or mask[1] != n_units:
        raise CodecError(f"the unit frames do not have the sizes of {n_units} units")
    return head


def pack_head(head: EpisodeHead, limits: EpisodeLimits = DEFAULT_LIMITS) -> bytes:
    """Return the first frame of a blob. Raises as `pack` does."""
    try:
        frame = _encoder.encode(head)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise CodecError(f"the header does not fit msgpack: {error}") from error
    if len(frame) > limits.head_bytes:
        raise SizeError(f"a head of {len(frame)} bytes, the limit is {limits.head_bytes}")
    return frame


def _parts_of(episode: Episode, limits: EpisodeLimits) -> list[bytes | NDArray]:
    """Return the frames in order, as objects that `bytes.join` accepts."""
    segments, units = episode.segments, episode.units
    columns = {name: column for name, column in units.columns.items() if name != ROUTES}
    specs = [(n, _DTYPE_NAMES[c.dtype], c.shape[1] if c.ndim == 2 else 0) for n, c in columns.items()]
    head = pack_head(EpisodeHead(episode.header, len(segments), len(units), specs), limits)
    table = b"".join((segments.anchor.tobytes(), segments.table.tobytes(), segments.reward.tobytes()))
    core: list[bytes | NDArray] = [head, table, units.token_id, units.logprob, units.version, units.mask]
    core.extend(columns.values())
    return [part if isinstance(part, bytes) else np.ascontiguousarray(part) for part in core]


def _decode_head(frame: memoryview, limits: EpisodeLimits) -> EpisodeHead:
    if len(frame) > limits.head_bytes:
        raise SizeError(f"a head of {len(frame)} bytes, the limit is {limits.head_bytes}")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError(f"unreadable head: {error}") from error


def _columns_at(
    head: EpisodeHead, spans: Sequence[tuple[int, int]], limits: EpisodeLimits
) -> list[tuple[str, np.dtype, tuple[int, ...], int]]:
    """Return name, dtype, shape and offset of each optional column."""
    columns: dict[str, tuple[str, np.dtype, tuple[int, ...], int]] = {}
    for (name, dtype_name, width), (at, size) in zip(head.columns, spans[CORE_FRAMES:], strict=True):
        dtype, what = COLUMN_DTYPES.get(dtype_name), f"optional column {name[:64]!r}"
        if dtype is None or name in columns:
            raise CodecError(f"{what} of type {dtype_name[:16]!r}: unknown or repeated")
        if not 0 <= width <= limits.column_width:
            raise SizeError(f"{what}: width {width}, the limit is {limits.column_width}")
        shape = (head.units, width) if width else (head.units,)
        if size != math.prod(shape) * dtype.itemsize:
            raise CodecError(f"{what}: {size} bytes for {shape} {dtype_name}")
        columns[name] = (name, dtype, shape, at)
    return list(columns.values())


def pack(episode: Episode, *, limits: EpisodeLimits = DEFAULT_LIMITS) -> bytes:
    """Return the blob of an episode. Raises SizeError above `limits`, and CodecError if metadata does not fit
    msgpack."""
    return pack_frames(_parts_of(episode, limits), limits)


def pack_frames(parts: Sequence[bytes | NDArray], limits: EpisodeLimits = DEFAULT_LIMITS) -> bytes:
    """Return the blob of these frames. Raises SizeError above `limits`."""
    table = _table_of(len(parts))
    offset = _PREFIX.size + table.size
    spans: list[int] = []
    body: list[object] = [b""]
    for part in parts:
        size = len(part) if isinstance(part, bytes) else part.nbytes
        padding = _PADDING[size % ALIGNMENT]
        spans += (offset, size)
        body += (part, padding)
        offset += size + len(padding)
    if offset > limits.blob_bytes:
        raise SizeError(f"a blob of {offset} bytes, the limit is {limits.blob_bytes}")
    body[0] = table.pack(*spans)
    rest = b"".join(body)  # type: ignore[arg-type]
    return _PREFIX.pack(MAGIC, TRAJECTORY_SCHEMA, len(parts), offset, zlib.crc32(rest), 0) + rest


def unpack(buffer: Buffer, *, limits: EpisodeLimits = DEFAULT_LIMITS) -> Episode:
    """Return the episode of a blob. Its arrays are views, so they keep `buffer` alive. Raises
    TrajectoryError."""
    view, spans = opened(buffer, limits)
    return _episode_of(view, spans, limits)


@functools.cache
def _table_of(n_frames: int) -> struct.Struct:
    """Return the layout of the frame table: (u64 offset, u64 size) per frame."""
    return struct.Struct(f"<{2 * n_frames}Q")


def opened(buffer: Buffer, limits: EpisodeLimits) -> tuple[memoryview, list[tuple[int, int]]]:
    """Check prefix, frame table and checksum of a blob. Return its bytes, and (offset, size) of each
    frame."""
    view = memoryview(buffer).toreadonly()
    if view.itemsize != 1 or view.ndim != 1:
        view = view.cast("B")
    size = len(view)
    if size > limits.blob_bytes:
        raise SizeError(f"a blob of {size} bytes, the limit is {limits.blob_bytes}")
    if size < _PREFIX.size:
        raise CodecError(f"{size} bytes are not an episode")
    magic, schema, n_frames, declared, crc, zero = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise CodecError("the bytes do not start with the magic of an episode")
    if schema != TRAJECTORY_SCHEMA:
        raise SchemaError(f"a blob of schema {schema}, this process reads {TRAJECTORY_SCHEMA}")
    if declared != size or zero:
        raise CodecError(f"the blob says {declared} bytes and has {size}")
    body_at = _PREFIX.size + n_frames * _FRAME_BYTES
    if not CORE_FRAMES <= n_frames <= CORE_FRAMES + limits.columns or size < body_at:
        raise CodecError(f"a blob of {size} bytes cannot hold {n_frames} frames")
    if zlib.crc32(view[_PREFIX.size :]) != crc:
        raise CodecError("the checksum does not match: the bytes were altered")
    places = _table_of(n_frames).unpack_from(view, _PREFIX.size)
    spans = list(zip(places[::2], places[1::2], strict=True))
    expected = body_at
    for i, (offset, length) in enumerate(spans):
        if offset != expected or length > size - offset:
            raise CodecError(f"frame {i} is not where the blob has room for it")
        expected = offset + length + -length % ALIGNMENT
    if expected != size:
        raise CodecError(f"{size - expected} bytes follow the last frame")
    return view, spans
