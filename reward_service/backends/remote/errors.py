"""What a request to a reward server can end in, other than an answer."""

from __future__ import annotations

from areal_async.errors import ArealError
from reward_service.backends.remote.schema import Refusal


class RemoteError(ArealError):
    """Base of what a transport raises."""


class ServerGone(RemoteError):
    """Not reachable, or the connection was lost under the request: whether it was run is not known."""


class ServerLate(RemoteError):
    """No answer in time, from a server whose connection stands."""


class ServerBroken(RemoteError):
    """An answer that is none of the protocol."""


class ServerRefused(RemoteError):
    """The server says that it did not carry out the request."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.kind}: {refusal.message}")
        self.refusal = refusal
