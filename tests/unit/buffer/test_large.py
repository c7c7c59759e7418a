"""Large episodes on a real Redis: in files beside it, or in keys of their own; whole, once, and freed."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from areal_async.base.errors import FaultError
from areal_async.rpc.messages import Checkpointed, Commit, NextBatch, Stats
from replay_buffer.ledger.index import WriteSet
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import LedgerMeta
from replay_buffer.ledger.rules import Rules
from replay_buffer.redis.address import StoreUnavailable
from replay_buffer.redis.connection import RedisConnection
from replay_buffer.redis.large import (
    ALIGN_BYTES,
    CHUNK_BYTES,
    FILE_BYTES,
    KEY_BYTES,
    BlobFiles,
    BlobRef,
    Large,
)
from replay_buffer.redis.store import SCRIPT
from replay_buffer.redis.writer import Commands, Keys, LedgerClock, LedgerWriter
from tests.unit.buffer.conftest import judge, lease, reasons, store
from tests.waiting import until

SIZES = (10, KEY_BYTES - 1, KEY_BYTES, 3 * CHUNK_BYTES + 7, FILE_BYTES, FILE_BYTES + 1)
RULES = Rules.alone(group_size=len(SIZES), batch_groups=1, max_staleness=1, durability="memory")


def episodes(seed=0, sizes=SIZES):
    rng = random.Random(seed)
    return [rng.randbytes(size) for size in sizes]


@pytest.fixture(params=["files", "keys"])
def folder(request, tmp_path):
    """Where files go; None for a Redis elsewhere."""
    return tmp_path / "episodes" if request.param == "files" else None


async def opened(front):
    await front.execute(OpenedWith("policy", "t", 0, None))
    return (await lease(front))[0]


async def held(front, group):
    blobs = await front.blobs([(group.group_id, sample) for sample in range(len(SIZES))])
    return [None if blob is None else bytes(blob) for blob in blobs]


def keys_of(redis, job_name):
    return sorted([name.decode() for name in redis.scan_iter(f"areal:{{{job_name}}}:*", 1000)])


def files(folder):
    return sorted(os.listdir(folder)) if folder is not None else []


async def test_one_death_is_local_large_episodes_come_back_as_they_were(a_front, folder, redis, job_name):
    blobs = episodes()
    async with a_front(RULES, folder=folder) as front:
        group = await opened(front)
        first = await store(front, group, [memoryview(blob) for blob in blobs[:4]])
        second = await store(front, group, blobs[4:], (4, 5))
        assert [*first.stored, *second.stored] == list(range(len(SIZES)))
        assert await held(front, group) == blobs
        assert (await front.execute(Stats())).reply.payload_bytes == sum(SIZES)
        assert len(files(folder)) == (2 if folder else 0)
    async with a_front(RULES, folder=folder) as front:
        assert await held(front, group) == blobs
    assert int(redis.scard(Keys(job_name).staged)) == 0
    in_hash = redis.hvals(Keys(job_name).blobs(group.group_id))
    assert max(map(len, in_hash)) < KEY_BYTES


async def test_nothing_is_unbounded_large_episodes_are_freed_with_their_group(
    a_front, folder, job_name, redis
):
    async with a_front(RULES, folder=folder) as front:
        group = await opened(front)
        await store(front, group, episodes())
        await judge(front)
        await front.execute(NextBatch("policy", 1, 0))
        await front.execute(Commit("policy", 1, 0))
        assert await held(front, group) == episodes()
        await front.execute(Checkpointed("policy", 1, 1))
        assert await held(front, group) == [None] * len(SIZES)
        await until(lambda: not files(folder))
        names = keys_of(redis, job_name)
        assert [name.rpartition(":")[2] for name in names] == ["meta"]


async def test_trained_effectively_once_what_a_crash_left_half_done_is_removed_and_put_again(
    a_front, folder, job_name, redis
):
    blobs = episodes()
    async with a_front(RULES, folder=folder) as front:
        group = await opened(front)
        # As if it had died after the bytes were there and before the ledger knew of them.
        if folder is not None:
            await BlobFiles(folder, "memory").write(blobs)
            assert len(files(folder)) == 1
        redis.sadd(Keys(job_name).staged, "1.7:2")
        redis.set(Keys(job_name).chunk("1.7", 0), b"left over")
    async with a_front(RULES, folder=folder) as front:
        assert files(folder) == []
        names = keys_of(redis, job_name)
        assert not [name for name in names if ":b:" in name or "staged" in name]
        assert await held(front, group) == [None] * len(SIZES)
        assert len((await store(front, group, blobs)).stored) == len(SIZES)
        assert await held(front, group) == blobs


async def test_a_put_that_is_refused_or_repeated_leaves_nothing(a_front, folder, job_name, redis):
    async with a_front(RULES, folder=folder) as front:
        group = await opened(front)
        blobs = episodes()
        await store(front, group, blobs)
        kept, names = files(folder), keys_of(redis, job_name)
        assert len((await store(front, group, episodes(seed=1))).stored) == len(SIZES)
        zombie = msgspec.structs.replace(group, lease_id="L0.0")
        assert set(reasons(await store(front, zombie, blobs))) == {"lease_lost"}
        await until(lambda: files(folder) == kept)
        assert keys_of(redis, job_name) == names
        assert await held(front, group) == blobs


async def test_a_ledger_write_without_its_chunks_is_refused_whole(a_front, redis, redis_url, job_name):
    """They are not there, or Redis refuses one of them."""
    keys, sha = Keys(job_name), redis.script_load(SCRIPT)
    for refers, ahead, words in ((True, [], "does not hold"), (False, [("SET", "only a key")], "refused")):
        async with a_front(RULES) as front:
            commands = Commands(keys)
            if refers:
                commands.add("EXISTS", keys.chunk("9.9", 0))
            commands.add("HSET", keys.groups, ("g", b"x"))
            connection, epoch = await RedisConnection.open(redis_url), int(redis.hget(keys.meta, "front"))
            clock = LedgerClock()
            clock.begin(None)
            writer = LedgerWriter(connection, sha, epoch, clock, lambda _: None)
            with pytest.raises(StoreUnavailable, match=words):
                await writer.submit(front.index.revision, commands, ahead)
            await writer.close()
        if refers:
            assert not redis.hexists(keys.groups, "g")


async def test_nothing_is_unbounded_a_full_disk_loses_nothing(a_front, tmp_path, monkeypatch):
    folder = tmp_path / "episodes"
    async with a_front(RULES, folder=folder) as front:
        group = await opened(front)

        def on_full_disk(fd, mode):
            os.close(fd)
            return open("/dev/full", mode)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdopen", on_full_disk)
            with pytest.raises(FaultError, match="No space left") as failed:
                await store(front, group, episodes())
            assert failed.value.kind == "unavailable"
        assert files(folder) == []
        assert len((await store(front, group, episodes())).stored) == len(SIZES)


async def test_episodes_whose_file_is_gone_are_found_counted_and_tried_again(a_front, tmp_path):
    folder = tmp_path / "episodes"
    async with a_front(RULES, folder=folder) as front:
        group = await opened(front)
        await store(front, group, episodes())
    (name,) = files(folder)
    os.truncate(folder / name, FILE_BYTES)  # what a machine without power may leave
    async with a_front(RULES, folder=folder) as front:
        stats = (await front.execute(Stats())).reply
        assert stats.reasons["dropped:bytes_lost"] == 1
        assert stats.reasons["bytes_lost"] == 3
        (again,) = await lease(front)
        assert (again.task.task_id, again.attempt) == (group.task.task_id, group.attempt + 1)
        await until(lambda: not files(folder))


async def test_a_message_under_way_survives_a_reopening(tmp_path):
    """Redis may be lost and found between a file and its ledger write."""
    place = BlobFiles(tmp_path, "memory")
    await place.open([])
    (ref,), name = await place.write([b"x" * FILE_BYTES])
    await place.open([])
    assert files(tmp_path) == [name]
    place.settled(name, used=False)
    await until(lambda: not files(tmp_path))
    assert await place.read([ref]) == [None]
    place.close()


@pytest.mark.parametrize(
    ("durability", "is_flushed"), [("memory", False), ("everysec", True), ("always", True)]
)
async def test_a_file_is_flushed_as_its_tier_says(tmp_path, monkeypatch, durability, is_flushed):
    flushed = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    place = BlobFiles(tmp_path, durability)
    await place.open([])
    _, name = await place.write([b"x" * FILE_BYTES])
    assert flushed == ([str(tmp_path / name)] if is_flushed else [])


async def test_a_freed_file_stays_while_redis_may_still_lose_that_it_was_freed(tmp_path):
    place = BlobFiles(tmp_path, "everysec")
    await place.open([])
    placed, name = await place.write([b"x" * FILE_BYTES])
    place.settled(name, used=True)
    place.remove([name])
    assert files(tmp_path) == [name]
    assert await place.open([(("g", 0), placed[0])]) == []  # it was lost: the file is wanted again
    soon = BlobFiles(tmp_path, "everysec", grace_s=0.001)
    soon.remove([name])
    await until(lambda: not files(tmp_path))
    place.close()


async def test_episodes_of_one_message_share_a_file_and_each_begins_on_a_page(tmp_path):
    place = BlobFiles(tmp_path, "memory")
    await place.open([])
    blobs = episodes(sizes=(FILE_BYTES + 1, 5, FILE_BYTES))
    placed, name = await place.write(blobs)
    assert placed[1] == blobs[1]
    refs = [part for part in placed if isinstance(part, BlobRef)]
    assert [ref.name for ref in refs] == [name, name]
    assert all(ref.at % ALIGN_BYTES == 0 for ref in refs)
    assert [bytes(part) for part in await place.read(refs)] == [blobs[0], blobs[2]]
    place.close()


def test_a_file_is_free_when_its_last_episode_is():
    large = Large(Keys("job"))
    refs = {b"g.0": [["f", FILE_BYTES, 0]], b"g.1": [["f", FILE_BYTES, FILE_BYTES]]}
    large.load({name: msgspec.msgpack.encode(ref[0]) for name, ref in refs.items()}, 1)
    meta = LedgerMeta(ledger_id="l", dataset_hash="d")
    assert large.prepare(WriteSet(meta, freed={"g": (0,)}), []).files_freed == []
    assert large.prepare(WriteSet(meta, freed={"g": (1,)}), []).files_freed == ["f"]
