"""A connection to one reward server, whatever it runs over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from areal_async.rpc.verdicts import Verdict
from reward_service.backends.remote.errors import ServerBroken, ServerRefused
from reward_service.backends.remote.schema import Health, Info, Refusal, Request, Verdicts

T = TypeVar("T")

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
    """Every method ends by its deadline, with the answer or an error of `errors`. Requests may run at the
    same time."""

    @property
    def form(self) -> Form: ...

    on_lost: Callable[[str], None]
    """Called with the cause when the connection is lost, where that is told by other than a request's end."""

    async def info(self, timeout_s: float) -> Info: ...

    async def health(self, timeout_s: float) -> Health: ...

    async def score(self, request: Request, timeout_s: float) -> Verdicts: ...

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
    error: Refusal | None = None
