"""A Redis without room, on disk or in memory: writes wait and say why, nothing acknowledged is lost, and when
room returns everything goes on."""

from __future__ import annotations

import resource
import signal

import pytest

from areal_async.base.errors import FaultError
from replay_buffer.redis.embedded import EmbeddedRedis
from replay_buffer.redis.store import Store
from replay_buffer.redis.writer import LedgerClock
from tests.unit.buffer.conftest import judge
from tests.waiting import until

EPISODE_BYTES = 32 << 10


def small_files():
    """No file of this process grows beyond a megabyte; writing more is an error, not a signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


async def put_until_refused(life):
    """Generate until the buffer refuses a message. Returns the acknowledged places, a group that is still
    leased, and with what words it was refused."""
    acknowledged = []
    (later,) = (await life.lease(1)).groups
    try:
        for _ in range(200):
            (group,) = (await life.lease(1)).groups
            ack = await life.put(group, EPISODE_BYTES)
            assert ack.durability == life.durability
            acknowledged += [(group.group_id, sample) for sample in ack.stored]
    except FaultError as fault:
        return acknowledged, later, str(fault)
    raise AssertionError("it took everything")


def set_limit(server, more_bytes):
    """Let the server use so much more memory than it does now."""
    server.admin.config_set("maxmemory", server.admin.info()["used_memory"] + more_bytes)


async def held(life, places):
    blobs = await life.front.blobs(places)
    return [blob is not None and len(blob) == EPISODE_BYTES for blob in blobs]


async def test_a_full_disk_loses_nothing_and_work_goes_on_when_room_returns(binary, servers, a_life):
    server = servers(binary, "disk", auto_aof_rewrite_percentage="0").start(small_files)
    async with a_life(server.url, batch_groups=100) as life:
        acknowledged, later, words = await put_until_refused(life)
        assert "MISCONF" in words
        assert "free room" in words
        assert len(acknowledged) > 10
        with pytest.raises(FaultError, match=r"waits for Redis: .*free room there"):
            await life.lease()
        assert life.front.trouble == "disk"
        resource.prlimit(
            server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        await until(lambda: life.front.index is not None)
        assert life.front.trouble is None
        assert life.front.lost_writes == 0
        assert all(await held(life, acknowledged))
        ack = await life.put(later, EPISODE_BYTES)  # its lease has outlived the outage
        assert ack.stored == [0, 1]
        acknowledged += [(later.group_id, sample) for sample in ack.stored]
        # While a sync is under way, `everysec` keeps what it has answered in memory for up to 2 s.
        await until(lambda: server.admin.info("persistence")["aof_buffer_length"] == 0)
        server.kill()
        server.start()
        with pytest.raises(FaultError):
            await judge(life.front)
        await until(lambda: life.front.index is not None)
        assert life.front.lost_writes == 0
        assert all(await held(life, acknowledged))


async def test_the_tier_always_survives_a_full_disk_although_redis_does_not(small_disk, folder, a_life):
    """With appendfsync always a Redis that cannot write ends itself; with room it is started again."""
    server = EmbeddedRedis(small_disk / "data", folder / "redis", "always")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    await server.start()
    try:
        async with a_life(server.url, durability="always", revive=server.start, batch_groups=100) as life:
            acknowledged, later, _ = await put_until_refused(life)
            assert len(acknowledged) > 10
            await until(lambda: life.front.trouble == "disk")
            with pytest.raises(FaultError, match=r"the disk of .* is full .*: free room there"):
                await life.lease()
            ballast.unlink()
            await until(lambda: life.front.index is not None)
            assert life.front.lost_writes == 0
            assert all(await held(life, acknowledged))
            assert (await life.put(later, EPISODE_BYTES)).stored == [0, 1]
    finally:
        await server.stop()


async def test_a_full_memory_stops_episodes_alone_and_is_left_by_training(binary, servers, a_life):
    """At maxmemory no episode comes in and no task goes out, but what frees memory goes on."""
    server = servers(binary, "memory", appendonly="no").start()
    async with a_life(server.url, durability="memory", batch_groups=2, max_staleness=40) as life:
        set_limit(server, 1 << 20)
        acknowledged, later, words = await put_until_refused(life)
        assert "maxmemory" in words
        set_limit(server, -200_000)  # not even a heartbeat would fit
        await until(lambda: life.front.index is not None)
        assert life.front.trouble == "memory"
        leases = await life.lease()
        assert leases.groups == []
        assert "Redis is at its maxmemory" in leases.reason
        with pytest.raises(FaultError, match="Redis is at its maxmemory"):
            await life.put(later, EPISODE_BYTES)
        assert life.front.lost_writes == 0
        assert all(await held(life, acknowledged))
        await judge(life.front)
        for _ in range(4):
            await life.train_what_is_there()
        await until(lambda: life.front.trouble is None)
        assert (await life.put(later, EPISODE_BYTES)).stored == [0, 1]
        assert (await life.lease(1)).groups
        kept = [place for place in acknowledged if place[0] in life.front.index.groups]
        assert all(await held(life, kept))
        assert life.front.index.consumer("policy").v_train == 4


async def test_a_front_that_starts_at_the_memory_limit_takes_the_job_over(binary, servers, a_life, job_name):
    server = servers(binary, "memory", appendonly="no").start()
    async with a_life(server.url, durability="memory", batch_groups=100) as life:
        set_limit(server, 1 << 20)
        acknowledged, _, _ = await put_until_refused(life)
    set_limit(server, -200_000)
    store = Store(server.url, job_name, "cafe0123", "memory", LedgerClock())
    opened = await store.open(lambda error: None)
    assert opened.front_epoch == 2
    assert len(await store.blobs(acknowledged)) == len(acknowledged)
    await store.close()
