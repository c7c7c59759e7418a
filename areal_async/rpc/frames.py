"""The frames of one message on a socket.

    head         32 bytes of header, then the msgpack body
    attachment … each a frame of its own, large ones never copied in Python; many small ones in one frame

Header: magic `AA`, wire version, kind, number of attachments, client id, request id, floor. A client id is
drawn at random when a `Client` is made and outlives its reconnects; request ids of a client only grow;
`floor` is the lowest id the client still waits for, so a server may forget every reply below it.

Three bits of the kind say how attachments pass. `PACKED`: in one frame, u32 their number, u32 size of each,
then their bytes, each at the next multiple of 8. `BY_FILE` (`by_file.py`): the first frame behind the head
says where they lie. `READS_FILES`: the client can be answered so.

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

from areal_async.base.errors import MessageTooLarge, ProtocolError
from areal_async.rpc import control_messages, gateway_messages, home_messages, messages, weights_messages
from areal_async.rpc.schema import Fault, Message, Request, replies_to

MODULES = (messages, weights_messages, control_messages, gateway_messages, home_messages)
"""The modules that declare requests: importing them is what fills the tables of requests and replies."""
REQUESTS: tuple[type[Request[Any]], ...] = tuple(Request.__subclasses__())
REPLIES: tuple[type[Message], ...] = tuple(
    dict.fromkeys([Fault, *(reply for request in REQUESTS for reply in replies_to(request))])
)
MAGIC = b"AA"
WIRE_VERSION = 3
HEADER = struct.Struct("<2sBBIQQQ")
MAX_ATTACHMENTS = 65_536
MAX_BODY_BYTES = 64 << 20
MAX_MESSAGE_BYTES = 1 << 30
MAX_FRAMES = MAX_ATTACHMENTS + 2

T = TypeVar("T")


class Kind(IntEnum):
    REQUEST = 1
    REPLY = 2
    WHO = 3
    """The server does not know this connection: say hello (again)."""
    BYE = 4
    """The client closes; the server forgets its replies."""


PACKED, BY_FILE, READS_FILES = 0x20, 0x40, 0x80
_KINDS = 0x1F
SMALL_BYTES = 8 << 10
"""Mean size of attachments up to which one frame of all is cheaper, copied, than a frame of each."""
MOST_PACKED_BYTES = 4 << 20


class Header(NamedTuple):
    kind: int
    n_attachments: int
    client: int
    request: int
    floor: int
    flags: int = 0


_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(Union[REQUESTS])  # noqa: UP007
_reply_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Union[REPLIES])  # noqa: UP007


def write_frames(
    kind: Kind,
    client: int,
    request: int,
    floor: int,
    message: msgspec.Struct | None,
    attachments: Sequence[Buffer],
    flags: int = 0,
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
    if n > MAX_ATTACHMENTS:
        raise MessageTooLarge(f"{n} attachments; the limit is {MAX_ATTACHMENTS}")
    frames = [*map(_as_bytes, attachments)]
    if (size := sum(map(len, frames))) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(f"attachments of {size} bytes; the limit is {MAX_MESSAGE_BYTES}")
    if n > 1 and size <= min(n * SMALL_BYTES, MOST_PACKED_BYTES) and not flags & BY_FILE:
        frames, flags = [_packed(frames)], flags | PACKED
    head: Buffer = HEADER.pack(MAGIC, WIRE_VERSION, kind | flags, n, client, request, floor) + body
    return [head, *frames]


_PADDING = [bytes(-size % 8) for size in range(8)]


def _packed(attachments: Sequence[bytes | memoryview]) -> bytes:
    n = len(attachments)
    table = struct.pack(f"<{n + 1}I", n, *map(len, attachments))
    parts: list[Buffer] = [table, _PADDING[len(table) % 8]]
    for attachment in attachments:
        parts += (attachment, _PADDING[len(attachment) % 8])
    return b"".join(parts)


def _unpacked(frame: Buffer, n: int) -> list[memoryview]:
    view = memoryview(frame)
    at = 4 * (n + 1)
    if len(view) < at or int.from_bytes(view[:4], "little") != n:
        raise ProtocolError(f"a frame of {len(view)} bytes is not {n} attachments")
    sizes = struct.unpack_from(f"<{n}I", view, 4)
    at += -at % 8
    attachments = []
    for size in sizes:
        attachments.append(view[at : at + size])
        at += size + -size % 8
    if at != len(view):
        raise ProtocolError(f"a frame of {len(view)} bytes is not {n} attachments of {at} bytes")
    return attachments


def _as_bytes(attachment: Buffer) -> bytes | memoryview:
    if isinstance(attachment, bytes):
        return attachment
    view = memoryview(attachment)
    if not view.contiguous:
        raise ProtocolError("an attachment must be contiguous")
    return view.cast("B") if view.nbytes else b""


def read_header(head: bytes) -> Header:
    """Raises `ProtocolError` for anything that is not a head frame of this wire version."""
    if len(head) < HEADER.size:
        raise ProtocolError(f"a head frame of {len(head)} bytes; at least {HEADER.size} are needed")
    magic, version, kind, n, client, request, floor = HEADER.unpack_from(head)
    if magic != MAGIC or version != WIRE_VERSION:
        raise ProtocolError(f"not a message of wire version {WIRE_VERSION} (starts with {head[:4]!r})")
    return Header(kind & _KINDS, n, client, request, floor, kind & ~_KINDS)


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
    """Views of the attachments, which are `frames`, those behind the head. Raises `ProtocolError`."""
    if header.flags & PACKED and len(frames) == 1:
        return _unpacked(frames[0], header.n_attachments)
    if len(frames) != header.n_attachments:
        raise ProtocolError(f"{len(frames)} attachments came, {header.n_attachments} were announced")
    return [memoryview(frame) for frame in frames]
