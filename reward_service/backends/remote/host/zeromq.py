"""The reference server's ZMQ: a ROUTER over the one `ScoringService`. Serves DEALER and REQ sockets.

The token is asked for in the handshake: libzmq holds a message whole before anybody may look at it, and does
not limit how many parts an unfinished one has.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec
import zmq
from typing_extensions import Buffer

from areal_async.rpc import endpoints
from areal_async.rpc.door import Door
from areal_async.rpc.secret import CurveKeys, Password
from areal_async.rpc.sockets import PolledSocket, drop_context, end_context, open_context
from areal_async.runtime.log import get_logger
from reward_service.backends.remote.host.access import Gate, tcp_socket, zmq_endpoint
from reward_service.backends.remote.host.http import VerdictsAnswer
from reward_service.backends.remote.host.service import RequestRefused, ScoringService
from reward_service.backends.remote.schema import Ask, RefusedAnswer, ScoreRequest
from reward_service.backends.remote.transport import Msgpack

log = get_logger("reward")

HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000


class ZmqServer:
    """Serves from the moment it is made, at `url`. Raises `EndpointError`."""

    def __init__(self, service: ScoringService, gate: Gate, address: str, *, secret: bytes = b"") -> None:
        self._service = service
        self._form = Msgpack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="areal-reward-", dir="/tmp")
        self._door: Door | None = None
        self._context = open_context()
        sock = self._context.socket(zmq.ROUTER)
        endpoints.tune(sock, max_part_bytes=service.limits.max_body_bytes)
        for option, value in (
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            sock.setsockopt(option, value)
        try:
            self.url, asked_for = zmq_endpoint(address, gate, secret)
            self._zap = endpoints.serve_zap(self._context, asked_for)
            if self.url.startswith("ipc://"):
                endpoints.bind(sock, self.url, asked_for)
            else:
                self._behind_a_door(sock, address, gate, asked_for)
        except BaseException:
            self._folder.cleanup()
            drop_context(self._context)
            raise
        self._socket = PolledSocket(sock, 3, self._on_frames)

    def _behind_a_door(
        self, sock: zmq.Socket[bytes], address: str, gate: Gate, asked_for: CurveKeys | Password
    ) -> None:
        """On a port anybody may try: the socket itself is in a folder of this user's."""
        listening = tcp_socket(address.removeprefix("tcp://"), gate)
        host, port = listening.getsockname()[:2]
        self.url = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        inner = Path(self._folder.name) / "zmq"
        endpoints.bind(sock, f"ipc://{inner}", asked_for)
        self._door = Door(listening, inner)
        self._opening = asyncio.create_task(self._door.open())

    async def close(self) -> None:
        if self._door is not None:
            await self._opening
            await self._door.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._zap.close()
        await end_context(self._context)
        self._folder.cleanup()

    def _on_frames(self, copied: list[bytes], rest: list[Buffer]) -> None:
        if len(copied) < 2 or rest:
            return  # no message of the protocol, and nobody to tell: two frames, of which the first is empty
        *envelope, body = copied
        try:
            head = self._form.decode(body, Ask)
        except msgspec.MsgspecError as error:
            self._refuse(envelope, "", RequestRefused("invalid", f"the message is no request: {error}"))
            return
        if head.op == "score":
            task = asyncio.create_task(self._score(envelope, head.request_id, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            found = self._service.info() if head.op == "info" else self._service.health()
            self._answer(envelope, msgspec.structs.replace(found, request_id=head.request_id))

    async def _score(self, envelope: list[bytes], request_id: str, body: bytes) -> None:
        try:
            try:
                asked = self._form.decode(body, ScoreRequest)
            except msgspec.MsgspecError as error:
                raise RequestRefused("invalid", f"the message is no request: {error}") from error
            self._answer(envelope, VerdictsAnswer(await self._service.score(asked, self._form), request_id))
        except RequestRefused as refused:
            self._refuse(envelope, request_id, refused)
        except Exception as error:
            self._refuse(envelope, request_id, RequestRefused("internal", type(error).__name__))
            log.error("a request failed", error=f"{type(error).__name__}: {error}")

    def _refuse(self, envelope: list[bytes], request_id: str, refused: RequestRefused) -> None:
        self._answer(envelope, RefusedAnswer(refused.refusal, request_id))

    def _answer(self, envelope: list[bytes], content: object) -> None:
        # A peer that has gone gets none: a ROUTER drops what it cannot deliver, and the peer asks again.
        self._socket.send([*envelope, self._form.encode(content)])
