"""A connection to one reward server, whatever it runs over."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from areal_async.errors import ArealError
from areal_async.rpc.secret import CurveKeys, Password
from areal_async.rpc.verdicts import Verdict
from reward_service.backends.remote.schema import Health, Info, RequestRefusal, ScoreRequest, Verdicts

T = TypeVar("T")


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

    def __init__(self, refusal: RequestRefusal) -> None:
        super().__init__(f"{refusal.kind}: {refusal.message}")
        self.refusal = refusal


VerdictDecoder = msgspec.json.Decoder[Verdict] | msgspec.msgpack.Decoder[Verdict]


def ignore(cause: str) -> None:
    """An `on_lost` for a transport that nobody listens to yet."""


class Form(Protocol):
    """How messages are written: `Json` or `Msgpack`."""

    @property
    def verdicts(self) -> VerdictDecoder: ...

    def encode(self, value: Any) -> bytes:
        """Raises TypeError, ValueError or OverflowError for what cannot be written."""

    def decode(self, content: bytes, kind: type[T]) -> T:
        """Raises `msgspec.MsgspecError`."""


class Json:
    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self.verdicts: VerdictDecoder = msgspec.json.Decoder(Verdict)

    def encode(self, value: Any) -> bytes:
        return self._encoder.encode(value)

    def decode(self, content: bytes, kind: type[T]) -> T:
        return msgspec.json.decode(content, type=kind)


class Msgpack:
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self.verdicts: VerdictDecoder = msgspec.msgpack.Decoder(Verdict)

    def encode(self, value: Any) -> bytes:
        return self._encoder.encode(value)

    def decode(self, content: bytes, kind: type[T]) -> T:
        return msgspec.msgpack.decode(content, type=kind)


class Transport(Protocol):
    """Every method ends by its deadline, with the answer or a `RemoteError`. Requests may run at the
    same time."""

    @property
    def form(self) -> Form: ...

    on_lost: Callable[[str], None]
    """Called with the cause when the connection is lost, where that is told by other than a request's end."""

    async def info(self, timeout_s: float) -> Info: ...

    async def health(self, timeout_s: float) -> Health: ...

    async def score(self, request: ScoreRequest, timeout_s: float) -> Verdicts: ...

    async def close(self) -> None: ...


def read_answer(form: Form, content: bytes, kind: type[T]) -> T:
    """The answer `content`, which is a `kind` or a refusal. Raises `ServerRefused`, `ServerBroken`."""
    try:
        refusal = form.decode(content, _MayBeRefused).error
        if refusal is not None:
            raise ServerRefused(refusal)
        return form.decode(content, kind)
    except msgspec.MsgspecError as error:
        raise ServerBroken(f"the server's answer is none of the protocol: {error}") from error


class _MayBeRefused(msgspec.Struct):
    error: RequestRefusal | None = None


# --- what a client shows over ZMQ, before a message of its is taken ------------------------------------

USER = b"reward"
SEED = b"areal-async reward client "


def password_of(token: str) -> Password:
    """What is shown where the server has no CURVE key (PLAIN)."""
    return Password(USER, token.encode())


def client_keys(token: str) -> CurveKeys:
    """The key pair of every client with the token, where the server has a CURVE key; it trusts nobody yet.

    The secret is the SHA-256 of `SEED` and the token: the ZMQ of any language can do that."""
    return CurveKeys.shared(hashlib.sha256(SEED + token.encode()).digest())
