"""What every message has in common, and what all services share: faults, versions, tasks.

A request is declared once, with the reply that answers it: `class Heartbeat(Request[HeartbeatAck])`. Clients
(`await client.call(Heartbeat(…))` is a `HeartbeatAck`), the dispatch of servers and the decoders follow from
that. Each message is an immutable msgspec struct, encoded as msgpack, told apart by its tag (the class name).
Bulk bytes never sit inside a message: they travel as attachments, separate frames in the order that the
message names. Durations are integer milliseconds; no message carries a clock reading. `frames.py`
has them all.

`SCHEMA` is compared at hello: two processes of different schema refuse each other with a `Fault`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

SCHEMA = 4


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every request and reply."""


R = TypeVar("R", bound=Message)


class Request(Message, Generic[R], frozen=True):
    """Base of every request; `R` is its reply, one message or a union of several.

    A field `wait_ms` is how long the server may keep the request until it has something to say."""

    @property
    def left_in_file(self) -> int:
        """How many of its last attachments a server does not read that come in a file: it passes the file
        on."""
        return 0


@cache
def replies_to(request: type[Request[Any]]) -> tuple[type[Message], ...]:
    """The messages that may answer a request, apart from a `Fault`."""
    (reply,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return get_args(reply) or (reply,)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that only travels inside messages (and is stored, where the ledger says so)."""


POLICY = "policy"  # Name of the one policy of a job that names none
POLICY_NAME = r"[a-z0-9][a-z0-9_-]{0,31}"  # Pattern of a policy's name
_LABEL = re.compile(rf"({POLICY_NAME})-e(0|[1-9][0-9]*)-v(0|[1-9][0-9]*)")


class VersionTag(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """Identity of a snapshot: the policy it is of, its trainer's epoch, and the steps behind the weights."""

    policy: str
    epoch: int
    version: int

    @property
    def label(self) -> str:
        """The tag as text, for names of folders and of a server's weights: `policy-e1-v7`."""
        return f"{self.policy}-e{self.epoch}-v{self.version}"

    @classmethod
    def parse(cls, label: str) -> VersionTag:
        """The inverse of `label`. Raises ValueError for a text that is none."""
        match = _LABEL.fullmatch(label)
        if match is None:
            raise ValueError(f"{label!r} names no version of a policy's weights, such as policy-e1-v7")
        return cls(match[1], int(match[2]), int(match[3]))


class Task(Record, frozen=True):
    """One prompt with its ground truth. `task_id` is `<dataset hash>:<row>:<pass>`."""

    task_id: str
    prompt: list[dict[str, Any]] | str
    data_source: str = ""
    ability: str = ""
    reward_style: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}


# --- every service -----------------------------------------------------------------------------------


class FilesHere(Record, frozen=True):
    """Folders of a server that clients of its host may use for attachments (`by_file.py`): those of its
    clients, and those of its own. `token` is what a file of the first one says. `flush`: to disk."""

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


FaultKind = Literal[
    "schema",  # the peer speaks another schema, or another job
    "invalid",  # the request itself is wrong; do not retry
    "forbidden",  # the role of the asker's key may not make this request
    "fenced",  # a newer front, lease or trainer epoch has replaced the caller
    "busy",  # back-pressure: retry later
    "unavailable",  # the service cannot reach what it needs (Redis); retry later
    "stale",  # the hard staleness bound would be broken; fatal
    "failed",  # the job file has the job end here, and the message says why; fatal
    "internal",
]


class Fault(Message, frozen=True):
    """The typed error of every call. `kind` decides what a caller may do; `message` is for people."""

    kind: FaultKind
    message: str
    retry_after_ms: int = 0
