"""The buffer service on a Redis of one's own, as a job file describes it, and on a cluster."""

from __future__ import annotations

import asyncio

import pytest
from redis import Redis
from redis.crc import key_slot
from redis.exceptions import NoPermissionError

from areal_async.base.redis_binary import find_redis_server
from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import Lease, OpenTrainer, Stats
from replay_buffer.redis.address import StoreUnavailable, StoreUnusable
from tests.contexts import context_for_test
from tests.redis_client import documented_rights
from tests.unit.buffer.conftest import serving, sums_job
from tests.waiting import LIMIT_S, wait_for


async def test_the_service_logs_in_as_the_job_file_says_and_acknowledges_its_tier(
    servers, tmp_path, job_name, monkeypatch
):
    monkeypatch.setenv("REDIS_PASSWORD", "pass")
    server = servers(find_redis_server(), "own", appendfsync="always").start()
    server.admin.execute_command("ACL", "SETUSER", "front", "on", ">pass", *documented_rights(job_name))
    redis = {"redis": f"unix://front@{server.socket}", "redis_login": {"password_env": "REDIS_PASSWORD"}}
    job = sums_job(tmp_path, job_name, **redis)
    ctx = context_for_test(job, tmp_path, "buffer", "buffer")
    async with serving(ctx) as client:
        epoch = (await client.call(OpenTrainer("policy", "trainer", 0))).epoch
        assert (await client.call(Lease("w", 1, [VersionTag("policy", epoch, 0)]))).groups
        async with asyncio.timeout(LIMIT_S):
            while not (await client.call(Stats())).redis_bytes:
                pass
    assert server.admin.execute_command("ACL", "LOG") == [], "not one refusal"


@pytest.mark.parametrize(
    ("appendfsync", "durability"), [("always", "everysec"), ("always", "always"), ("everysec", "always")]
)
async def test_the_tier_in_an_acknowledgement_is_the_truth(servers, a_life, appendfsync, durability):
    """A Redis that does more than the tier says is taken; one that does less is not."""
    server = servers(find_redis_server(), "own", appendfsync=appendfsync).start()
    if (appendfsync, durability) == ("everysec", "always"):
        with pytest.raises(StoreUnusable, match=r"appendfsync everysec, but buffer.durability is always"):
            async with a_life(server.url, durability=durability):
                pass
        return
    async with a_life(server.url, durability=durability) as life:
        (group,) = (await life.lease(1)).groups
        assert (await life.put(group)).durability == durability
        synced = server.admin.info("persistence")
        assert (synced["aof_enabled"], synced["aof_last_write_status"]) == (1, "ok")


async def test_the_documented_rights_are_enough_for_a_whole_life_and_for_no_other_job(
    servers, a_life, job_name
):
    server = servers(find_redis_server(), "own").start()
    rules = documented_rights(job_name)
    server.admin.execute_command("ACL", "SETUSER", "front", "on", ">pass", *rules)
    async with a_life(f"unix://front:pass@{server.socket}") as life:
        await life.train()
    assert server.admin.execute_command("ACL", "LOG") == [], "not one refusal"
    client = Redis(unix_socket_path=str(server.socket), username="front", password="pass", protocol=2)
    for forbidden in (("HSET", "areal:{job-b}:meta", "a", "b"), ("FLUSHALL",), ("KEYS", "*"), ("GET", "x")):
        with pytest.raises(NoPermissionError):
            client.execute_command(*forbidden)


async def test_a_user_who_may_not_touch_the_job_is_refused_at_start(servers, a_life):
    server = servers(find_redis_server(), "own").start()
    server.admin.execute_command("ACL", "SETUSER", "front", "on", ">pass", *documented_rights("another-job"))

    with pytest.raises(StoreUnusable, match=r"the user 'front' .* lacks rights to areal:\{job-a\}:"):
        async with a_life(f"unix://front:pass@{server.socket}"):
            pass


async def test_a_replica_is_refused_with_its_master_named(servers, a_life):
    binary = find_redis_server()
    master, replica = servers(binary, "m").start(), servers(binary, "r").start()
    replica.admin.replicaof("127.0.0.1", master.port)

    with pytest.raises(StoreUnusable, match=f"is a replica of 127.0.0.1:{master.port}"):
        async with a_life(replica.url):
            pass


SLOTS = 16384


@pytest.fixture
def cluster(servers, job_name):
    """The slot of this test's job, and of two nodes the one that serves it and the other."""
    nodes = [
        servers(find_redis_server(), name, cluster_enabled="yes", cluster_node_timeout="5000").start()
        for name in ("a", "b")
    ]
    for number, node in enumerate(nodes):
        half = range(number * SLOTS // 2, (number + 1) * SLOTS // 2)
        node.admin.execute_command("CLUSTER", "ADDSLOTS", *half)
        node.admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    nodes[0].admin.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port)
    for node in nodes:
        wait_for(
            lambda node=node: b"cluster_state:ok" in node.admin.execute_command("CLUSTER", "INFO"),
            "the cluster",
        )
    slot = key_slot(f"areal:{{{job_name}}}:meta".encode())
    return slot, *(nodes if slot < SLOTS // 2 else nodes[::-1])


async def test_a_ledger_lives_on_the_node_that_owns_its_slot_and_all_its_keys_are_there(cluster, a_life):
    slot, owner, other = cluster
    async with a_life(owner.url) as life:
        await life.train()
        for group in (await life.lease()).groups:
            await life.put(group)
    keys = owner.admin.keys("*")
    assert len(keys) >= 4
    assert {key_slot(key) for key in keys} == {slot}
    assert owner.admin.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == len(keys)
    assert other.admin.keys("*") == []


async def test_a_node_that_does_not_serve_the_job_names_the_one_that_does(cluster, a_life):
    slot, owner, other = cluster

    with pytest.raises(StoreUnusable, match=f"slot {slot} is served by 127.0.0.1:{owner.port}"):
        async with a_life(other.url):
            pass


async def test_a_cluster_that_is_not_whole_is_waited_for(servers, a_life):
    node = servers(find_redis_server(), "a", cluster_enabled="yes").start()

    with pytest.raises(StoreUnavailable, match="the cluster is not whole"):
        async with a_life(node.url):
            pass
