"""Attachments on a real Redis: in files beside the buffer, no byte of them in Redis, freed in time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_async.base.errors import FaultError
from areal_async.rpc.messages import (
    Checkpointed,
    Commit,
    Fetch,
    GroupSamples,
    NextBatch,
    PutEpisodes,
    Stats,
)
from replay_buffer.attachments import PART, PREFIXES, AttachmentFiles, routes_key
from replay_buffer.attachments import ROUTES as PREFIX
from replay_buffer.coordinator import GroupBytes
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import Versions
from replay_buffer.ledger.rules import Rules
from tests.unit.buffer.conftest import judge, lease, reasons, serving
from tests.unit.buffer.test_server import opened as opened_over_wire
from tests.unit.buffer.test_server import score
from tests.waiting import until

RULES = Rules.alone(group_size=2, batch_groups=1, max_staleness=1, durability="memory")
MARK = b"these are the routes"
LARGE = 200_000
"""Bytes of routes; an episode of the same size would go to Redis in chunks."""


def routes_of(sample: int, size: int = LARGE) -> bytes:
    return (MARK + b"%d" % sample) * (size // (len(MARK) + 1))


def files_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith(PREFIXES))


def in_redis(redis: Any, job_name: str) -> bytes:
    """Every value of the job."""
    names = list(redis.scan_iter(f"areal:{{{job_name}}}:*", 1000))
    assert names
    return b"".join(redis.dump(name) or b"" for name in names)


def held_of(front: Any, group: Any) -> Any:
    return front.routes([(group.group_id, sample) for sample in range(2)])


async def opened(front: Any) -> Any:
    await front.execute(OpenedWith("policy", "t", 0, None))
    return (await lease(front))[0]


async def put(front: Any, group: Any, routes: Any, samples: Any = (0, 1), *, version: int = 0) -> Any:
    arrivals = tuple(
        Arrival(sample, 10, 8, 4, {"policy": Versions(version, version, 1)}) for sample in samples
    )
    command = StoreEpisodes((GroupArrivals(group.lease_id, group.group_id, arrivals),))
    given = GroupBytes([b"episode..."] * len(arrivals), samples, routes)
    return (await front.store(command, [given])).reply.groups[0]


async def test_routes_lie_in_files_until_their_group_is_committed(
    a_front: Any, tmp_path: Path, redis: Any, job_name: str
) -> None:
    folder = tmp_path / "episodes"
    given = [routes_of(0), routes_of(1, 300)]
    async with a_front(RULES, attachments=AttachmentFiles(folder, grace_s=0.0)) as front:
        group = await opened(front)
        assert (await put(front, group, given)).stored == [0, 1]
        assert [bytes(each) for each in await held_of(front, group)] == given
        assert MARK not in in_redis(redis, job_name)
    # A front that died, and one that comes after it.
    async with a_front(RULES, attachments=AttachmentFiles(folder, grace_s=0.0)) as front:
        assert [bytes(each) for each in await held_of(front, group)] == given
        await judge(front)
        await front.execute(NextBatch("policy", 1, 0))
        await front.execute(Commit("policy", 1, 0))
        assert [bytes(each) for each in await held_of(front, group)] == given  # the redo log may need them
        await front.execute(Checkpointed("policy", 1, 1))
        await until(lambda: not files_in(folder))
        assert await held_of(front, group) == [None, None]


async def test_what_is_refused_dropped_or_left_by_a_crash_leaves_no_routes(
    a_front: Any, tmp_path: Path
) -> None:
    folder, given = tmp_path / "episodes", [routes_of(0), routes_of(1)]
    async with a_front(RULES, attachments=AttachmentFiles(folder, grace_s=0.0)) as front:
        group = await opened(front)
        await put(front, group, given[:1], (0,))
        zombie = msgspec.structs.replace(group, lease_id="L0.0")
        assert set(reasons(await put(front, zombie, [b"x", b"y"]))) == {"lease_lost"}
        await until(lambda: len(files_in(folder)) == 1)
        assert bytes((await held_of(front, group))[0]) == given[0]
        # Sent again, for its acknowledgement was lost.
        assert (await put(front, group, given)).stored == [0, 1]
        await until(lambda: len(files_in(folder)) == 2)
        (other,) = await lease(front)
        await put(front, other, given[:1], (0,))
        stale = await put(front, other, given[1:], (1,), version=-5)
        assert set(reasons(stale)) == {"stale"}
        await until(lambda: len(files_in(folder)) == 2)
        (third,) = await lease(front)
        await put(front, third, given)
        cut = f"{PREFIX}{third.group_id.replace(':', '%3A').replace('#', '%23')},1,900,ef"
        for leftover in (f"{PREFIX}nobody,0,3,ab", f"{PREFIX}{'x' * 8}%23,1,3,cd", cut, cut + PART):
            (folder / leftover).write_bytes(b"abc")
        # As if it had died between the files and the ledger.
        await AttachmentFiles(folder, grace_s=0.0).write(group.group_id, {routes_key(0): given[0]})
    async with a_front(RULES, attachments=AttachmentFiles(folder, grace_s=0.0)) as front:
        assert len(files_in(folder)) == 4
        assert [bytes(each) for each in await held_of(front, third)] == given


async def test_a_full_disk_refuses_the_put_and_leaves_nothing(
    a_front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "episodes"
    async with a_front(RULES, attachments=AttachmentFiles(folder, grace_s=0.0)) as front:
        group = await opened(front)
        with monkeypatch.context() as patched:
            write = Path.write_bytes

            def full(path: Path, data: Any) -> int:
                if ",1," in path.name:
                    raise OSError(28, "No space left on device")
                return write(path, data)

            patched.setattr(Path, "write_bytes", full)
            with pytest.raises(FaultError, match="No space left"):
                await put(front, group, [b"x", b"y"])
        assert files_in(folder) == []
        assert (await put(front, group, [b"x", b"y"])).stored == [0, 1]


async def test_routes_over_the_wire(context: Any, blob: Any, job_name: str, redis: Any) -> None:
    ctx = context()
    async with serving(ctx) as client:
        tag, groups = await opened_over_wire(client, 2)
        for group in groups:
            blobs = [blob(job_name, group.group_id, sample) for sample in (0, 1)]
            request = PutEpisodes([GroupSamples(group.lease_id, group.group_id, [0, 1], [1])])
            with pytest.raises(
                FaultError, match="1 with routes, and 0 media, came with 2 attach"
            ):
                await client.call(request, attachments=blobs)
            twice = PutEpisodes([GroupSamples(group.lease_id, group.group_id, [0, 1], [1, 1])])
            with pytest.raises(FaultError, match="2 with routes"):
                await client.call(twice, attachments=[*blobs, routes_of(1), routes_of(1)])
            ack = await client.call(request, attachments=[*blobs, routes_of(1)])
            assert ack.groups[0].stored == [0, 1]
        stats = await client.call(Stats())
        assert stats.payload_bytes == 2 * (sum(map(len, blobs)) + len(routes_of(1)))
        assert MARK not in in_redis(redis, job_name)
        items, claimed = await score(client)
        assert [len(each) for each in claimed] == [len(blobs[0])] * 4  # who scores does not get them
        batch = await client.call(NextBatch("policy", tag.epoch, 0, wait_ms=5000))
        ids = [episode.episode_id for group in batch.groups for episode in group.episodes]
        plain, found = await client.exchange(Fetch(ids))
        assert (plain.routes, len(found)) == ([], 4)
        reply, found = await client.exchange(Fetch(ids, routes=True))
        assert reply.routes == [name for name in ids if name.endswith(".1")]
        assert [bytes(each) for each in found[4:]] == [routes_of(1)] * 2
        folder = ctx.run_dir / "buffer" / "episodes"
        assert len(files_in(folder)) == 2
        await client.call(Commit("policy", tag.epoch, 0))
        await client.call(Checkpointed("policy", tag.epoch, 1))
        await until(lambda: not files_in(folder))
        assert items
