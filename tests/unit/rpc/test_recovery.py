"""Retries, lost replies and restarts: what a client and a server do when the line between them fails."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.errors import FaultError, ProtocolError, RpcTimeout
from areal_async.rpc import endpoints
from areal_async.rpc.client import Client
from areal_async.rpc.frames import HEADER, Kind, write_frames
from areal_async.rpc.messages import Arrived, Commit
from areal_async.rpc.schema import SCHEMA, Fault, Hello, Message, Ok, Welcome
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.server import Answer, Peer, Server

SECRET = RunSecret(bytes(32))


async def answer_ok(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
    return Ok()


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
            endpoints.bind(self.socket, endpoint, SECRET)
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

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()  # ends `let_in`


async def test_a_repeated_request_runs_once(ipc: str) -> None:
    release, started = asyncio.Event(), asyncio.Event()
    runs = 0

    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        nonlocal runs
        runs += 1
        started.set()
        await release.wait()
        return Fault("invalid", str(runs))

    server = Server(ipc, service="t", job="j", handler=handle, access=SECRET)
    await server.start()
    wire = Wire(ipc)
    await wire.hello()
    for _ in range(3):
        await wire.ask(2, Arrived("t"))
    await asyncio.wait_for(started.wait(), 60)
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
    wire.close()
    again.close()
    await server.stop()


async def test_a_lost_reply_is_asked_for_again(ipc: str) -> None:
    router = Wire(ipc, zmq.ROUTER)
    client = Client(ipc, job="j", role="r", name="n", resend_after_s=0.05, access=SECRET)
    connecting = asyncio.create_task(client.connect(10))
    identity, head = await router.receive()
    _, _, _, _, uid, hello, _ = HEADER.unpack_from(head)
    await router.send([identity, *write_frames(Kind.REPLY, uid, hello, 0, Welcome(SCHEMA, "t"), ())])
    await connecting
    call = asyncio.create_task(client.call(Arrived("t"), timeout_s=10))
    requests = [(await router.receive())[1] for _ in range(3)]
    assert requests[0] == requests[1] == requests[2]
    request = HEADER.unpack_from(requests[0])[5]
    await router.send([identity, *write_frames(Kind.REPLY, uid, request, 0, Ok(), ())])
    assert await call == Ok()
    # A reply that cannot be read fails the call at once, with its type.
    call = asyncio.create_task(client.call(Arrived("t"), timeout_s=10))
    head = (await router.receive())[1]
    while HEADER.unpack_from(head)[5] == request:
        head = (await router.receive())[1]
    request = HEADER.unpack_from(head)[5]
    await router.send([identity, b"noise"])
    await router.send([identity, HEADER.pack(b"AA", 2, Kind.REPLY, 0, uid, request, 0) + b"\xc1"])
    with pytest.raises(ProtocolError):
        await call
    await client.close()
    router.close()


async def test_a_client_outlives_a_restart_of_its_server(ipc: str) -> None:
    runs: list[str] = []
    asked = asyncio.Event()

    def serve(name: str) -> Server:
        async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
            runs.append(name)
            asked.set()
            if name == "first":
                await asyncio.Event().wait()
            return Ok()

        return Server(ipc, service=name, job="j", handler=handle, access=SECRET)

    first = serve("first")
    await first.start()
    client = Client(ipc, job="j", role="r", name="n", access=SECRET)
    await client.connect(5)
    calls = [asyncio.create_task(client.call(Arrived("t"), timeout_s=30)) for _ in range(5)]
    await asyncio.wait_for(asked.wait(), 60)
    await first.stop(grace_s=0)
    with pytest.raises(RpcTimeout, match="there is no connection"):
        await client.call(Commit("policy", 1, 1), timeout_s=0.5)
    second = serve("second!")
    await second.start()
    assert [(await call) for call in calls] == [Ok()] * 5
    assert runs.count("second!") == 5
    await client.close()
    await second.stop()


async def test_a_server_of_another_job_at_the_same_address_ends_the_calls(ipc: str) -> None:
    first = Server(ipc, service="t", job="j", handler=answer_ok, access=SECRET)
    await first.start()
    client = Client(ipc, job="j", role="r", name="n", access=SECRET)
    await client.connect(5)
    await first.stop()
    other = Server(ipc, service="t", job="other", handler=answer_ok, access=SECRET)
    await other.start()
    with pytest.raises(FaultError, match="schema"):
        await client.call(Arrived("t"), timeout_s=20)
    await client.close()
    await other.stop()


SERVE = """
import asyncio, sys
from areal_async.rpc.messages import Arrived
from areal_async.rpc.server import Server
from areal_async.rpc.messages import Commit
from areal_async.rpc.schema import Ok
from areal_async.rpc.secret import RunSecret

SECRET = RunSecret(bytes(32))

async def handle(peer, message, attachments):
    if isinstance(message, Commit):
        await asyncio.sleep(3600)
    return Ok(), attachments

async def main():
    server = Server(sys.argv[1], service="t", job="j", handler=handle, access=SECRET)
    await server.start()
    print(server.endpoint, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def spawn(endpoint: str) -> tuple["subprocess.Popen[str]", str]:
    process = subprocess.Popen([sys.executable, "-c", SERVE, endpoint], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_one_death_is_local_a_killed_server_process_is_replaced_under_its_clients(endpoint: str) -> None:
    process, real = spawn(endpoint)

    async def main() -> None:
        nonlocal process
        # The lost connection is noticed, not waited out.
        async with Client(real, job="j", role="r", name="n", resend_after_s=1e9, access=SECRET) as client:
            blobs = [os.urandom(300_000), b"x"]
            reply, attachments = await client.exchange(Arrived("t"), timeout_s=20, attachments=blobs)
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

    try:
        asyncio.run(main())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


ABANDON = """
import asyncio, gc, sys
from areal_async.rpc.messages import Arrived
from areal_async.rpc.schema import Ok
from areal_async.rpc.client import Client, SyncClient
from areal_async.rpc.server import Server
from areal_async.rpc.secret import RunSecret

SECRET = RunSecret(bytes(32))

async def handle(peer, message, attachments):
    await asyncio.sleep(3600)

async def main():
    server = Server(sys.argv[1], service="t", job="j", handler=handle, access=SECRET)
    await server.start()
    client = Client(sys.argv[1], job="j", role="r", name="n", access=SECRET)
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


def test_a_process_that_fails_without_closing_ends_all_the_same(ipc: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ABANDON, ipc], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "RuntimeError: a bug" in ended.stderr


@given(st.lists(st.lists(st.binary(max_size=64), min_size=1, max_size=4), max_size=8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_nothing_a_peer_sends_ends_the_server(messages: list[list[bytes]], greeted: bool) -> None:
    async def main() -> None:
        server = Server("tcp://127.0.0.1:0", service="t", job="j", handler=answer_ok, access=SECRET)
        await server.start()
        wire = Wire(server.endpoint)
        if greeted:
            await wire.hello()
        for frames in messages:
            await wire.send(list(frames))
        head = HEADER.pack(b"AA", 2, Kind.REQUEST, 3, 5, 9, 0) + b"\xa0garbage"
        await wire.send([head, *(messages[0] if messages else [])])
        kind, request, reply = await wire.reply()
        assert (kind, request) == (Kind.REPLY, 9)
        assert isinstance(reply, Fault)
        assert reply.kind == "invalid"
        assert server.counters["malformed"] == len(messages) + 1
        async with Client(server.endpoint, job="j", role="r", name="n", access=SECRET) as client:
            assert (await client.call(Arrived("t"), timeout_s=10)) == Ok()
        wire.close()
        await server.stop()

    asyncio.run(main())


async def test_a_connection_cannot_speak_for_another_client(ipc: str) -> None:
    server = Server(ipc, service="t", job="j", handler=answer_ok, access=SECRET)
    await server.start()
    wire = Wire(ipc)
    await wire.hello()
    await wire.ask(2, Arrived("t"), client=6)
    await wire.ask(3, Arrived("t"))
    assert (await wire.reply())[1] == 3
    assert server.counters["malformed"] == 1
    wire.close()
    await server.stop()


async def test_nothing_is_unbounded_remembered_replies_are_limited_in_bytes(ipc: str) -> None:
    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        return Ok(), [bytes(10_000)]

    server = Server(ipc, service="t", job="j", handler=handle, cached_bytes=25_000, access=SECRET)
    await server.start()
    wire = Wire(ipc)
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
    wire.close()
    await server.stop()
