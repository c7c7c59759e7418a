"""One job lives on one shard: its keys share a slot, and a node that does not serve it says who does."""

from __future__ import annotations

import pytest
from redis.crc import key_slot

from areal_async.launch.preflight import find_redis_server
from replay_buffer.redis.address import StoreUnavailable, StoreUnusable
from tests.waiting import wait_for

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
