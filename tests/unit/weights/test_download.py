import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.base.errors import EndpointError, FaultError, SnapshotError
from areal_async.rpc.client import Client
from areal_async.rpc.messages import Stats
from areal_async.rpc.secret import CurveKeys, Password
from areal_async.rpc.weights_messages import GetChunk
from areal_async.weights.channels.serving import MAX_SOURCES, ChunkServer, sources
from areal_async.weights.snapshot import open_snapshot
from tests.unit.weights.world import LIMIT_S, SECRET, download, files_of, server, table_of, written
from tests.waiting import until


@pytest.mark.parametrize("n", [1, 2, 8])
async def test_what_was_published_arrives_and_the_sender_sends_every_byte_once(tmp_path, n):
    snapshot = written(tmp_path / "p", mib=2)
    async with server(snapshot) as p, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(server()) for _ in range(n)]
        line = [p.endpoint, *[peer.endpoint for peer in peers]]
        ones = [
            download(peer, snapshot, tmp_path / f"r{i}", line[i::-1], patience_s=LIMIT_S)
            for i, peer in enumerate(peers)
        ]
        for path in await asyncio.wait_for(asyncio.gather(*(one.run() for one in ones)), LIMIT_S):
            assert files_of(path) == files_of(snapshot.path)
            assert open_snapshot(path, manifest_hash=snapshot.manifest_hash).tag == snapshot.tag
            assert [entry.name for entry in path.parent.iterdir()] == [snapshot.path.name], "nothing is left"
        assert p.bytes_sent == ones[0].bytes_received == snapshot.size_bytes
        assert [peer.bytes_sent for peer in peers] == [snapshot.size_bytes] * (n - 1) + [0]


async def test_chunks_are_handed_on_before_the_directory_is_complete(tmp_path):
    """The first in line has its own source held up in the middle; what it has reaches the second."""
    snapshot = written(tmp_path / "p")
    n = len(table_of(snapshot).digests) // 32
    async with server(snapshot, limit=n // 2) as p, server() as a, server() as b:
        first = download(a, snapshot, tmp_path / "a", [p.endpoint], patience_s=LIMIT_S)
        second = download(b, snapshot, tmp_path / "b", [a.endpoint], patience_s=LIMIT_S)
        runs = [asyncio.create_task(one.run()) for one in (first, second)]
        await until(lambda: second.partial.progress == (n // 2) / n)
        assert first.partial.progress == (n // 2) / n
        assert not any(run.done() for run in runs)
        p.limit = 1 << 30
        await asyncio.wait_for(asyncio.gather(*runs), LIMIT_S)


async def test_a_request_that_comes_before_its_source_has_begun_waits_for_it(tmp_path):
    snapshot = written(tmp_path / "p")
    async with server(snapshot) as p, server() as a:
        sources = [a.endpoint, p.endpoint]
        second = asyncio.create_task(download(None, snapshot, tmp_path / "b", sources, patience_s=10).run())
        await until(lambda: a.asked > 0)
        await download(a, snapshot, tmp_path / "a", [p.endpoint]).run()
        assert (await asyncio.wait_for(second, LIMIT_S)).exists()
        assert p.bytes_sent == a.bytes_sent == snapshot.size_bytes


async def test_versions_are_true_a_wrong_chunk_is_fetched_again_from_another_source(tmp_path):
    good, wrong = written(tmp_path / "p"), written(tmp_path / "wrong", seed=1)
    table = table_of(good)
    async with server(good) as p, server(wrong, table=table) as peer:  # which takes its own for the good
        one = download(None, good, tmp_path / "a", [peer.endpoint, p.endpoint], table, patience_s=LIMIT_S)
        assert files_of(await one.run()) == files_of(good.path)
        assert 0 < p.bytes_sent <= good.size_bytes


async def test_versions_are_true_a_publisher_with_other_bytes_ends_the_download(tmp_path):
    good, wrong = written(tmp_path / "p"), written(tmp_path / "wrong", seed=1)
    async with server(wrong, table=table_of(good)) as p:
        with pytest.raises(SnapshotError, match="other bytes"):
            await download(None, good, tmp_path / "a", [p.endpoint]).run()
    assert not (tmp_path / "a" / good.path.name).exists()


async def test_sources_that_are_dead_silent_or_without_the_snapshot_are_stepped_over(tmp_path):
    snapshot = written(tmp_path / "p")
    async with server(snapshot) as p, server() as other, server(snapshot, limit=3) as tired:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            with socket.create_server(("127.0.0.1", 0)) as closed:
                dead = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
            mute = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            sources = [dead, mute, other.endpoint, tired.endpoint, p.endpoint]
            one = download(None, snapshot, tmp_path / "a", sources)
            assert (await asyncio.wait_for(one.run(), LIMIT_S)).exists()
        assert tired.bytes_sent + p.bytes_sent == snapshot.size_bytes


async def test_receivers_that_hold_all_chunks_between_them_are_enough(tmp_path):
    """The trainer is gone; one has the first chunks and one the last."""
    snapshot = written(tmp_path / "p")
    table = table_of(snapshot)
    n = len(table.digests) // 32
    async with server() as a, server() as b:
        for peer, mine in ((a, range(n // 2)), (b, range(n // 2, n))):
            store = download(peer, snapshot, tmp_path / f"{mine.start}", ["none"], table).partial
            for number in mine:
                file, at, size = store.layout.chunk(number)
                data = (snapshot.path / table.files[file][0]).read_bytes()[at : at + size]
                assert store.put(number, memoryview(data))
        sources = [b.endpoint, a.endpoint, "tcp://127.0.0.1:9"]
        one = download(None, snapshot, tmp_path / "c", sources, table, window_bytes=1)
        assert files_of(await asyncio.wait_for(one.run(), LIMIT_S)) == files_of(snapshot.path)


async def test_a_download_from_nobody_ends_with_the_reason(tmp_path):
    snapshot = written(tmp_path / "p")
    one = download(None, snapshot, tmp_path / "a", ["tcp://127.0.0.1:9"], give_up_s=0.5)
    words = r"no source sent anything for 0\.5 s: 0 % of policy-e1-v0 are here"
    with pytest.raises(SnapshotError, match=words):
        await one.run()


async def test_a_cancelled_download_is_gone_on_with_where_it_was(tmp_path):
    snapshot = written(tmp_path / "p")
    async with server(snapshot, limit=7) as p:
        one = download(None, snapshot, tmp_path / "a", [p.endpoint], patience_s=LIMIT_S)
        run = asyncio.create_task(one.run())
        await until(lambda: len(one.partial.missing) == one.partial.layout.n_chunks - 7)
        run.cancel()
        await asyncio.wait([run])
        left_bytes = sum(one.partial.layout.chunk(number)[2] for number in one.partial.missing)
        p.limit = 1 << 30
        again = download(None, snapshot, tmp_path / "a", [p.endpoint])
        assert files_of(await again.run()) == files_of(snapshot.path)
        assert again.bytes_received == left_bytes < snapshot.size_bytes, "no verified chunk was sent twice"


async def test_versions_are_true_what_a_download_left_is_hashed_again(tmp_path):
    snapshot = written(tmp_path / "p")
    left = download(None, snapshot, tmp_path / "a", ["none"]).partial
    for name, size in left.layout.table.files:
        (left.directory / name).write_bytes(os.urandom(size))
    (left.directory / "foreign").write_bytes(b"x")
    left.abandon()
    async with server(snapshot) as p:
        path = await download(None, snapshot, tmp_path / "a", [p.endpoint]).run()
        assert files_of(path) == files_of(snapshot.path)


async def test_requests_for_what_is_not_there_are_refused(tmp_path):
    snapshot = written(tmp_path / "p")
    n = len(table_of(snapshot).digests) // 32
    async with server(snapshot) as p, Client(p.endpoint, job="j", role="r", name="n", access=SECRET) as c:
        for message, match in (
            (GetChunk(snapshot.manifest_hash, n), f"has {n} chunks"),
            (GetChunk(snapshot.manifest_hash, -1), f"has {n} chunks"),
            (Stats(), "does not serve Stats"),
        ):
            with pytest.raises(FaultError, match=match):
                await c.call(message, timeout_s=LIMIT_S)
        assert p.remove(snapshot.manifest_hash)
        for gone in ("blake3:other", snapshot.manifest_hash):
            with pytest.raises(SnapshotError, match="not here"):
                await p.chunk(GetChunk(gone, 0))


async def test_files_may_be_overwritten_only_once_no_socket_reads_them(tmp_path):
    snapshot = written(tmp_path / "p")
    async with server(snapshot) as p:
        _, (reading,) = await p.chunk(GetChunk(snapshot.manifest_hash, 0))
        assert not p.remove(snapshot.manifest_hash)
        before = bytes(reading)
        (snapshot.path / "model.safetensors").unlink()
        assert bytes(reading) == before


async def test_addresses_beyond_loopback_need_keys():
    with pytest.raises(EndpointError, match="CURVE"):
        await ChunkServer("tcp://0.0.0.0:0", job="j", source="peer", access=Password(b"u", b"w")).start()
    keys = CurveKeys.generate()
    made = ChunkServer("tcp://0.0.0.0:0", job="j", source="peer", access=keys)
    await made.start()
    await made.close()


async def test_who_has_the_keys_is_served_and_nobody_else(tmp_path):
    snapshot = written(tmp_path / "p")
    keys, others = CurveKeys.generate(), CurveKeys.generate()
    own = CurveKeys(keys.public, keys.secret, (keys.public,))
    foreign = CurveKeys(others.public, others.secret, (keys.public,))
    async with server(snapshot, access=own) as p:
        with pytest.raises(SnapshotError, match="no source"):
            await download(None, snapshot, tmp_path / "x", [p.endpoint], access=foreign, give_up_s=1).run()
        path = await download(None, snapshot, tmp_path / "a", [p.endpoint], access=own).run()
        assert files_of(path) == files_of(snapshot.path)
        assert p.bytes_sent == snapshot.size_bytes


def test_nothing_is_left_of_a_server_and_a_download(tmp_path):
    """Looked at in a process of its own: what other tests left begins and ends here when it likes."""
    command = [sys.executable, "-c", f"import {__name__} as here; here.look_at_what_is_left()"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S * 4)
    assert done.returncode == 0, done.stderr
    threads, descriptors = json.loads(done.stdout)
    assert threads[0] == threads[1]
    assert descriptors[0] == descriptors[1]


def look_at_what_is_left():
    """Print how many threads and descriptors there are after one download, and after three."""
    snapshot = written(Path("p"))

    async def main(i):
        async with server(snapshot) as p, server() as a:
            await download(a, snapshot, Path(f"{i}"), [p.endpoint]).run()

    def held():
        gc.collect()  # mappings hold descriptors
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    asyncio.run(main(0))
    before = held()
    asyncio.run(main(1))
    asyncio.run(main(2))
    print(json.dumps(list(zip(before, held(), strict=True))))


ORIGIN = "o"
LINE = [f"r{i}" for i in range(40)]


@given(st.integers(1, 40))
def test_the_origin_serves_one_and_each_receiver_one_other(n):
    parents = [sources(LINE[:n], member, ORIGIN)[0] for member in LINE[:n]]
    assert parents == [ORIGIN, *LINE[: n - 1]]


@given(st.integers(1, 40), st.integers(0, 39))
def test_the_origin_is_always_among_the_sources_and_oneself_never(n, me):
    found = sources(LINE[:n], LINE[me % n], ORIGIN)
    assert ORIGIN in found
    assert LINE[me % n] not in found
    assert len(found) == len(set(found)) <= MAX_SOURCES


def test_receivers_form_a_chain_in_the_order_in_which_they_ask():
    line: list[str] = []
    assert sources(line, "a", ORIGIN)[0] == ORIGIN
    assert sources(line, "b", ORIGIN)[:2] == ["a", ORIGIN]
    assert sources(line, "c", ORIGIN)[:3] == ["b", "a", ORIGIN]
    assert sources(line, "b", ORIGIN) == ["a", ORIGIN, "c"], "asking again changes nothing"
