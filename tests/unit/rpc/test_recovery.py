"""Retries, lost replies and restarts: what a client and a server do when the line between them fails."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from areal_async.base.errors import FaultError, ProtocolError
from areal_async.rpc.frames import HEADER, WIRE_VERSION, Kind, write_frames
from areal_async.rpc.messages import Arrived, Commit
from areal_async.rpc.reply_book import ServerLimits
from areal_async.rpc.schema import SCHEMA, Fault, Hello, Ok, Welcome
from tests.unit.rpc.peers import Wire, client_of, serving
from tests.waiting import LIMIT_S, until

ROOT = Path(__file__).parents[3]


async def test_a_repeated_request_runs_once(ipc):
    release, started = asyncio.Event(), asyncio.Event()
    runs = 0

    async def handle(peer, message, attachments):
        nonlocal runs
        runs += 1
        started.set()
        await release.wait()
        return Fault("invalid", str(runs))

    async with serving(ipc, handle) as server, Wire(ipc) as wire:
        await wire.hello()
        for _ in range(3):
            await wire.ask(2, Arrived("t"))
        await asyncio.wait_for(started.wait(), LIMIT_S)
        await wire.ask(1, Hello(SCHEMA, "j", "r", "n"))
        assert (await wire.reply())[1] == 1  # everything before it has arrived
        assert server.counters["joined"] == 2
        release.set()
        assert await wire.reply() == (Kind.REPLY, 2, Fault("invalid", "1"))
        await wire.ask(2, Arrived("t"))
        assert await wire.reply() == (Kind.REPLY, 2, Fault("invalid", "1"))
        assert (runs, server.counters["replayed"]) == (1, 1)
        # A reconnected client has a new connection and the same memory.
        again = Wire(ipc)
        await again.ask(3, Arrived("t"))
        assert (await again.reply())[0] == Kind.WHO
        await again.hello()
        await again.ask(2, Arrived("t"))
        assert await again.reply() == (Kind.REPLY, 2, Fault("invalid", "1"))
        assert runs == 1
        # Once the client has said it has the reply, a late duplicate is dropped.
        await again.ask(4, Arrived("t"), floor=3)
        assert (await again.reply())[1] == 4
        await again.ask(2, Arrived("t"))
        await again.ask(4, Arrived("t"))
        assert (await again.reply())[1] == 4
        assert runs == 2
        again.close()


async def test_a_lost_reply_is_asked_for_again(ipc):
    router = Wire(ipc, zmq.ROUTER)
    client = client_of(ipc)
    client.resend_after_s = 0.05
    connecting = asyncio.create_task(client.connect(10))
    identity, head = await router.receive()
    _, _, _, _, uid, hello, _ = HEADER.unpack_from(head)
    await router.send([identity, *write_frames(Kind.REPLY, uid, hello, 0, Welcome(SCHEMA, "t"), ())])
    await connecting
    call = asyncio.create_task(client.call(Arrived("t"), timeout_s=60))
    requests = [(await router.receive())[1] for _ in range(3)]
    assert requests[0] == requests[1] == requests[2]
    request = HEADER.unpack_from(requests[0])[5]
    await router.send([identity, *write_frames(Kind.REPLY, uid, request, 0, Ok(), ())])
    assert await call == Ok()
    # A reply that cannot be read fails the call at once, with its type.
    call = asyncio.create_task(client.call(Arrived("t"), timeout_s=60))
    head = (await router.receive())[1]
    while HEADER.unpack_from(head)[5] == request:
        head = (await router.receive())[1]
    request = HEADER.unpack_from(head)[5]
    await router.send([identity, b"noise"])
    await router.send([identity, HEADER.pack(b"AA", WIRE_VERSION, Kind.REPLY, 0, uid, request, 0) + b"\xc1"])
    with pytest.raises(ProtocolError):
        await call
    await client.close()
    router.close()


async def test_a_server_of_another_job_at_the_same_address_ends_the_calls(ipc):
    async with serving(ipc):
        client = client_of(ipc)
        await client.connect(5)
    async with serving(ipc, job="other"):
        with pytest.raises(FaultError, match="schema"):
            await client.call(Arrived("t"), timeout_s=60)
        await client.close()


SERVE = """
import asyncio, sys
from areal_async.rpc.messages import Commit
from tests.unit.rpc.peers import answer_ok, serving

async def handle(peer, message, attachments):
    if isinstance(message, Commit):
        await asyncio.sleep(3600)
    return await answer_ok(peer, message, attachments)

async def main():
    async with serving(sys.argv[1], handle) as server:
        print(server.endpoint, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def spawn(endpoint: str) -> tuple["subprocess.Popen[str]", str]:
    command = [sys.executable, "-c", SERVE, endpoint]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return process, process.stdout.readline().strip()


async def test_one_death_is_local_a_killed_server_process_is_replaced_under_its_clients(endpoint):
    process, real = spawn(endpoint)
    try:
        # The lost connection is noticed, not waited out.
        async with client_of(real) as client:
            client.resend_after_s = 1e9
            blobs = [os.urandom(300_000), b"x"]
            reply, attachments = await client.exchange(Arrived("t"), timeout_s=60, attachments=blobs)
            assert (reply, [bytes(a) for a in attachments]) == (Ok(), blobs)
            stuck = asyncio.create_task(client.call(Commit("policy", 1, 1), timeout_s=25))
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait)
            waiting = asyncio.create_task(client.exchange(Arrived("t"), timeout_s=25, attachments=blobs))
            process, again = await asyncio.to_thread(spawn, real)
            assert again == real
            reply, attachments = await waiting
            assert (reply, [bytes(a) for a in attachments]) == (Ok(), blobs)
            stuck.cancel()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


ASK = """
import sys
from contextlib import closing
from areal_async.rpc.client import SyncClient
from areal_async.rpc.messages import Arrived
from tests.unit.rpc.peers import SECRET

with closing(SyncClient(sys.argv[1], job="j", role="r", name="n", access=SECRET)) as client:
    client.connect()
    print(len(client.exchange(Arrived("t"), timeout_s=60)[1][0]))
"""


def is_served(ipc: str) -> bool:
    with socket.socket(socket.AF_UNIX) as stranger:
        return stranger.connect_ex(ipc.removeprefix("ipc://")) == 0


async def test_a_busy_client_gets_the_last_answer_of_a_server_that_stops(ipc):
    asked, release = asyncio.Event(), asyncio.Event()

    async def handle(peer, message, attachments):
        asked.set()
        await release.wait()
        return Ok(), [bytes(8 << 20)]  # more than the line holds

    async with serving(ipc, handle) as server:
        command = [sys.executable, "-c", ASK, ipc]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as asking:
            try:
                await asyncio.wait_for(asked.wait(), LIMIT_S)
                asking.send_signal(signal.SIGSTOP)
                release.set()
                stopping = asyncio.create_task(server.stop(grace_s=30, linger_ms=60_000))
                await until(lambda: not is_served(ipc), "a closed socket")
                assert not stopping.done(), "it waits for who is there"
                asking.send_signal(signal.SIGCONT)
                assert (await asyncio.to_thread(asking.communicate, timeout=LIMIT_S))[0] == f"{8 << 20}\n"
                await stopping
            finally:
                asking.kill()


ABANDON = """
import asyncio, gc, sys
from areal_async.rpc.messages import Arrived
from areal_async.rpc.client import SyncClient
from tests.unit.rpc.peers import SECRET, client_of, server_of

async def handle(peer, message, attachments):
    await asyncio.sleep(3600)

async def main():
    server = server_of(sys.argv[1], handle)
    await server.start()
    client = client_of(sys.argv[1])
    await client.connect(20)
    call = asyncio.create_task(client.call(Arrived("t"), timeout_s=3600))
    blocking = SyncClient(sys.argv[1], job="j", role="r", name="s", access=SECRET)
    await asyncio.to_thread(blocking.connect, 20)
    raise RuntimeError("a bug")

try:
    asyncio.run(main())
except RuntimeError:
    gc.collect()
    raise
"""


def test_a_process_that_fails_without_closing_ends_all_the_same(ipc):
    command = [sys.executable, "-c", ABANDON, ipc]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert ended.returncode == 1
    assert "RuntimeError: a bug" in ended.stderr


async def test_a_connection_cannot_speak_for_another_client(ipc):
    async with serving(ipc) as server, Wire(ipc) as wire:
        await wire.hello()
        await wire.ask(2, Arrived("t"), client=6)
        await wire.ask(3, Arrived("t"))
        assert (await wire.reply())[1] == 3
        assert server.counters["malformed"] == 1


async def test_nothing_is_unbounded_remembered_replies_are_limited_in_bytes(ipc):
    async def handle(peer, message, attachments):
        return Ok(), [bytes(10_000)]

    async with serving(ipc, handle, limits=ServerLimits(cached_bytes=25_000)) as server, Wire(ipc) as wire:
        await wire.hello()
        for request in range(2, 12):
            await wire.ask(request, Arrived("t"))
            assert (await wire.reply())[1] == request
        for request, replayed in ((11, 1), (10, 2), (2, 2)):  # the bytes of two are remembered
            await wire.ask(request, Arrived("t"))
            assert (await wire.reply())[1] == request
            assert server.counters["replayed"] == replayed
        await wire.send(write_frames(Kind.BYE, 5, 99, 0, None, ()))
        await wire.ask(100, Arrived("t"))
        assert (await wire.reply())[0] == Kind.WHO
        await wire.hello()
        await wire.ask(11, Arrived("t"))
        assert (await wire.reply())[1] == 11
        assert server.counters["replayed"] == 2, "a client that said goodbye is forgotten"
