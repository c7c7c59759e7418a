"""The messages on a chunk socket. One fetcher (DEALER) asks, one station (ROUTER) answers.

    WANT   head, then 1 to `MAX_WANTED` chunk numbers, u32 little-endian: send me these. Each is one credit;
           what the station does not hold yet it sends as soon as it does.
    DROP   head: forget what I want of this snapshot.
    CHUNK  head with the number of the chunk; the bytes are the next frame.
    GONE   head: this snapshot is not held here, or no longer.

Head: magic `AC`, wire version, kind, key of the snapshot (the digest of its manifest's hash), number.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from areal_async.errors import ProtocolError
from areal_async.weights.transport.table import DIGEST_BYTES

MAGIC = b"AC"
WIRE_VERSION = 1
HEAD = struct.Struct(f"<2sBB{DIGEST_BYTES}sI")
MAX_WANTED = 64
"""Chunks that one fetcher may have asked one station for and not received."""


MAX_ASKED_BYTES = 4096
"""Of what a station is sent, handshakes included; a longer part ends the connection."""


class Kind(IntEnum):
    WANT = 1
    DROP = 2
    CHUNK = 3
    GONE = 4


class Head(NamedTuple):
    kind: Kind
    key: bytes
    number: int
    """Of the chunk."""
    wanted: Sequence[int]


def head(kind: Kind, key: bytes, index: int = 0) -> bytes:
    return HEAD.pack(MAGIC, WIRE_VERSION, kind, key, index)


def want(key: bytes, indices: Sequence[int]) -> bytes:
    return head(Kind.WANT, key) + struct.pack(f"<{len(indices)}I", *indices)


def read(data: bytes) -> Head:
    """Raises `ProtocolError` for anything else than the four messages above."""
    if len(data) < HEAD.size:
        raise ProtocolError(f"a chunk message of {len(data)} bytes")
    magic, version, kind, key, index = HEAD.unpack_from(data)
    if magic != MAGIC or version != WIRE_VERSION or kind not in Kind.__members__.values():
        raise ProtocolError(f"not a chunk message of wire version {WIRE_VERSION} (starts with {data[:4]!r})")
    rest = len(data) - HEAD.size
    n = rest // 4
    if kind == Kind.WANT:
        if rest % 4 or not 1 <= n <= MAX_WANTED:
            raise ProtocolError(f"a wish of {rest} bytes")
        return Head(Kind.WANT, key, index, struct.unpack_from(f"<{n}I", data, HEAD.size))
    if rest:
        raise ProtocolError(f"{rest} bytes behind a chunk message")
    return Head(Kind(kind), key, index, ())
