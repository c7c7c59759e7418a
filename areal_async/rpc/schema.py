"""Base classes of all messages, and the messages that all services share.

A request is declared once, with the reply that answers it: `class Heartbeat(Request[HeartbeatAck])`. Clients
(`await client.call(Heartbeat(…))` is a `HeartbeatAck`), the dispatch of servers and the decoders follow from
that. Each message is an immutable msgspec struct, encoded as msgpack, told apart by its tag (the class name).
Bulk bytes never sit inside a message: they travel as attachments, separate frames in the order that the
message names. Durations are integer milliseconds; no message carries a clock reading. `frames.py`
has them all.

`SCHEMA` is compared at hello: two processes of different schema refuse each other with a `Fault`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, TypeVar, get_args

import msgspec

from areal_async.base.errors import FaultKind

SCHEMA = 4


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every request and reply."""


R = TypeVar("R", bound=Message)


class Request(Message, Generic[R], frozen=True):
    """Base of every request; `R` is its reply, one message or a union of several.

    A field `wait_ms` is how long the server may keep the request until it has something to say."""

    @property
    def left_in_file(self) -> int:
        """Number of its last attachments that a server leaves unread in their file, which it passes on."""
        return 0


@cache
def replies_to(request: type[Request[Any]]) -> tuple[type[Message], ...]:
    """Return the messages that may answer a request, apart from a `Fault`."""
    (reply,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return get_args(reply) or (reply,)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that only travels inside messages (and is stored, where the ledger says so)."""


# --- every service -----------------------------------------------------------------------------------


class FilesHere(Record, frozen=True):
    """Folders of a server that clients of its host may use for attachments (`by_file.py`): one for the
    clients, one for the server. `token` is the content of a file in the first one. `flush` means to write to
    disk."""

    incoming: str
    held: str
    token: str
    flush: bool


class Welcome(Message, frozen=True):
    schema: int
    service: str
    files: FilesHere | None = None


class Hello(Request[Welcome], frozen=True):
    """First message of every client connection."""

    schema: int
    job: str
    role: str
    name: str


class Ok(Message, frozen=True):
    pass


class Fault(Message, frozen=True):
    """The typed error of every call. `kind` determines the possible reactions of a caller; `message` is for
    people."""

    kind: FaultKind
    message: str
    retry_after_ms: int = 0
