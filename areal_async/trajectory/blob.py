"""The frames of an episode in one aligned blob: what the buffer stores and every service passes on.

Layout (little-endian): magic `ATRJ`, u16 schema, u16 frames, u64 size, u32 CRC-32 of everything after the
prefix, u32 zero; then per frame u64 offset and u64 size; then the frames, each at the next multiple of 8.
"""

from __future__ import annotations

import functools
import struct
import zlib

import msgspec

from areal_async.trajectory.codec import CORE_FRAMES, Buffer, decode, parts_of
from areal_async.trajectory.episode import Episode
from areal_async.trajectory.errors import CodecError, SchemaError, SizeError
from areal_async.trajectory.header import TRAJECTORY_SCHEMA
from areal_async.trajectory.limits import DEFAULT_LIMITS, Limits
from areal_async.trajectory.trainable import untrainable

MAGIC = b"ATRJ"
ALIGNMENT = 8

_PREFIX = struct.Struct("<4sHHQII")
_FRAME_BYTES = 16
_PADDING = [bytes(-size % ALIGNMENT) for size in range(ALIGNMENT)]


class EpisodeSummary(msgspec.Struct, frozen=True):
    """What the buffer needs to know of an episode. Versions and epoch are over units with mask 1 (or -1)."""

    job: str
    task_id: str
    episode_id: str
    group_id: str
    sample: int
    attempt: int
    n_units: int
    n_sampled: int
    min_version: int
    max_version: int
    min_epoch: int
    size_bytes: int
    untrainable: str
    """Why no unit of it may be trained (`trainable.py`); empty when they may be."""


def pack(episode: Episode, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The blob of an episode. SizeError above `limits`, CodecError when metadata does not fit msgpack."""
    parts = parts_of(episode, limits)
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


def unpack(buffer: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> Episode:
    """The episode of a blob, or a TrajectoryError. Its arrays are views that keep `buffer` alive."""
    return decode(_frames(buffer, limits), limits=limits)


def summarise(buffer: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> EpisodeSummary:
    """Validate a blob as `unpack` does and say what it holds."""
    episode = unpack(buffer, limits=limits)
    header = episode.header
    return EpisodeSummary(
        header.job,
        header.task_id,
        header.episode_id,
        header.group_id,
        header.sample,
        header.attempt,
        len(episode.units),
        episode.n_sampled,
        episode.min_version,
        episode.max_version,
        episode.min_epoch,
        memoryview(buffer).nbytes,
        untrainable(episode),
    )


@functools.cache
def _table_of(n_frames: int) -> struct.Struct:
    """The frame table: (u64 offset, u64 size) per frame."""
    return struct.Struct(f"<{2 * n_frames}Q")


def _frames(buffer: Buffer, limits: Limits) -> list[memoryview]:
    """The frames of a blob whose prefix, frame table and checksum hold."""
    view = memoryview(buffer).toreadonly()
    if view.itemsize != 1 or view.ndim != 1:
        view = view.cast("B")
    size = len(view)
    if size < _PREFIX.size:
        raise CodecError(f"{size} bytes are not an episode")
    if size > limits.blob_bytes:
        raise SizeError(f"a blob of {size} bytes, the limit is {limits.blob_bytes}")
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
    spans = _table_of(n_frames).unpack_from(view, _PREFIX.size)
    expected = body_at
    frames = []
    for i in range(0, 2 * n_frames, 2):
        offset, length = spans[i], spans[i + 1]
        if offset != expected or length > size - offset:
            raise CodecError(f"frame {i // 2} is not where the blob has room for it")
        frames.append(view[offset : offset + length])
        expected = offset + length + len(_PADDING[length % ALIGNMENT])
    if expected != size:
        raise CodecError(f"{size - expected} bytes follow the last frame")
    return frames
