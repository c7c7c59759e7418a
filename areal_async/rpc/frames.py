"""The frames of one message on a socket.

    head         32 bytes of header, then the msgpack body
    attachment … each in its own frame; large ones are never copied in Python

Several attachments of at most `SHORT_BYTES` each share one frame: a u64 size for each, then their bytes.
Every frame costs a call of the socket at both ends, in which the thread gives the interpreter away.

Header: magic `AA`, wire version, kind, number of attachments, client id, request id, floor. Each `Client`
draws a random client id and keeps it across reconnects. Request ids of a client only grow. `floor` is the
lowest request id whose reply the client still awaits. The server may forget the replies to lower ids.

Attachments are returned as views of the received frames, with unspecified alignment. A sent attachment must
not change until the call ends, because the socket sends large attachments without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, Union

import msgspec
from typing_extensions import Buffer

from areal_async.base.errors import MessageTooLarge, ProtocolError
from areal_async.rpc import control_messages, gateway_messages, home_messages, messages, weights_messages
from areal_async.rpc.schema import Fault, Message, Request, replies_to

MODULES = (messages, weights_messages, control_messages, gateway_messages, home_messages)
"""The modules that declare requests. Importing these modules fills the tables of requests and replies."""
REQUESTS: tuple[type[Request[Any]], ...] = tuple(Request.__subclasses__())
REPLIES: tuple[type[Message], ...] = tuple(
    dict.fromkeys([Fault, *(reply for request in REQUESTS for reply in replies_to(request))])
)
MAGIC = b"AA"
WIRE_VERSION = 5
HEADER = struct.Struct("<2sBBIQQQ")
MAX_ATTACHMENTS = 65_536
MAX_BODY_BYTES = 64 << 20
MAX_MESSAGE_BYTES = 1 << 30
MAX_FRAMES = MAX_ATTACHMENTS + 2
SHORT_BYTES = 16 << 10
MAX_SHARED_BYTES = 64 << 20  # of the attachments in one frame

T = TypeVar("T")


class Kind(IntEnum):
    REQUEST = 1
    REPLY = 2
    WHO = 3
    """The server does not know this connection. The client must send hello (again)."""
    BYE = 4
    """The client closes its connection. The server forgets the replies to this client."""


class Header(NamedTuple):
    kind: int
    n_attachments: int
    client: int
    request: int
    floor: int


_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(Union[REQUESTS])  # noqa: UP007
_reply_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Union[REPLIES])  # noqa: UP007


def write_frames(
    kind: Kind, client: int, request: int, floor: int, message: Message | None, attachments: Sequence[Buffer]
) -> list[Buffer]:
    """Return the frames of one message, without a routing identity.

    Raises `MessageTooLarge` beyond the limits and `ProtocolError` for values that msgpack cannot encode.
    """
    name = type(message).__name__
    try:
        body = b"" if message is None else _encoder.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{name} cannot be encoded: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise MessageTooLarge(f"{name} has {len(body)} bytes; the limit is {MAX_BODY_BYTES}")
    n = len(attachments)
    if n > MAX_ATTACHMENTS:
        raise MessageTooLarge(f"{n} attachments; the limit is {MAX_ATTACHMENTS}")
    frames = [*map(_as_bytes, attachments)]
    if (size := sum(map(len, frames))) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(f"attachments of {size} bytes; the limit is {MAX_MESSAGE_BYTES}")
    if n > 1 and size <= MAX_SHARED_BYTES and max(map(len, frames)) <= SHORT_BYTES:
        frames = [b"".join((struct.pack(f"<{n}Q", *map(len, frames)), *frames))]
    head: Buffer = HEADER.pack(MAGIC, WIRE_VERSION, kind, n, client, request, floor) + body
    return [head, *frames]


def _as_bytes(attachment: Buffer) -> bytes | memoryview:
    if isinstance(attachment, bytes):
        return attachment
    view = memoryview(attachment)
    if not view.contiguous:
        raise ProtocolError("an attachment must be contiguous")
    return view.cast("B") if view.nbytes else b""


def read_header(head: bytes) -> Header:
    """Return the header. Raises `ProtocolError` for anything but a head frame of this wire version."""
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
    """Return views of the attachments. `frames` are the frames after the head. Raises `ProtocolError`."""
    n, views = header.n_attachments, [memoryview(frame) for frame in frames]
    if len(views) == 1 < n <= MAX_ATTACHMENTS and len(views[0]) >= 8 * n:
        ends = [*accumulate(struct.unpack_from(f"<{n}Q", views[0]), initial=8 * n)]
        if ends[-1] == len(views[0]):
            return [views[0][start:end] for start, end in pairwise(ends)]
    if len(views) != n:
        raise ProtocolError(f"{len(views)} frames came, {n} attachments were announced")
    return views
