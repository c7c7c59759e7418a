"""A server and clients of it that share a secret, and a peer that speaks frames by hand."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq

from areal_async.rpc import endpoints
from areal_async.rpc.client import Client
from areal_async.rpc.frames import HEADER, Kind, write_frames
from areal_async.rpc.schema import SCHEMA, Fault, Hello, Message, Ok, Welcome
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.server import Answer, Peer, Server

SECRET = RunSecret(bytes(32))

Handle = Callable[[Peer, Message, list[memoryview]], Awaitable[Answer]]


async def answer_ok(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
    return Ok(), attachments


class Gate:
    """A handler that answers nobody until it is opened."""

    def __init__(self) -> None:
        self.started, self.open, self.runs = asyncio.Semaphore(0), asyncio.Event(), 0

    async def __call__(self, peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        self.runs += 1
        self.started.release()
        await self.open.wait()
        return Ok()


def server_of(endpoint: str, handler: Handle = answer_ok, **options: Any) -> Server:
    return Server(endpoint, handler=handler, **{"service": "t", "job": "j", "access": SECRET, **options})


def client_of(endpoint: str, **options: Any) -> Client:
    return Client(endpoint, **{"job": "j", "role": "r", "name": "n", "access": SECRET, **options})


@asynccontextmanager
async def serving(endpoint: str, handler: Handle = answer_ok, **options: Any) -> AsyncIterator[Server]:
    server = server_of(endpoint, handler, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.05)


@asynccontextmanager
async def pair(
    endpoint: str, handler: Handle = answer_ok, **options: Any
) -> AsyncIterator[tuple[Server, Client]]:
    async with serving(endpoint, handler, **options) as server, client_of(server.endpoint) as client:
        yield server, client


# A failing test leaves its sockets open; a context that is collected before them waits for ever.
OPEN: list["zmq.Context[zmq.Socket[bytes]]"] = []


def let_in(asking: "zmq.Socket[bytes]") -> None:
    # This thread alone touches the socket, its closing too: libzmq ends the process when another one does.
    with asking, contextlib.suppress(zmq.ContextTerminated):
        while True:
            version, number = asking.recv_multipart()[:2]
            asking.send_multipart([version, number, b"200", b"OK", b"known", b""])


class Wire:
    """A peer that speaks frames by hand."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER) -> None:
        self.context = zmq.Context()
        OPEN.append(self.context)
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        if kind == zmq.ROUTER:
            asking = self.context.socket(zmq.REP)
            asking.bind(endpoints.ZAP_ENDPOINT)
            threading.Thread(target=let_in, args=(asking,), daemon=True).start()
            endpoints.bind(self.socket, endpoint, SECRET.guard(endpoint, ""))
        else:
            endpoints.connect(self.socket, endpoint, SECRET)

    async def send(self, frames: list[object]) -> None:
        await asyncio.to_thread(self.socket.send_multipart, frames)

    async def receive(self, timeout_ms: int = 5000) -> list[bytes]:
        if not await asyncio.to_thread(self.socket.poll, timeout_ms):
            raise TimeoutError
        return self.socket.recv_multipart()

    async def ask(self, request: int, message: Message, floor: int = 0, client: int = 5) -> None:
        await self.send(write_frames(Kind.REQUEST, client, request, floor, message, ()))

    async def reply(self) -> tuple[int, int, Message | None]:
        """Kind, request id and message of the next frame."""
        head = (await self.receive())[0]
        _, _, kind, _, _, request, _ = HEADER.unpack_from(head)
        body = head[HEADER.size :]
        return kind, request, msgspec.msgpack.decode(body, type=Ok | Fault | Welcome) if body else None

    async def hello(self) -> None:
        await self.ask(1, Hello(SCHEMA, "j", "r", "n"))
        assert (await self.reply())[:2] == (Kind.REPLY, 1)

    async def __aenter__(self) -> "Wire":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()  # ends `let_in`
