"""Messages between the launcher and its actors on the nodes of a Ray cluster. Ray transports them as
msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from areal_async.base.own_files import parts_of
from areal_async.base.topology import RunHost, ServicePlace
from areal_async.rpc.secret import RoleKeys


class PlaceOrder(msgspec.Struct, frozen=True):
    """A request to host one process."""

    run_id: str
    place: ServicePlace
    keys: RoleKeys
    ports: tuple[int, int] | None
    """First and last port that the host may listen on. None allows any port."""


class Placed(msgspec.Struct, frozen=True):
    """The actor's host, and the endpoints that the actor reserves for its process, by the name of the
    server."""

    host: RunHost
    endpoints: dict[str, str]


class StartOrder(msgspec.Struct, frozen=True):
    """A request to start the process. The host writes `topology` to a file before the start."""

    topology: bytes
    environment: dict[str, str]
    meets: bool
    """True for a rank of a trainer with several ranks."""
    meeting: str
    """Address at which these ranks meet. It is empty for rank 0, because rank 0's host chooses the
    address."""
    confirmed: int = 0
    """Newest revision that the Redis of a buffer has confirmed."""


class ProcessStarted(msgspec.Struct, frozen=True):
    pid: int
    meeting: str = ""


class FileNews(msgspec.Struct, frozen=True):
    """Bytes appended to a file of the run at `offset`. `name` is a path within the run's folder."""

    name: str
    offset: int
    data: bytes

    def __post_init__(self) -> None:
        parts_of(self.name)


class ProcessNews(msgspec.Struct, frozen=True):
    """State of the process. `heard` has the bytes that its line has received since the last answer."""

    ready: dict[str, Any] | None
    status: int | None
    heard: bytes
    files: list[FileNews] = []
    confirmed: int = 0
    """Newest revision that the Redis of a buffer has confirmed."""
