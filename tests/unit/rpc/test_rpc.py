import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from areal_async.errors import FaultError, PeerGone, ProtocolError, RpcTimeout
from areal_async.rpc.client import Client, SyncClient
from areal_async.rpc.frames import MAX_ATTACHMENTS
from areal_async.rpc.messages import Arrived, BufferStats, Claim, Claims, Commit, Fetch, Fetched
from areal_async.rpc.schema import SCHEMA, Hello, Message, Ok
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.server import Answer, Peer, Server, by_type

SECRET = RunSecret(bytes(32))

Handle = Callable[[Peer, Message, list[memoryview]], Awaitable[Answer]]


async def echo(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
    return Fetched([peer.role, peer.name, type(message).__name__]), attachments


@asynccontextmanager
async def pair(endpoint: str, handle: Handle, **server_options: Any):  # type: ignore[no-untyped-def]
    server = Server(endpoint, service="test", job="j", handler=handle, **server_options, access=SECRET)
    await server.start()
    client = Client(
        server.endpoint, job="j", role="rollout", name="rollout-0", rng=random.Random(0), access=SECRET
    )
    try:
        await client.connect(5)
        yield server, client
    finally:
        await client.close()
        await server.stop(grace_s=0.05)


async def test_a_call_reaches_the_handler_and_its_reply_comes_back(endpoint: str) -> None:
    async with pair(endpoint, echo) as (_, client):
        blobs = [b"small", b"", os.urandom(200_000)]
        reply, attachments = await client.exchange(Fetch([]), timeout_s=5, attachments=blobs)
        assert reply == Fetched(["rollout", "rollout-0", "Fetch"])
        assert [bytes(a) for a in attachments] == blobs


async def test_a_reply_that_does_not_belong_to_the_request_is_a_protocol_error(ipc: str) -> None:
    async with pair(ipc, echo) as (_, client):
        with pytest.raises(ProtocolError, match="answered Commit with Fetched"):
            await client.call(Commit("policy", 1, 1))


async def test_a_request_without_a_handler_of_its_type_is_refused_by_name(ipc: str) -> None:
    async with pair(ipc, by_type("buffer", {Fetch: echo})) as (_, client):
        assert await client.call(Fetch([])) == Fetched(["rollout", "rollout-0", "Fetch"])
        with pytest.raises(FaultError, match="invalid: the buffer does not answer Commit"):
            await client.call(Commit("policy", 1, 1))


async def test_many_concurrent_calls_each_get_their_own_reply(endpoint: str) -> None:
    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        assert isinstance(message, Fetch)
        if int(message.episode_ids[0]) % 3 == 0:
            await asyncio.sleep(0)
        return Fetched(message.episode_ids), [bytes(attachments[0]) * 2]

    async with pair(endpoint, handle) as (server, client):

        async def one(step: int) -> None:
            reply, attachments = await client.exchange(
                Fetch([str(step)]), timeout_s=20, attachments=[str(step).encode()]
            )
            assert reply == Fetched([str(step)])
            assert bytes(attachments[0]).decode() == str(step) * 2

        await asyncio.gather(*(one(step) for step in range(2000)))
        assert server.counters["requests"] == 2000


@pytest.mark.parametrize("kind", ["invalid", "fenced", "stale", "internal"])
async def test_a_fault_of_the_handler_is_raised_typed_and_not_retried(ipc: str, kind: Any) -> None:
    calls = 0

    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        nonlocal calls
        calls += 1
        raise FaultError(kind, "no", 5)

    async with pair(ipc, handle) as (_, client):
        with pytest.raises(FaultError) as caught:
            await client.call(Arrived("t"), timeout_s=5)
        assert (caught.value.kind, caught.value.message, caught.value.retry_after_ms) == (kind, "no", 5)
    assert calls == 1


async def test_an_error_of_the_handler_is_answered_internal_and_the_server_goes_on(ipc: str) -> None:
    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        if isinstance(message, Commit):
            raise KeyError("lost")
        if isinstance(message, Fetch):
            return BufferStats({}, {"bad": object()}, {}, 0, 0, 0, 0, 0)  # type: ignore[dict-item]
        return Ok()

    async with pair(ipc, handle) as (_, client):
        with pytest.raises(FaultError, match="internal: KeyError: 'lost'"):
            await client.call(Commit("policy", 1, 1), timeout_s=5)
        with pytest.raises(FaultError, match="internal: BufferStats cannot be encoded"):
            await client.call(Fetch([]), timeout_s=5)
        assert (await client.call(Arrived("t"), timeout_s=5)) == Ok()


@pytest.mark.parametrize("kind", ["busy", "unavailable"])
async def test_busy_and_unavailable_are_retried_inside_the_deadline(ipc: str, kind: Any) -> None:
    refusals = 3

    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        nonlocal refusals
        if isinstance(message, Commit) or refusals:
            refusals -= 1
            raise FaultError(kind, "not now", 1)
        return Ok()

    async with pair(ipc, handle) as (_, client):
        assert (await client.call(Arrived("t"), timeout_s=10)) == Ok()
        assert refusals == 0
        with pytest.raises(RpcTimeout, match="not now") as caught:
            await client.call(Commit("policy", 1, 1), timeout_s=0.1)
        assert caught.value.last_fault is not None
        assert caught.value.last_fault.kind == kind


async def test_a_call_ends_at_its_deadline_and_the_late_reply_is_ignored(ipc: str) -> None:
    release = asyncio.Event()

    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        if isinstance(message, Claim):
            await release.wait()
        return Claims([]) if isinstance(message, Claim) else Ok()

    async with pair(ipc, handle) as (_, client):
        loop = asyncio.get_running_loop()
        begin = loop.time()
        with pytest.raises(RpcTimeout, match="Claim"):
            await client.call(Claim("s", 1), timeout_s=0.1)
        assert loop.time() - begin >= 0.1
        release.set()
        for _ in range(10):
            assert (await client.call(Arrived("t"), timeout_s=5)) == Ok()


async def test_nothing_is_unbounded_a_peer_with_too_many_requests_is_told_busy(ipc: str) -> None:
    running, most = 0, 0

    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return Ok()

    async with pair(ipc, handle, max_in_flight_per_peer=4) as (server, client):
        await asyncio.gather(*(client.call(Arrived("t"), timeout_s=30) for _ in range(200)))
        assert most <= 4
        assert server.counters["busy"] > 0
        assert server.counters["requests"] == 200


async def test_nothing_is_unbounded_calls_beyond_the_clients_limit_wait_in_line(ipc: str) -> None:
    release, both = asyncio.Event(), asyncio.Event()
    running = 0

    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        nonlocal running
        running += 1
        if running == 2:
            both.set()
        await release.wait()
        return Ok()

    server = Server(ipc, service="test", job="j", handler=handle, access=SECRET)
    await server.start()
    async with Client(ipc, job="j", role="r", name="n", max_in_flight=2, access=SECRET) as client:
        first = [asyncio.create_task(client.call(Arrived("t"), timeout_s=20)) for _ in range(2)]
        await asyncio.wait_for(both.wait(), 60)
        with pytest.raises(RpcTimeout):
            await client.call(Arrived("t"), timeout_s=0.05)
        assert running == 2
        release.set()
        await asyncio.gather(*first)
        assert (await client.call(Arrived("t"), timeout_s=5)) == Ok()
    await server.stop()


async def test_another_schema_or_job_is_refused_at_hello(ipc: str) -> None:
    server = Server(ipc, service="buffer", job="j", handler=echo, access=SECRET)
    await server.start()
    stranger = Client(ipc, job="other", role="r", name="n", access=SECRET)
    with pytest.raises(FaultError, match=r"schema: buffer here belongs to job 'j', not to 'other'"):
        await stranger.connect(5)
    with pytest.raises(FaultError, match="schema"):
        await stranger.call(Arrived("t"), timeout_s=5)
    await stranger.close()
    old = Client(ipc, job="j", role="r", name="old", access=SECRET)
    old._hello = Hello(SCHEMA + 1, "j", "r", "old")
    with pytest.raises(FaultError, match=f"old speaks schema {SCHEMA + 1}, buffer speaks {SCHEMA}"):
        await old.connect(5)
    await old.close()
    assert server.counters["requests"] == 0
    await server.stop()


async def test_connecting_to_nobody_says_so_in_time(endpoint: str) -> None:
    client = Client(endpoint.replace(":0", ":1"), job="j", role="r", name="n", access=SECRET)
    with pytest.raises(RpcTimeout, match="nobody answered"):
        await client.connect(0.2)
    with pytest.raises(RpcTimeout, match="no connection"):
        await client.call(Arrived("t"), timeout_s=0.1)
    await client.close()


async def test_a_client_may_come_before_its_server(ipc: str) -> None:
    client = Client(ipc, job="j", role="r", name="n", access=SECRET)
    connecting = asyncio.create_task(client.connect(20))
    await asyncio.sleep(0)
    server = Server(ipc, service="test", job="j", handler=echo, access=SECRET)
    await server.start()
    assert (await connecting).service == "test"
    await client.close()
    await server.stop()


async def test_calls_of_a_closed_client_end_with_peer_gone(ipc: str) -> None:
    started = asyncio.Event()

    async def never(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        started.set()
        await asyncio.Event().wait()
        return Ok()

    server = Server(ipc, service="test", job="j", handler=never, access=SECRET)
    await server.start()
    client = Client(ipc, job="j", role="r", name="n", max_in_flight=1, access=SECRET)
    with pytest.raises(PeerGone):
        await client.call(Arrived("t"), timeout_s=1)
    await client.connect(5)
    running = asyncio.create_task(client.call(Arrived("t"), timeout_s=20))
    in_line = asyncio.create_task(client.call(Arrived("t"), timeout_s=20))
    await asyncio.wait_for(started.wait(), 60)
    await client.close()
    for call in (running, in_line):
        with pytest.raises(PeerGone):
            await call
    with pytest.raises(PeerGone):
        await client.call(Arrived("t"), timeout_s=1)
    await server.stop(grace_s=0)


async def test_a_cancelled_call_leaves_the_client_in_order(ipc: str) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def handle(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        if isinstance(message, Commit):
            started.set()
            await release.wait()
        return Ok()

    async with pair(ipc, handle) as (_, client):
        call = asyncio.create_task(client.call(Commit("policy", 1, 1), timeout_s=20))
        await asyncio.wait_for(started.wait(), 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        release.set()
        for _ in range(100):
            assert (await client.call(Arrived("t"), timeout_s=5)) == Ok()


async def test_a_message_that_cannot_be_sent_fails_its_own_call_only(ipc: str) -> None:
    async with pair(ipc, echo) as (_, client):
        with pytest.raises(ProtocolError, match="65537 attachments"):
            await client.call(Fetch([]), timeout_s=5, attachments=[b""] * (MAX_ATTACHMENTS + 1))
        await client.call(Fetch([]), timeout_s=5)


async def test_the_server_stops_in_time_and_answers_what_it_cuts_short(ipc: str) -> None:
    started = asyncio.Event()

    async def never(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        started.set()
        await asyncio.Event().wait()
        return Ok()

    async with pair(ipc, never) as (server, client):
        call = asyncio.create_task(client.call(Arrived("t"), timeout_s=5))
        await asyncio.wait_for(started.wait(), 60)
        await asyncio.wait_for(server.stop(grace_s=0.05), 60)
        with pytest.raises(RpcTimeout, match="unavailable: test stops"):
            await call


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_leaves_no_task_thread_descriptor_or_file(ipc: str) -> None:
    async def use() -> None:
        async with pair(ipc, echo) as (_, client):
            await client.call(Fetch([]), timeout_s=5, attachments=[bytes(100_000)])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(use())  # the first use makes what libzmq keeps for the process
    before = descriptors(), threading.active_count()
    for _ in range(5):
        asyncio.run(use())
        assert not os.path.exists(ipc.removeprefix("ipc://"))
    assert (descriptors(), threading.active_count()) == before


def test_a_failed_start_leaves_nothing_either(ipc: str) -> None:
    async def main() -> None:
        server = Server(f"{ipc}/below/a/file", service="test", job="j", handler=echo, access=SECRET)
        for _ in range(3):
            with pytest.raises(Exception, match="does not exist"):
                await server.start()
        async with pair(ipc, echo) as (first, _):
            for _ in range(3):
                with pytest.raises(Exception, match="already serves"):
                    await Server(first.endpoint, service="test", job="j", handler=echo, access=SECRET).start()

    asyncio.run(main())
    before = descriptors()
    asyncio.run(main())
    assert descriptors() == before


async def test_the_blocking_client_keeps_the_same_promises(endpoint: str) -> None:
    refusals = 2

    async def handle(peer: Peer, message: Message, attachments: Sequence[memoryview]) -> Answer:
        nonlocal refusals
        if isinstance(message, Claim):
            await asyncio.Event().wait()
        if isinstance(message, Commit):
            raise FaultError("fenced", "a newer trainer")
        if refusals:
            refusals -= 1
            raise FaultError("busy", "", 1)
        return Ok(), attachments

    def use(server_endpoint: str) -> None:
        with SyncClient(server_endpoint, job="j", role="trainer", name="t", access=SECRET) as client:
            reply, attachments = client.exchange(Arrived("t"), timeout_s=10, attachments=[b"x"])
            assert (reply, bytes(attachments[0])) == (Ok(), b"x")
            with pytest.raises(FaultError, match="a newer trainer"):
                client.call(Commit("policy", 1, 1), timeout_s=5)
            with pytest.raises(RpcTimeout):
                client.call(Claim("s", 1), timeout_s=0.1)
            waiting = threading.Thread(target=expect_gone, args=(client,))
            waiting.start()
            client.call(Arrived("t"), timeout_s=5)
        waiting.join(60)
        assert not waiting.is_alive()
        with pytest.raises(PeerGone):
            client.call(Arrived("t"), timeout_s=1)

    def expect_gone(client: SyncClient) -> None:
        with pytest.raises(PeerGone):
            client.call(Claim("s", 1), timeout_s=30)

    server = Server(endpoint, service="test", job="j", handler=handle, access=SECRET)
    await server.start()
    await asyncio.to_thread(use, server.endpoint)
    await server.stop(grace_s=0)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rpc-")]
