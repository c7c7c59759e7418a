import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from areal_async.base.errors import FaultError, PeerGone, ProtocolError, RpcTimeout
from areal_async.rpc.client import CallLimits, SyncClient
from areal_async.rpc.frames import MAX_ATTACHMENTS, Kind
from areal_async.rpc.messages import Arrived, BufferStats, Claim, Claims, Commit, Fetch, Fetched
from areal_async.rpc.reply_book import ServerLimits
from areal_async.rpc.schema import SCHEMA, Fault, Hello, Message, Ok
from areal_async.rpc.server import STOP_RETRY_MS, Answer, Peer, by_type
from tests.unit.rpc.peers import SECRET, Gate, Wire, client_of, pair, server_of, serving
from tests.waiting import LIMIT_S


async def echo(peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
    return Fetched([peer.role, peer.name, type(message).__name__]), attachments


async def test_a_call_reaches_the_handler_and_its_reply_comes_back(endpoint):
    async with pair(endpoint, echo) as (_, client):
        blobs = [b"small", b"", os.urandom(200_000)]
        reply, attachments = await client.exchange(Fetch([]), timeout_s=60, attachments=blobs)
        assert reply == Fetched(["r", "n", "Fetch"])
        assert [bytes(a) for a in attachments] == blobs


async def test_a_reply_of_another_request_and_a_message_that_cannot_be_sent_fail_their_call_alone(ipc):
    async with pair(ipc, echo) as (_, client):
        with pytest.raises(ProtocolError, match="answered Commit with Fetched"):
            await client.call(Commit("policy", 1, 1))
        with pytest.raises(ProtocolError, match="65537 attachments"):
            await client.exchange(Fetch([]), timeout_s=60, attachments=[b""] * (MAX_ATTACHMENTS + 1))
        await client.call(Fetch([]), timeout_s=60)


async def test_a_request_without_a_handler_of_its_type_is_refused_by_name(ipc):
    async with pair(ipc, by_type("buffer", {Fetch: echo})) as (_, client):
        assert await client.call(Fetch([])) == Fetched(["r", "n", "Fetch"])
        with pytest.raises(FaultError, match="invalid: the buffer does not answer Commit"):
            await client.call(Commit("policy", 1, 1))


async def test_many_concurrent_calls_each_get_their_own_reply(endpoint):
    async def handle(peer, message, attachments):
        assert isinstance(message, Fetch)
        if int(message.episode_ids[0]) % 3 == 0:
            await asyncio.sleep(0)
        return Fetched(message.episode_ids), [bytes(attachments[0]) * 2]

    async with pair(endpoint, handle) as (server, client):

        async def one(step):
            reply, attachments = await client.exchange(
                Fetch([str(step)]), timeout_s=60, attachments=[str(step).encode()]
            )
            assert reply == Fetched([str(step)])
            assert bytes(attachments[0]).decode() == str(step) * 2

        await asyncio.gather(*(one(step) for step in range(2000)))
        assert server.counters["requests"] == 2000


@pytest.mark.parametrize("kind", ["invalid", "fenced", "stale", "internal"])
async def test_a_fault_of_the_handler_is_raised_typed_and_not_retried(ipc, kind):
    calls = 0

    async def handle(peer, message, attachments):
        nonlocal calls
        calls += 1
        raise FaultError(kind, "no", 5)

    async with pair(ipc, handle) as (_, client):
        with pytest.raises(FaultError) as caught:
            await client.call(Arrived("t"), timeout_s=60)
        assert (caught.value.kind, caught.value.message, caught.value.retry_after_ms) == (kind, "no", 5)
    assert calls == 1


async def test_an_error_of_the_handler_is_answered_internal_and_the_server_goes_on(ipc):
    async def handle(peer, message, attachments):
        if isinstance(message, Commit):
            raise KeyError("lost")
        if isinstance(message, Fetch):
            return BufferStats({}, {"bad": object()}, {}, 0, 0, 0, 0, 0)  # type: ignore[dict-item]
        return Ok()

    async with pair(ipc, handle) as (_, client):
        with pytest.raises(FaultError, match="internal: KeyError: 'lost'"):
            await client.call(Commit("policy", 1, 1), timeout_s=60)
        with pytest.raises(FaultError, match="internal: BufferStats cannot be encoded"):
            await client.call(Fetch([]), timeout_s=60)
        assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()


@pytest.mark.parametrize("kind", ["busy", "unavailable"])
async def test_busy_and_unavailable_are_retried_inside_the_deadline(ipc, kind):
    refusals = 3

    async def handle(peer, message, attachments):
        nonlocal refusals
        if isinstance(message, Commit) or refusals:
            refusals -= 1
            raise FaultError(kind, "not now", 1)
        return Ok()

    async with pair(ipc, handle) as (_, client):
        assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()
        assert refusals == 0
        with pytest.raises(RpcTimeout, match="not now") as caught:
            await client.call(Commit("policy", 1, 1), timeout_s=0.1)
        assert caught.value.last_fault is not None
        assert caught.value.last_fault.kind == kind


async def test_a_call_ends_at_its_deadline_and_the_late_reply_is_ignored(ipc):
    release = asyncio.Event()

    async def handle(peer, message, attachments):
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
            assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()


async def test_nothing_is_unbounded_a_peer_with_too_many_requests_is_told_busy(ipc):
    running, most = 0, 0

    async def handle(peer, message, attachments):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return Ok()

    async with pair(ipc, handle, limits=ServerLimits(in_flight=4)) as (server, client):
        await asyncio.gather(*(client.call(Arrived("t"), timeout_s=60) for _ in range(200)))
        assert most <= 4
        assert server.counters["busy"] > 0
        assert server.counters["requests"] == 200


async def test_nothing_is_unbounded_calls_beyond_the_clients_limit_wait_in_line(ipc):
    gate = Gate()
    async with serving(ipc, gate), client_of(ipc, limits=CallLimits(2)) as client:
        first = [asyncio.create_task(client.call(Arrived("t"), timeout_s=60)) for _ in range(2)]
        for _ in first:
            await asyncio.wait_for(gate.started.acquire(), LIMIT_S)
        with pytest.raises(RpcTimeout):
            await client.call(Arrived("t"), timeout_s=0.1)
        assert gate.runs == 2
        gate.open.set()
        await asyncio.gather(*first)
        assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()


async def test_another_schema_or_job_is_refused_at_hello(ipc):
    async with serving(ipc, echo, service="buffer") as server:
        stranger = client_of(ipc, job="other")
        with pytest.raises(FaultError, match=r"schema: buffer here belongs to job 'j', not to 'other'"):
            await stranger.connect(5)
        with pytest.raises(FaultError, match="schema"):
            await stranger.call(Arrived("t"), timeout_s=60)
        await stranger.close()
        old = Wire(ipc)
        await old.ask(1, Hello(SCHEMA + 1, "j", "r", "old"))
        _, _, fault = await old.reply()
        assert fault.kind == "schema"
        assert f"old speaks schema {SCHEMA + 1}, buffer speaks {SCHEMA}" in fault.message
        old.close()
        assert server.counters["requests"] == 0


async def test_connecting_to_nobody_says_so_in_time(endpoint):
    client = client_of(endpoint.replace(":0", ":1"))
    with pytest.raises(RpcTimeout, match="nobody answered"):
        await client.connect(0.2)
    with pytest.raises(RpcTimeout, match="no connection"):
        await client.call(Arrived("t"), timeout_s=0.1)
    await client.close()


async def test_calls_of_a_closed_client_end_with_peer_gone(ipc):
    gate = Gate()
    async with serving(ipc, gate):
        client = client_of(ipc, limits=CallLimits(1))
        with pytest.raises(PeerGone):
            await client.call(Arrived("t"), timeout_s=1)
        await client.connect(5)
        running, in_line = (asyncio.create_task(client.call(Arrived("t"), timeout_s=60)) for _ in range(2))
        await asyncio.wait_for(gate.started.acquire(), LIMIT_S)
        await client.close()
        for call in (running, in_line, client.call(Arrived("t"), timeout_s=1)):
            with pytest.raises(PeerGone):
                await call


async def test_a_cancelled_call_leaves_the_client_in_order(ipc):
    gate = Gate()
    async with pair(ipc, gate) as (_, client):
        call = asyncio.create_task(client.call(Commit("policy", 1, 1), timeout_s=60))
        await asyncio.wait_for(gate.started.acquire(), LIMIT_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gate.open.set()
        for _ in range(100):
            assert (await client.call(Arrived("t"), timeout_s=60)) == Ok()


async def test_the_server_stops_in_time_and_answers_what_it_cuts_short(ipc):
    gate = Gate()
    async with serving(ipc, gate) as server, Wire(ipc) as wire:
        await wire.hello()
        await wire.ask(2, Arrived("t"))
        await asyncio.wait_for(gate.started.acquire(), LIMIT_S)
        await asyncio.wait_for(server.stop(grace_s=0.05), LIMIT_S)
        assert await wire.reply() == (Kind.REPLY, 2, Fault("unavailable", "t stops", STOP_RETRY_MS))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_leaves_no_task_thread_descriptor_or_file(ipc):
    async def use():
        async with pair(ipc, echo) as (_, client):
            await client.call(Fetch([]), timeout_s=60, attachments=[bytes(100_000)])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(use())  # the first use makes what libzmq keeps for the process
    open_before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        asyncio.run(use())
        assert not os.path.exists(ipc.removeprefix("ipc://"))
    assert descriptors() <= open_before  # those of other tests may go meanwhile
    assert threading.active_count() <= threads


def test_a_failed_start_leaves_nothing_either(ipc):
    async def main():
        server = server_of(f"{ipc}/below/a/file")
        for _ in range(3):
            with pytest.raises(Exception, match="does not exist"):
                await server.start()
        async with pair(ipc, echo) as (first, _):
            for _ in range(3):
                with pytest.raises(Exception, match="already serves"):
                    await server_of(first.endpoint).start()

    asyncio.run(main())
    before = descriptors()
    asyncio.run(main())
    assert descriptors() <= before


async def test_the_blocking_client_keeps_the_same_promises(endpoint):
    refusals = 2

    async def handle(peer, message, attachments):
        nonlocal refusals
        if isinstance(message, Claim):
            await asyncio.Event().wait()
        if isinstance(message, Commit):
            raise FaultError("fenced", "a newer trainer")
        if refusals:
            refusals -= 1
            raise FaultError("busy", "", 1)
        return Ok(), attachments

    def use(server_endpoint):
        with closing(SyncClient(server_endpoint, job="j", role="trainer", name="t", access=SECRET)) as client:
            client.connect()
            reply, attachments = client.exchange(Arrived("t"), timeout_s=60, attachments=[b"x"])
            assert (reply, bytes(attachments[0])) == (Ok(), b"x")
            with pytest.raises(FaultError, match="a newer trainer"):
                client.call(Commit("policy", 1, 1), timeout_s=60)
            with pytest.raises(RpcTimeout):
                client.call(Claim("s", 1), timeout_s=0.1)
            waiting = threading.Thread(target=expect_gone, args=(client,))
            waiting.start()
            client.call(Arrived("t"), timeout_s=60)
        waiting.join(LIMIT_S)
        assert not waiting.is_alive()
        with pytest.raises(PeerGone):
            client.call(Arrived("t"), timeout_s=1)

    def expect_gone(client):
        with pytest.raises(PeerGone):
            client.call(Claim("s", 1), timeout_s=60)

    async with serving(endpoint, handle) as server:
        await asyncio.to_thread(use, server.endpoint)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rpc-")]


async def test_threads_that_come_together_to_a_blocking_client_share_one_loop(endpoint):
    def use(server_endpoint):
        for _ in range(20):
            client = SyncClient(server_endpoint, job="j", role="trainer", name="t", access=SECRET)
            together = threading.Barrier(8)

            def come(client=client, together=together):
                together.wait(LIMIT_S)
                client.connect(20)
                return client.call(Fetch([]), timeout_s=60)

            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(come) for _ in range(8)]
                assert [one.result(LIMIT_S) for one in asked] == [Fetched(["trainer", "t", "Fetch"])] * 8
            assert len([t for t in threading.enumerate() if t.name.startswith("rpc-")]) == 1
            client.close()

    async with serving(endpoint, echo) as server:
        await asyncio.to_thread(use, server.endpoint)
