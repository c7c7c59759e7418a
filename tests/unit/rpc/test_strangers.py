"""Peers that speak ZMTP by hand: nothing of who does not know the secret is held, and no noise ends anybody.

Each kind of socket that a job has: those of the buffer, weights and control, and that of a chunk server.
"""

import asyncio
import contextlib
import random
import socket
import struct
import subprocess
import sys

import psutil
import pytest
import zmq

from areal_async.rpc import endpoints
from areal_async.rpc.messages import Arrived
from areal_async.rpc.schema import Ok
from areal_async.weights.channels.serving import MAX_ASKED_BYTES, ChunkServer
from tests.unit.rpc.noise import flood
from tests.unit.rpc.peers import SECRET, client_of, serving
from tests.waiting import LIMIT_S, until, wait_for

MESSAGES = 10_000
MOST_GROWTH_BYTES = 64 << 20


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    if len(content) < 256:
        return b"\x04" + bytes([len(content)]) + content
    return b"\x06" + struct.pack(">Q", len(content)) + content


def connected(endpoint: str) -> socket.socket:
    if endpoint.startswith("ipc://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(LIMIT_S)
        sock.connect(endpoint.removeprefix("ipc://"))
        return sock
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def is_closed(sock: socket.socket) -> bool:
    """Return whether the other side closed a connection on which it said no more than its greeting."""
    sock.setblocking(False)
    try:
        return not sock.recv(4096)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def refused(endpoint: str, *pieces: bytes) -> bool:
    """Whether the server closes the connection of who sends this, without letting it in."""
    with connected(endpoint) as sock:
        said = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                sock.sendall(piece)
            while part := sock.recv(4096):
                said += part
    return b"READY" not in said and b"WELCOME" not in said


async def test_who_shows_nothing_or_the_wrong_thing_is_let_go_before_anything_is_taken(endpoint):
    parts = b"".join(b"\x01\x04part" for _ in range(100))
    null = (greeting(b"NULL"), command(b"READY", b"\x0bSocket-Type\0\0\0\6DEALER"), parts)
    wrong = (greeting(b"PLAIN"), command(b"HELLO", b"\3run\5wrong"), parts)
    empty = (greeting(b"PLAIN"), command(b"HELLO", b"\0\0"), parts)
    skipped = (greeting(b"PLAIN"), command(b"INITIATE", b""), parts)
    curve = (greeting(b"CURVE"), command(b"HELLO", b"\1\0" + bytes(198)), parts)
    noise = (random.Random(1).randbytes(4096),)
    async with serving(endpoint) as server:
        served = server.endpoint
        for pieces in (null, wrong, empty, skipped, curve, noise):
            assert await asyncio.to_thread(refused, served, *pieces), pieces[:2]
        async with client_of(served) as client:
            assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()
        assert server.counters["requests"] == 1
        assert server.counters.keys() <= {"requests", "strangers"}, "nothing of theirs was taken"


async def test_a_chunk_server_holds_no_more_of_a_stranger_than_its_smallest_message():
    """Before the handshake too: a frame that says it is longer ends the connection at once."""
    server = ChunkServer("tcp://127.0.0.1:0", job="j", source="publisher", access=SECRET)
    await server.start()
    try:
        for size in (MAX_ASKED_BYTES + 1, 1 << 30, (1 << 63) - 1):
            announced = b"\x06" + struct.pack(">Q", size)
            assert await asyncio.to_thread(refused, server.endpoint, greeting(b"CURVE"), announced)
    finally:
        await server.close()


def open_at(endpoint: str) -> set[int]:
    """Ports of those whose connections this process holds open as the server at `endpoint`."""
    port = int(endpoint.rpartition(":")[2])
    held = psutil.Process().net_connections("tcp")
    return {each.raddr.port for each in held if each.laddr.port == port and each.status == "ESTABLISHED"}


HELLO = command(b"HELLO", b"\1\0" + bytes(72) + bytes(32) + bytes(8) + bytes(80))


@pytest.mark.parametrize(
    "said",
    [b"", greeting(b"CURVE")[:5], greeting(b"CURVE"), greeting(b"CURVE") + HELLO[:50], b"GET / HTTP/1.1",
     greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 60_000) + bytes(3000)],
    ids=["nothing", "half a greeting", "a greeting", "half a hello", "a request", "part of a long frame"],
)  # fmt: skip
async def test_nothing_is_unbounded_strangers_who_only_connect_make_room_for_each_other(monkeypatch, said):
    monkeypatch.setattr(endpoints, "MOST_STRANGERS", 20)
    monkeypatch.setattr(endpoints, "HANDSHAKE_MS", 600_000)
    async with serving("tcp://127.0.0.1:0") as server, contextlib.AsyncExitStack() as stack:
        known = [await stack.enter_async_context(client_of(server.endpoint)) for _ in range(30)]
        for client in known:
            assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()
        before, at_first = dict(server.counters), open_at(server.endpoint)
        strangers = []
        for _ in range(120):
            strangers.append(await asyncio.to_thread(connected, server.endpoint))
            stack.callback(strangers[-1].close)
            with contextlib.suppress(ConnectionError):
                strangers[-1].sendall(said)
        await until(lambda: len(open_at(server.endpoint)) <= 50, "the oldest strangers to be closed")
        assert at_first <= open_at(server.endpoint), "nobody known was let go"
        async with client_of(server.endpoint) as late:
            for client in (*known, late):
                assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()
        assert server.counters["unknown"] == before.get("unknown", 0), "nobody known had to come back"
        assert len(server.sessions) >= 30


SERVED = """
import asyncio, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from tests.unit.rpc.peers import serving

async def main():
    async with serving("tcp://127.0.0.1:0") as server:
        print(server.endpoint, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        open("/dev/null").close()
        print(len(os.listdir("/proc/self/fd")), flush=True)

asyncio.run(main())
"""


def test_more_strangers_than_a_process_may_open_files_leave_it_its_own():
    served = subprocess.Popen(
        [sys.executable, "-c", SERVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with served, contextlib.ExitStack() as stack:
        endpoint = served.stdout.readline().strip()
        strangers = [stack.enter_context(connected(endpoint)) for _ in range(300)]
        wait_for(lambda: sum(map(is_closed, strangers)) >= 250, "all but a quarter of 200 to be closed")
        held = psutil.Process(served.pid)
        wait_for(lambda: held.num_fds() < 120, "their descriptors to be given back")
        said, _ = served.communicate("go on\n", timeout=LIMIT_S)
    assert served.returncode == 0
    assert int(said) < 120


@pytest.mark.parametrize("known", [True, False])
async def test_ten_thousand_malformed_messages_cost_a_server_nothing(ipc, known):
    async with serving(ipc if known else "tcp://127.0.0.1:0") as server:
        served = server.endpoint
        async with client_of(served) as client:
            access = SECRET if known else None
            await asyncio.to_thread(flood, served, access, MESSAGES // 4, greeted=known, seed=1)
            before = psutil.Process().memory_info().rss
            await asyncio.to_thread(flood, served, access, MESSAGES, greeted=known, seed=2)
            assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()
            assert psutil.Process().memory_info().rss - before < MOST_GROWTH_BYTES
        assert (server.counters["malformed"] > MESSAGES) is known
        assert len(server.sessions) <= 8


async def test_a_peer_that_leaves_in_the_middle_of_a_message_leaves_nothing(ipc):
    def leave(served):
        for _ in range(50):
            context = zmq.Context()
            sock = context.socket(zmq.DEALER)
            endpoints.connect(sock, served, SECRET)
            for _ in range(20):
                sock.send(bytes(64 << 10), zmq.SNDMORE)
            context.destroy(linger=0)

    async with serving(ipc) as server:
        served = server.endpoint
        await asyncio.to_thread(leave, served)
        before = psutil.Process().memory_info().rss
        await asyncio.to_thread(leave, served)
        await asyncio.to_thread(leave, served)
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH_BYTES
        async with client_of(served) as client:
            assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()
