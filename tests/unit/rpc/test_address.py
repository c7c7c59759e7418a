"""A server that comes up elsewhere, and ports that are held for one that is started again."""

import asyncio
import os
import socket

import pytest

from areal_async.base.addresses import Address
from areal_async.rpc.endpoints import HELD_VARIABLE
from areal_async.rpc.messages import Arrived
from areal_async.rpc.schema import Ok
from tests.unit.rpc.peers import Gate, client_of, serving


async def test_a_client_follows_its_server_and_asks_again_what_was_not_answered():
    gate = Gate()
    async with serving("tcp://127.0.0.1:0", gate) as first, serving("tcp://127.0.0.1:0") as second:
        address = Address(first.endpoint)
        async with client_of(address) as client:
            asked = asyncio.create_task(client.call(Arrived("t"), timeout_s=60))
            await gate.started.acquire()
            await asyncio.to_thread(address.move, second.endpoint)  # from another thread, as a status does
            assert await asked == Ok()
            assert second.counters["requests"] == 1
            assert client.endpoint == second.endpoint
            address.move(first.endpoint)
            gate.open.set()
            assert await client.call(Arrived("t"), timeout_s=60) == Ok()


async def test_a_port_that_is_held_stays_the_servers_through_its_death(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as held:
        endpoint = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setenv(HELD_VARIABLE, f"tcp://127.0.0.1:1=77 {endpoint}={held.fileno()}")
        client = client_of(endpoint)
        asked = asyncio.create_task(client.connect(30.0))
        for _ in range(2):
            async with serving(endpoint) as server:
                assert server.endpoint == endpoint
                await asked
            asked = asyncio.create_task(client.call(Arrived("t"), timeout_s=60))
        async with serving(endpoint):
            assert await asked == Ok()
        await client.close()
        os.fstat(held.fileno())  # it is still ours
