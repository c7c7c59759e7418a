"""The frames of one message on a socket.

    head       32 bytes of header, then the msgpack body
    sizes      only with attachments: the size of each, u64 little-endian
    packed     only with attachments: those below `PACK_BELOW_BYTES`, one after another, each padded to 16
    large …    each larger attachment, a frame of its own, never copied in Python

Header: magic `AA`, wire version, kind, number of attachments, client id, request id, floor. A client id is
drawn at random when a `Client` is made and outlives its reconnects; request ids of a client only grow;
`floor` is the lowest id the client still waits for, so a server may forget every reply below it.

Attachments come back as views into the received frames, of unspecified alignment. A sent attachment must not
change until the call is over: large ones are handed to the socket without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar, Union

import msgspec
from typing_extensions import Buffer

from areal_async.errors import MessageTooLarge, ProtocolError
from areal_async.rpc.schema import Message, Request
from areal_async.rpc.table import REPLIES, REQUESTS

MAGIC = b"AA"
WIRE_VERSION = 1
HEADER = struct.Struct("<2sBBIQQQ")
PACK_BELOW_BYTES = 32 * 1024
PACK_ALIGN_BYTES = 16
MAX_ATTACHMENTS = 65_536
MAX_BODY_BYTES = 64 << 20
MAX_MESSAGE_BYTES = 1 << 30
MAX_FRAMES = MAX_ATTACHMENTS + 4

T = TypeVar("T")


class Kind(IntEnum):
    REQUEST = 1
    REPLY = 2
    WHO = 3
    """The server does not know this connection: say hello (again)."""
    BYE = 4
    """The client closes; the server forgets its replies."""


class Header(NamedTuple):
    kind: int
    n_attachments: int
    client: int
    request: int
    floor: int


_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(Union[REQUESTS])  # noqa: UP007
_reply_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Union[REPLIES])  # noqa: UP007
_PADDING = [b"\0" * n for n in range(PACK_ALIGN_BYTES)]


def write_frames(
    kind: Kind,
    client: int,
    request: int,
    floor: int,
    message: msgspec.Struct | None,
    attachments: Sequence[Buffer],
) -> list[Buffer]:
    """Frames of one message, without any routing identity.

    Raises `MessageTooLarge` beyond the limits and `ProtocolError` for what msgpack cannot carry.
    """
    try:
        body = b"" if message is None else _encoder.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise MessageTooLarge(
            f"{type(message).__name__} has {len(body)} bytes; the limit is {MAX_BODY_BYTES}"
        )
    n = len(attachments)
    head = HEADER.pack(MAGIC, WIRE_VERSION, kind, n, client, request, floor) + body
    if not n:
        return [head]
    if n > MAX_ATTACHMENTS:
        raise MessageTooLarge(f"{n} attachments; the limit is {MAX_ATTACHMENTS}")
    sizes: list[int] = []
    packed: list[Buffer] = []
    large: list[Buffer] = []
    for attachment in attachments:
        if isinstance(attachment, bytes):
            view: Buffer = attachment
            size = len(attachment)
        else:
            view = memoryview(attachment)
            if view.ndim != 1 or view.format != "B":
                if not view.contiguous:
                    raise ProtocolError("an attachment must be contiguous")
                view = view.cast("B") if view.nbytes else memoryview(b"")
            size = view.nbytes
        sizes.append(size)
        if size < PACK_BELOW_BYTES:
            packed.append(view)
            packed.append(_PADDING[-size % PACK_ALIGN_BYTES])
        else:
            large.append(view)
    if sum(sizes) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(f"attachments of {sum(sizes)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return [head, struct.pack(f"<{n}Q", *sizes), b"".join(packed), *large]


def read_header(head: bytes) -> Header:
    """Raises `ProtocolError` for anything that is not a head frame of this wire version."""
    if len(head) < HEADER.size:
        raise ProtocolError(f"a head frame of {len(head)} bytes; at least {HEADER.size} are needed")
    magic, version, kind, n, client, request, floor = HEADER.unpack_from(head)
    if magic != MAGIC or version != WIRE_VERSION:
        raise ProtocolError(f"not a message of wire version {WIRE_VERSION} (starts with {head[:4]!r})")
    return Header(kind, n, client, request, floor)


def read_request(head: bytes) -> Request[Any]:
    return _read_body(_request_decoder, head)


def read_reply(head: bytes) -> Message:
    return _read_body(_reply_decoder, head)


def _read_body(decoder: msgspec.msgpack.Decoder[T], head: bytes) -> T:
    try:
        return decoder.decode(memoryview(head)[HEADER.size :])
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from error


def read_attachments(header: Header, frames: Sequence[Buffer]) -> list[memoryview]:
    """Views of the attachments in `frames` (those behind the head). Sizes are checked before any is used."""
    n = header.n_attachments
    if not n:
        if frames:
            raise ProtocolError(f"{len(frames)} frames behind a message without attachments")
        return []
    if n > MAX_ATTACHMENTS:
        raise ProtocolError(f"{n} attachments; the limit is {MAX_ATTACHMENTS}")
    if len(frames) < 2:
        raise ProtocolError("attachments were announced and did not come")
    table = memoryview(frames[0])
    if table.nbytes != 8 * n:
        raise ProtocolError(f"a size table of {table.nbytes} bytes for {n} attachments")
    sizes = struct.unpack(f"<{n}Q", table)
    packed = memoryview(frames[1])
    views: list[memoryview] = []
    at, next_large = 0, 2
    for size in sizes:
        if size < PACK_BELOW_BYTES:
            if at + size > packed.nbytes:
                raise ProtocolError("the packed frame is shorter than its attachments")
            views.append(packed[at : at + size])
            at += size + -size % PACK_ALIGN_BYTES
        else:
            if next_large >= len(frames):
                raise ProtocolError("a large attachment is missing")
            view = memoryview(frames[next_large])
            if view.nbytes != size:
                raise ProtocolError(f"an attachment of {view.nbytes} bytes was announced with {size}")
            views.append(view)
            next_large += 1
    if next_large != len(frames) or at != packed.nbytes:
        raise ProtocolError("more bytes came than were announced")
    return views
