"""The protocol over ZMQ, with msgpack: a DEALER socket that speaks to a ROUTER or a REP.

A message is two frames, an empty one and the map, so that the simplest of servers (a REP socket) will do.
A lost connection is noticed by libzmq, whose heartbeats its own thread answers: a server that is busy scoring
is not taken for dead, and one that is dead fails its requests at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.utils.monitor
from typing_extensions import Buffer

from areal_async.rpc import endpoints
from areal_async.rpc.secret import CurveKeys
from areal_async.rpc.sockets import PolledSocket, end_context, open_context
from reward_service.backends.remote.schema import Ask, Health, Info, Op, ScoreRequest, Verdicts
from reward_service.backends.remote.transport import (
    Msgpack,
    ServerBroken,
    ServerGone,
    ServerLate,
    client_keys,
    ignore,
    password_of,
    read_answer,
)

T = TypeVar("T")

CONNECT_LIMIT_S = 5.0
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
RECONNECT_MS = 100
LAST_RECONNECT_MS = 2_000
MAX_ANSWER_BYTES = 64 << 20
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class _Named(msgspec.Struct):
    request_id: str


class ZmqTransport:
    """`url` is `tcp://host:port` or `ipc://path`. `token` is shown in the handshake. `server_key` is the
    server's public CURVE key (Z85), where it has one: the connection is then encrypted, and the server is who
    it should be."""

    def __init__(self, url: str, *, token: str = "", server_key: str = "") -> None:
        self.form = Msgpack()
        self.on_lost: Callable[[str], None] = ignore
        self._url = url
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._up = False
        self._told = asyncio.Event()
        """Set while it is known how the connection is: up, or refused."""
        self._trouble = "nobody answers there"
        self._context = open_context()
        sock = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_ANSWER_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, LAST_RECONNECT_MS),
        ):
            sock.setsockopt(option, value)
        monitor = sock.get_monitor_socket(EVENTS)
        if server_key:
            keys = client_keys(token) if token else CurveKeys.generate()
            endpoints.connect(sock, url, replace(keys, trusted=(server_key.encode(),)))
        elif token:
            endpoints.connect(sock, url, password_of(token))
        else:
            sock.connect(url)
        self._socket = PolledSocket(sock, 2, self._on_frames)
        self._monitor = PolledSocket(monitor, 2, self._on_event)

    async def info(self, timeout_s: float) -> Info:
        return await self._ask("info", Info, timeout_s)

    async def health(self, timeout_s: float) -> Health:
        return await self._ask("health", Health, timeout_s)

    async def score(self, request: ScoreRequest, timeout_s: float) -> Verdicts:
        sent = msgspec.structs.replace(request, op="score")
        return await self._exchange(request.request_id, sent, Verdicts, timeout_s)

    async def close(self) -> None:
        self._fail_all("the connection was closed")
        self._monitor.close()
        self._socket.close()
        await end_context(self._context)

    async def _ask(self, op: Op, kind: type[T], timeout_s: float) -> T:
        request_id = f"{op}-{next(self._numbers)}"
        return await self._exchange(request_id, Ask(op, request_id), kind, timeout_s)

    async def _exchange(self, request_id: str, message: Any, kind: type[T], timeout_s: float) -> T:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            async with asyncio.timeout(min(timeout_s, CONNECT_LIMIT_S)):
                await self._told.wait()
        except TimeoutError:
            raise ServerGone(f"cannot connect: {self._trouble}") from None
        if not self._up:
            self._told.clear()
            raise ServerGone(f"cannot connect: {self._trouble}")
        answer = self._waiting[request_id] = loop.create_future()
        try:
            if not self._socket.send([b"", self.form.encode(message)]):
                raise ServerGone("the connection was lost")
            async with asyncio.timeout_at(deadline_s):
                content = await answer
        except TimeoutError:
            raise ServerLate(f"no answer within {timeout_s:.1f} s") from None
        finally:
            del self._waiting[request_id]
        return read_answer(self.form, content, kind)

    def _on_frames(self, copied: list[bytes], rest: list[Buffer]) -> None:
        content = copied[-1] if copied else b""
        try:
            waiting = self._waiting.get(self.form.decode(content, _Named).request_id)
        except msgspec.MsgspecError:
            # Whose answer it is cannot be told; of a server with one request it is that one's.
            waiting = next(iter(self._waiting.values())) if len(self._waiting) == 1 else None
            if waiting is not None and not waiting.done():
                waiting.set_exception(ServerBroken("its answer has no request_id"))
            return
        if waiting is not None and not waiting.done():
            waiting.set_result(content)

    def _on_event(self, copied: list[bytes], rest: list[Buffer]) -> None:
        event = zmq.utils.monitor.parse_monitor_message(copied)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._up = True
            self._told.set()
        elif self._up:
            self._up, self._trouble = False, "nobody answers there"
            self._told.clear()
            self._fail_all("the connection was lost")
            self.on_lost("the connection was lost")
        else:
            self._trouble = (
                "the handshake of ZMQ failed: check the token and server_key, and that it is a ZMQ socket"
            )
            self._told.set()

    def _fail_all(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ServerGone(why))
