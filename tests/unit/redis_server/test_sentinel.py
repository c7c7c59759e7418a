"""A Redis that fails over: the front finds the new master, counts what was lost with the old one, goes on."""

from __future__ import annotations

import asyncio

import pytest

from areal_async.errors import FaultError
from areal_async.launch.preflight import find_redis_server
from replay_buffer.redis.address import RedisAddress, StoreUnavailable, StoreUnusable

SENTINEL = """\
port {port}
bind 127.0.0.1
unixsocket {socket}
dir {folder}
sentinel monitor ours 127.0.0.1 {master} 1
sentinel down-after-milliseconds ours 300
sentinel failover-timeout ours 2000
sentinel parallel-syncs ours 1
"""


@pytest.fixture
def trio(servers, wait):
    """A master, its replica and a Sentinel of both."""
    binary = find_redis_server()
    master = servers(binary, "m", repl_diskless_sync_delay="0").start()
    replica = servers(binary, "r").start()
    replica.admin.replicaof("127.0.0.1", master.port)
    wait.until(lambda: replica.admin.info()["master_link_status"] == "up", what="the replica")
    sentinel = servers(binary, "s")
    config = sentinel.folder / "sentinel.conf"
    config.write_text(
        SENTINEL.format(
            port=sentinel.port, socket=sentinel.socket, folder=sentinel.folder, master=master.port
        )
    )
    sentinel.arguments = (str(config), "--sentinel")
    sentinel.start_alone()

    def knows_the_replica():
        known = sentinel.admin.sentinel_slaves("ours")
        return known and known[0]["master-link-status"] == "ok" and known[0]["info-refresh"] < 1_000_000

    wait.until(knows_the_replica, 20, "the Sentinel's discovery of the replica")
    return master, replica, sentinel


async def test_a_failover_is_followed_and_what_it_lost_is_counted(trio, a_life, wait):
    master, replica, sentinel = trio
    address = RedisAddress.parse(f"sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/ours")
    async with a_life(address) as life:
        await life.train()
        front = life.front
        # From here on the replica hears nothing: what the master acknowledges dies with it.
        offset = master.admin.info("replication")["master_repl_offset"]
        await wait.happens(
            lambda: replica.admin.info("replication")["slave_repl_offset"] >= offset,
            what="replication",
        )
        replica.admin.replicaof("127.0.0.1", 1)
        lost = (await life.lease()).groups
        await life.put(lost[0])
        confirmed = front.index.revision
        master.kill()
        await wait.happens(lambda: replica.admin.info("replication")["role"] == "master", 20, "the failover")
        # Whoever asks is told to ask again until the front has the new master.
        for _ in range(2):
            with pytest.raises(FaultError, match="Redis"):
                await life.lease()
        await wait.happens(lambda: front.index is not None, 20, "the recovery")
        assert front.lost_writes > 0
        assert front.index.revision < confirmed + 3
        assert lost[0].group_id not in front.index.groups
        await life.train()  # the same tasks again, from the cursor of the ledger that survived
        assert front.index.consumer("policy").v_train == 2


async def test_a_front_leaves_a_master_that_the_sentinels_have_replaced(trio, a_life, wait):
    """An old master that is cut off from its Sentinels, but not from the front, still takes writes."""
    _, replica, sentinel = trio
    address = RedisAddress.parse(f"sentinel://127.0.0.1:{sentinel.port}/ours")
    async with a_life(address) as life:
        await life.train()
        old = life.store._place
        sentinel.admin.execute_command("SENTINEL", "FAILOVER", "ours")
        await wait.happens(lambda: replica.admin.info("replication")["role"] == "master", 20, "the failover")

        async def followed():
            while life.store._place == old:
                await life.store.follow()
                await asyncio.sleep(0.05)

        await asyncio.wait_for(followed(), 60)
        await wait.happens(lambda: life.front.index is not None, 20, "the recovery")
        await life.train()


def test_a_service_that_no_sentinel_knows_is_named(trio, a_life):
    sentinel = trio[2]

    async def start(url):
        async with a_life(RedisAddress.parse(url)):
            pass

    with pytest.raises(StoreUnusable, match=r"no Sentinel of .* watches a service 'theirs'"):
        asyncio.run(start(f"sentinel://127.0.0.1:{sentinel.port}/theirs"))
    with pytest.raises(StoreUnavailable, match=r"no Sentinel of .* says where the master is"):
        asyncio.run(start("sentinel://127.0.0.1:1/ours"))


def test_a_replica_is_refused_with_its_master_named(servers, a_life):
    binary = find_redis_server()
    master = servers(binary, "m").start()
    replica = servers(binary, "r").start()
    replica.admin.replicaof("127.0.0.1", master.port)

    async def start():
        async with a_life(replica.url):
            pass

    with pytest.raises(StoreUnusable, match=f"is a replica of 127.0.0.1:{master.port}"):
        asyncio.run(start())
