"""Base classes of all messages, and the messages that all services share.

A request is declared once, with its reply: `class Heartbeat(Request[HeartbeatAck])`. From this declaration
follow the reply's type for clients (`await client.call(Heartbeat(…))` returns a `HeartbeatAck`), the servers'
choice of a handler, and the decoders. Each message is an immutable msgspec struct, encoded as msgpack and
identified by its tag (the class name). Bulk bytes are never inside a message. They are sent as attachments,
in separate frames, in an order that the message defines. Durations are integer milliseconds. No message
contains a clock reading. `frames.py` lists the modules with messages.

`SCHEMA` is compared at hello. Two processes with different schemas refuse each other with a `Fault`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, TypeVar, get_args

import msgspec

from areal_async.base.errors import FaultKind

SCHEMA = 6


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every request and reply."""


R = TypeVar("R", bound=Message)


class Request(Message, Generic[R], frozen=True):
    """Base of every request. `R` is its reply, one message or a union of several.

    If a request has a field `wait_ms`, the server may wait that long before it answers.
    """


@cache
def replies_to(request: type[Request[Any]]) -> tuple[type[Message], ...]:
    """Return the types that may answer a request, except `Fault`."""
    (reply,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return get_args(reply) or (reply,)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value inside messages. The ledger also stores some records."""


# --- every service -----------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    schema: int
    service: str


class Hello(Request[Welcome], frozen=True):
    """The first message of every client connection."""

    schema: int
    job: str
    role: str
    name: str


class Ok(Message, frozen=True):
    pass


class Fault(Message, frozen=True):
    """The error answer to any request. `kind` tells the caller how to react, and `message` is for people."""

    kind: FaultKind
    message: str
    retry_after_ms: int = 0
