"""What a port costs that anybody may try: connections and handshakes are bounded before libzmq sees them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from areal_async.rpc import door as door_module
from areal_async.rpc.client import Client
from areal_async.rpc.door import MOST_COMMAND_BYTES, Door
from areal_async.rpc.messages import Arrived
from areal_async.rpc.schema import Message, Ok
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.server import Answer, Peer, Server

SECRET = RunSecret(bytes(32))
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)


async def echo(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
    return Ok(), attachments


@contextlib.asynccontextmanager
async def behind_a_door(folder: Path) -> AsyncIterator[tuple[int, Server]]:
    server = Server(f"ipc://{folder}/s", service="t", job="j", handler=echo, access=SECRET)
    await server.start()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    door = Door(listening, folder / "s")
    await door.open()
    try:
        yield listening.getsockname()[1], server
    finally:
        await door.close()
        await server.stop()


async def ask(port: int) -> int:
    """Through the door as a client comes: with the password, since the socket inside is a Unix socket."""
    client = Client(f"tcp://127.0.0.1:{port}", job="j", role="r", name="n", access=SECRET.password)
    async with client:
        _, attachments = await client.exchange(Arrived("t"), timeout_s=20, attachments=[bytes(5_000_000)])
    return attachments[0].nbytes


async def test_who_knows_the_secret_comes_through_with_large_messages(socket_dir: Path) -> None:
    async with behind_a_door(socket_dir) as (port, _):
        assert await ask(port) == 5_000_000


@pytest.mark.parametrize(
    "frame",
    [
        b"\x06" + struct.pack(">Q", MOST_COMMAND_BYTES + 1),
        b"\x06" + struct.pack(">Q", (1 << 63) - 1),
        b"\x00\x04part",
        b"\x01\x04part",
        b"\x02" + struct.pack(">Q", 1 << 20),
    ],
)
async def test_no_more_than_a_handshake_is_taken_of_a_stranger(socket_dir: Path, frame: bytes) -> None:
    async with behind_a_door(socket_dir) as (port, server):
        before = psutil.Process().memory_info().rss
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                writer.write(GREETING + frame)
                for _ in range(64):
                    writer.write(bytes(1 << 20))
                    await writer.drain()
                await reader.read()
            writer.close()
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert server.counters.malformed == server.counters.unknown == 0
        assert await ask(port) == 5_000_000


async def test_a_crowd_that_says_nothing_takes_no_more_than_its_room(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MOST_CONNECTIONS", 20)
    async with behind_a_door(socket_dir) as (port, _):
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        assert await ask(port) == 5_000_000
        taken = [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and c.raddr]
        assert len([c for c in taken if c.status == psutil.CONN_ESTABLISHED]) <= 20
        for _, writer in crowd:
            writer.close()


async def test_who_does_not_come_to_the_point_is_let_go(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 0.2)
    async with behind_a_door(socket_dir) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GREETING)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 20)  # it ends: that is all
        writer.close()
