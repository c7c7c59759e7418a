"""The buffer service on a Redis of one's own, as a job file describes it."""

from __future__ import annotations

import asyncio

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from areal_async.launch.preflight import find_redis_server
from areal_async.rpc.messages import Lease, OpenTrainer, Stats
from areal_async.rpc.schema import VersionTag
from areal_async.runtime.context import ServiceContext
from replay_buffer.redis.address import StoreUnusable
from tests.redis_client import documented_rights
from tests.unit.buffer.conftest import serving, sums_job


async def test_the_service_logs_in_as_the_job_file_says_and_acknowledges_its_tier(
    servers, tmp_path, job_name, monkeypatch
):
    monkeypatch.setenv("REDIS_PASSWORD", "pass")
    server = servers(find_redis_server(), "own", appendfsync="always").start()
    server.admin.execute_command("ACL", "SETUSER", "front", "on", ">pass", *documented_rights(job_name))
    redis = {"redis": f"unix://front@{server.socket}", "redis_login": {"password_env": "REDIS_PASSWORD"}}
    job = sums_job(tmp_path, job_name, **redis)
    ctx = ServiceContext.for_test(job, tmp_path, "buffer", "buffer")
    async with serving(ctx) as client:
        epoch = (await client.call(OpenTrainer("policy", "trainer", 0))).epoch
        assert (await client.call(Lease("w", 1, [VersionTag("policy", epoch, 0)]))).groups
        async with asyncio.timeout(60):
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
