import os
import socket
import stat

import pytest

from areal_async.errors import EndpointError
from areal_async.rpc.endpoints import CurveKeys, check_bindable
from areal_async.rpc.messages import Arrived
from tests.unit.rpc.peers import client_of, pair, server_of


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.168.1.7", "[::]", "example.org"])
async def test_nothing_is_bound_beyond_loopback_without_keys(host):
    with pytest.raises(EndpointError, match="CURVE"):
        await server_of(f"tcp://{host}:0").start()
    check_bindable(f"tcp://{host}:0", CurveKeys.generate())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_loopback_may_be_bound(host):
    check_bindable(f"tcp://{host}:0", None)


@pytest.mark.parametrize(
    "text", ["", "ipc://", "tcp://127.0.0.1", "udp://127.0.0.1:1", "tcp://:80", "/run/s"]
)
async def test_what_is_no_endpoint_is_said_to_be_none(text):
    with pytest.raises(EndpointError, match="ipc://PATH or tcp://HOST:PORT"):
        await server_of(text).start()
    with pytest.raises(EndpointError, match="ipc://PATH or tcp://HOST:PORT"):
        await client_of(text).connect(0.1)


async def test_a_path_beyond_the_systems_limit_is_named_with_its_size(socket_dir):
    path = f"{socket_dir}/{'x' * 120}"
    with pytest.raises(EndpointError, match=f"{len(path)} bytes; the system's limit is 107"):
        await server_of(f"ipc://{path}").start()


async def test_a_missing_directory_is_named(socket_dir):
    with pytest.raises(EndpointError, match="absent does not exist"):
        await server_of(f"ipc://{socket_dir}/absent/s").start()


async def test_a_served_address_is_not_taken_over(endpoint):
    async with pair(endpoint) as (first, client):
        with pytest.raises(EndpointError, match="another process already serves"):
            await server_of(first.endpoint).start()
        await client.call(Arrived("t"), timeout_s=5)


async def test_a_file_left_by_a_killed_server_is_replaced(ipc):
    path = ipc.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert os.path.exists(path)
    async with pair(ipc) as (_, client):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        await client.call(Arrived("t"), timeout_s=5)
    assert not os.path.exists(path)
