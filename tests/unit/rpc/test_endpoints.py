import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from areal_async.errors import EndpointError
from areal_async.rpc.client import Client
from areal_async.rpc.endpoints import CurveKeys, check_bindable
from areal_async.rpc.messages import Arrived
from areal_async.rpc.schema import Message, Ok
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.server import Peer, Server

SECRET = RunSecret(bytes(32))


async def answer_ok(peer: Peer, message: Message, attachments: list[memoryview]) -> Message:
    return Ok()


def server(endpoint: str) -> Server:
    return Server(endpoint, service="test", job="j", handler=answer_ok, access=SECRET)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.168.1.7", "[::]", "example.org"])
def test_nothing_is_bound_beyond_loopback_without_keys(host: str) -> None:
    with pytest.raises(EndpointError, match="CURVE"):
        asyncio.run(server(f"tcp://{host}:0").start())
    check_bindable(f"tcp://{host}:0", CurveKeys.generate())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_loopback_may_be_bound(host: str) -> None:
    check_bindable(f"tcp://{host}:0", None)


@pytest.mark.parametrize(
    "text", ["", "ipc://", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://:80", "/run/s"]
)
def test_what_is_no_endpoint_is_said_to_be_none(text: str) -> None:
    with pytest.raises(EndpointError, match="ipc://PATH or tcp://HOST:PORT"):
        asyncio.run(server(text).start())
    client = Client(text, job="j", role="r", name="n", access=SECRET)
    with pytest.raises(EndpointError, match="ipc://PATH or tcp://HOST:PORT"):
        asyncio.run(client.connect(0.1))


def test_a_path_beyond_the_systems_limit_is_named_with_its_size(socket_dir: Path) -> None:
    path = f"{socket_dir}/{'x' * 120}"
    with pytest.raises(EndpointError, match=f"{len(path)} bytes; the system's limit is 107"):
        asyncio.run(server(f"ipc://{path}").start())


def test_a_missing_directory_is_named(socket_dir: Path) -> None:
    with pytest.raises(EndpointError, match="absent does not exist"):
        asyncio.run(server(f"ipc://{socket_dir}/absent/s").start())


async def test_a_served_address_is_not_taken_over(endpoint: str) -> None:
    first = server(endpoint)
    await first.start()
    with pytest.raises(EndpointError, match="another process already serves"):
        await server(first.endpoint).start()
    async with Client(first.endpoint, job="j", role="r", name="n", access=SECRET) as client:
        await client.call(Arrived("t"), timeout_s=5)
    await first.stop()


async def test_a_file_left_by_a_killed_server_is_replaced(ipc: str) -> None:
    path = ipc.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert os.path.exists(path)
    fresh = server(ipc)
    await fresh.start()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    async with Client(ipc, job="j", role="r", name="n", access=SECRET) as client:
        await client.call(Arrived("t"), timeout_s=5)
    await fresh.stop()
    assert not os.path.exists(path)
