"""What the launcher and its actors on the nodes of a Ray cluster tell each other: msgpack, as everywhere. Ray
carries the bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from areal_async.base.own_files import parts_of
from areal_async.base.topology import RunHost, ServicePlace
from areal_async.rpc.secret import RoleKeys


class PlaceOrder(msgspec.Struct, frozen=True):
    """Be the host of one process."""

    run_id: str
    place: ServicePlace
    keys: RoleKeys
    ports: tuple[int, int] | None
    """First and last port that may be listened on; None: any."""


class Placed(msgspec.Struct, frozen=True):
    """The actor's host, and the endpoints that it holds for its process, by what is served there."""

    host: RunHost
    endpoints: dict[str, str]


class StartOrder(msgspec.Struct, frozen=True):
    """Start the process; `topology` is written to its host before."""

    topology: bytes
    environment: dict[str, str]
    meets: bool
    """Whether it is a rank of a trainer that has several."""
    meeting: str
    """Address at which these meet; empty for rank 0, which makes one."""


class ProcessStarted(msgspec.Struct, frozen=True):
    pid: int
    meeting: str = ""


class FileNews(msgspec.Struct, frozen=True):
    """Bytes that were appended to a file of the run at `offset`. `name` is a path within the run's folder."""

    name: str
    offset: int
    data: bytes

    def __post_init__(self) -> None:
        parts_of(self.name)


class ProcessNews(msgspec.Struct, frozen=True):
    """What is known of the process. `heard` is what its line has said since the last answer."""

    ready: dict[str, Any] | None
    status: int | None
    heard: bytes
    memory_kills: int
    files: list[FileNews] = []
    confirmed: int = 0
    """Newest revision that the Redis of a buffer has confirmed."""


def pack(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)
