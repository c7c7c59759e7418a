"""versions_are_true: whoever is killed, at whichever chunk, nothing torn or mixed ever has a snapshot's name,
and the survivors finish."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from areal_async.weights.snapshot import open_snapshot
from tests.unit.weights.world import LIMIT_S, Killed, download, server, table_of, written
from tests.waiting import until

N_CHUNKS = 9


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """Two versions of one size: what would be mixed up if anything could be."""
    root = tmp_path_factory.mktemp("published")
    return [written(root, version=version, mib=1.5) for version in (0, 1)]


@pytest.fixture(scope="module")
def tables(snapshots):
    made = [table_of(snapshot) for snapshot in snapshots]
    assert {len(table.digests) // 32 for table in made} == {N_CHUNKS}
    return made


def assert_nothing_false_is_served(root, snapshots):
    by_name = {snapshot.tag.label: snapshot for snapshot in snapshots}
    for path in root.iterdir():
        if not path.name.startswith("."):
            open_snapshot(path, manifest_hash=by_name[path.name].manifest_hash)


@pytest.mark.parametrize("at", range(N_CHUNKS))
async def test_versions_are_true_when_the_sender_is_killed_at_any_chunk(tmp_path, snapshots, tables, at):
    """It comes back at its address; what the receivers had is not sent again."""
    snapshot, table = snapshots[0], tables[0]
    async with server() as a, server() as b:
        async with server(snapshot, table=table, limit=at) as p:
            endpoint = p.endpoint
            first = download(a, snapshot, tmp_path / "a", [endpoint], table)
            second = download(b, snapshot, tmp_path / "b", [a.endpoint, endpoint], table)
            runs = [asyncio.create_task(one.run()) for one in (first, second)]
            await until(lambda: p.asked > at)
        for root in (tmp_path / "a", tmp_path / "b"):
            assert_nothing_false_is_served(root, snapshots)
        async with server(snapshot, table=table, listen=endpoint):
            for path in await asyncio.wait_for(asyncio.gather(*runs), LIMIT_S):
                open_snapshot(path, manifest_hash=snapshot.manifest_hash)
        assert first.bytes_received == second.bytes_received == snapshot.size_bytes


@pytest.mark.parametrize("at", range(N_CHUNKS))
async def test_versions_are_true_when_a_relay_is_killed_at_any_chunk(tmp_path, snapshots, tables, at):
    snapshot, table = snapshots[0], tables[0]
    async with server(snapshot, table=table) as p, server() as a, AsyncExitStack() as relay:
        b = await relay.enter_async_context(server(limit=at))
        roots = [tmp_path / name for name in "abc"]
        lines = [[p.endpoint], [a.endpoint, p.endpoint], [b.endpoint, a.endpoint, p.endpoint]]
        runs = [
            asyncio.create_task(download(peer, snapshot, root, line, table).run())
            for peer, root, line in zip((a, b, None), roots, lines, strict=True)
        ]
        await until(lambda: b.asked > at or runs[2].done())
        await relay.aclose()
        assert (await asyncio.wait_for(runs[2], LIMIT_S)).exists()
        await asyncio.wait_for(asyncio.gather(*runs), LIMIT_S)
        for root in roots:
            assert_nothing_false_is_served(root, snapshots)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("at", range(0, N_CHUNKS, 2))
async def test_versions_are_true_when_a_receiver_is_killed_at_any_chunk_and_begins_again(
    tmp_path, snapshots, tables, victim, at
):
    """Both versions come to three receivers at once; one dies in the middle of each, and comes back twice."""
    places = [tmp_path / name for name in "abc"]
    both = [*zip(snapshots, tables, strict=True)]
    async with AsyncExitStack() as stack:
        origins = [await stack.enter_async_context(server(snapshot, table=table)) for snapshot, table in both]
        alive = [await stack.enter_async_context(server()) for _ in places]
        runs = []
        for origin, (snapshot, table) in zip(origins, both, strict=True):
            for i, (peer, place) in enumerate(zip(alive, places, strict=True)):
                line = [*(alive[j].endpoint for j in reversed(range(i))), origin.endpoint]
                runs.append(download(peer, snapshot, place, line, table, at if i == victim else None).run())
        ends = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), LIMIT_S)
        assert [isinstance(end, Killed) for end in ends] == 2 * [i == victim for i in range(3)]
        for limit in (N_CHUNKS - at, None):  # it begins again, dies again or not, and begins again
            for place in places:
                assert_nothing_false_is_served(place, snapshots)
            again = [
                download(None, snapshot, places[victim], [origin.endpoint], table, limit).run()
                for origin, (snapshot, table) in zip(origins, both, strict=True)
                if not (places[victim] / snapshot.path.name).exists()
            ]
            ends = await asyncio.wait_for(asyncio.gather(*again, return_exceptions=True), LIMIT_S)
        assert all(end.exists() for end in ends)
        assert_nothing_false_is_served(places[victim], snapshots)
        assert {path.name for path in places[victim].iterdir()} >= {each.tag.label for each in snapshots}
