"""The least that each role needs in Redis is enough, and what is missing is named at start."""

from __future__ import annotations

import asyncio

import pytest
import redis as redis_sync

from replay_buffer.errors import StoreUnusable
from replay_buffer.redis.rights import FRONT, acl_rules


@pytest.fixture
def users(binary, servers, job_name):
    """A server, and `users(name, rules)` which makes a user of it and returns its URL."""
    server = servers(binary, "acl").start()

    def make(name, rules):
        server.admin.execute_command("ACL", "SETUSER", name, "reset", "on", ">pass", *rules.split())
        return f"unix://{name}:pass@{server.socket}"

    make.server = server
    return make


async def test_the_rights_of_the_front_are_enough_for_a_whole_life(users, a_life, job_name):
    async with a_life(users("front", acl_rules(job_name, "front"))) as life:
        await life.train()
        await life.store.used_bytes()
    async with a_life(users("front", acl_rules(job_name, "front")), step=1) as life:
        assert life.front.front_epoch == 2
    # Not one refusal, not even of something that does not matter.
    assert users.server.admin.execute_command("ACL", "LOG") == []


def test_each_right_that_is_missing_is_named_at_start(users, a_life, job_name):
    async def start(rules):
        async with a_life(users("front", rules)):
            pass

    for right in FRONT:
        if right == "select":  # only asked for with a database in the URL
            continue
        rules = acl_rules(job_name, "front").replace(f" +{right}", "", 1)
        whole = f" {rules} "
        assert f" +{right} " not in whole
        with pytest.raises(StoreUnusable, match="lacks rights") as caught:
            asyncio.run(start(rules))
        command = str(caught.value).partition("ACL SETUSER front ")[2].split()
        assert command == [f"+{right}"]
    two = acl_rules(job_name, "front").replace(" +evalsha", "").replace(" +unlink", "")
    with pytest.raises(StoreUnusable, match=r"ACL SETUSER front \+evalsha \+unlink"):
        asyncio.run(start(two))


def test_missing_keys_are_named_at_start(users, a_life, job_name):
    async def start(rules):
        async with a_life(users("front", rules)):
            pass

    with pytest.raises(StoreUnusable, match=r"ACL SETUSER front ~areal:\{job-a\}:\*") as caught:
        asyncio.run(start(acl_rules("another-job", "front")))
    assert "cannot use areal:{job-a}:" in str(caught.value)


def test_the_front_of_one_job_cannot_touch_another_jobs_keys(users, a_life, job_name):
    url = users("front", acl_rules(job_name, "front"))
    path, _, _ = url.partition("?")
    client = redis_sync.Redis(
        unix_socket_path=path.partition("@")[2], username="front", password="pass", protocol=2
    )
    client.hset("areal:{job-a}:e:x", "0", "mine")
    for forbidden in (("HSET", "areal:{job-b}:meta", "a", "b"), ("FLUSHALL",), ("KEYS", "*"), ("GET", "x")):
        with pytest.raises(redis_sync.exceptions.NoPermissionError):
            client.execute_command(*forbidden)


async def test_a_reader_can_read_and_nothing_else(users, a_life, job_name):
    version = int(users.server.admin.info()["redis_version"].split(".")[0])
    rules = acl_rules(job_name, "reader", read_only_keys=version >= 7)
    async with a_life(f"unix://{users.server.socket}") as life:
        for group in (await life.lease()).groups:
            await life.put(group)
    users("reader", rules)
    client = redis_sync.Redis(
        unix_socket_path=str(users.server.socket), username="reader", password="pass", protocol=2
    )
    groups = client.hgetall("areal:{job-a}:groups")
    assert len(groups) == 2
    assert client.hlen(f"areal:{{job-a}}:e:{next(iter(groups)).decode()}") == 2
    for forbidden in (("HSET", "areal:{job-a}:meta", "a", "b"), ("UNLINK", "areal:{job-a}:meta")):
        with pytest.raises(redis_sync.exceptions.NoPermissionError):
            client.execute_command(*forbidden)
