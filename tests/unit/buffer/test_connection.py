"""A connection to a real Redis, and which Redis is refused with the setting to change."""

from __future__ import annotations

import asyncio

import hiredis
import pytest

from replay_buffer.redis.address import RedisAddress, StoreUnavailable, StoreUnusable, refusal
from replay_buffer.redis.connection import RedisConnection, greetings
from replay_buffer.redis.store import check_redis
from tests.redis_client import connect


async def test_answers_come_in_the_order_of_the_calls(redis_url, job_name):
    pipe = await RedisConnection.open(redis_url)
    answers = await asyncio.gather(*(pipe.call("INCR", job_name) for _ in range(200)))
    big = b"x" * (3 << 20)
    await pipe.call("SET", job_name, memoryview(big))
    assert await pipe.call("GET", job_name) == big
    await pipe.call("DEL", job_name)
    pipe.close()
    assert answers == list(range(1, 201))


async def test_an_error_is_an_answer_and_the_next_command_has_its_own(redis_url):
    pipe = await RedisConnection.open(redis_url)
    wrong, right = pipe.call("NONSENSE"), pipe.call("PING")
    assert isinstance(await wrong, hiredis.ReplyError)
    assert await right == b"PONG"
    pipe.close()


async def test_a_lost_connection_fails_what_has_no_answer(redis_url):
    pipe = await RedisConnection.open(redis_url)
    number = await pipe.call("CLIENT", "ID")
    redis = connect(redis_url)
    waiting = pipe.call("BLPOP", "never", 0)
    await redis.client_kill_filter(_id=number)
    await redis.aclose()
    with pytest.raises(StoreUnavailable):
        await waiting
    with pytest.raises(StoreUnavailable, match="closed the connection"):
        await pipe.call("PING")


async def test_a_redis_that_does_not_answer_is_given_up(redis_url, monkeypatch):
    monkeypatch.setattr("replay_buffer.redis.connection.ANSWER_LIMIT_S", 0.05)
    pipe = await RedisConnection.open(redis_url)
    answered = pipe.call("PING")
    silent = pipe.call("BLPOP", "never", 0)
    assert await answered == b"PONG"
    with pytest.raises(StoreUnavailable, match="has not answered"):
        await silent


async def test_nobody_there_and_a_refused_login_are_clear_errors(redis_url, tmp_path):
    for url, kind, words in (
        (f"unix://{tmp_path}/nobody", StoreUnavailable, "does not answer"),
        (f"{redis_url}?password=wrong", StoreUnusable, "refuses 'AUTH'"),
        (f"{redis_url}?db=7", StoreUnusable, "refuses 'SELECT'"),
    ):
        with pytest.raises(kind, match=words):
            await RedisConnection.open(url)


def test_the_url_says_how_to_log_in():
    for url, commands in {
        "redis://user:p%40ss@host:1/3": [("AUTH", "user", "p@ss"), ("SELECT", 3)],
        "unix:///tmp/x?password=p": [("AUTH", "p")],
        "redis://host": [],
        "rediss://host/2": [("SELECT", 2), ("PING",)],
    }.items():
        assert greetings(RedisAddress.parse(url)) == commands


THERE = RedisAddress.parse("redis://there")
SYNCED = {"appendfsync": "everysec", "no-appendfsync-on-rewrite": "no"}


class Answers:
    """What a server says of itself; `settings` None: this user may not ask."""

    def __init__(self, settings=None, **info):
        told = {"redis_version": "7.0.15", "maxmemory_policy": "noeviction", "aof_enabled": 1} | info
        self._info = {name: str(value) for name, value in told.items()}
        self._settings = settings

    async def info(self):
        return self._info

    async def ask(self, *command):
        if self._settings is None:
            raise refusal("NOPERM no permission")
        return [command[2].encode(), self._settings[command[2]].encode()]


@pytest.mark.parametrize(
    ("server", "durability", "words"),
    [
        (Answers(redis_version="5.0.7"), "everysec", "at least 6.0"),
        (Answers(maxmemory_policy="allkeys-lru"), "memory", "Set it to noeviction"),
        (Answers(aof_enabled=0), "everysec", "Set appendonly to yes"),
        (Answers({"appendfsync": "no"}), "everysec", "appendfsync no"),
        (Answers(SYNCED), "always", "Make them agree"),
        (Answers(), "everysec", r"Allow the user \+config\|get"),
        (Answers(), "always", r"Allow the user \+config\|get"),
        (Answers(SYNCED | {"no-appendfsync-on-rewrite": "yes"}), "everysec", "Set no-appendfsync-on-rewrite"),
        (Answers(maxmemory=999_999), "memory", "999999, less than the 1000000 bytes .* lower buffer"),
        (Answers(role="slave", master_host="m", master_port=1), "memory", "of m:1, .* Set buffer.redis"),
    ],
)
async def test_what_could_lose_the_ledger_is_refused(server, durability, words):
    with pytest.raises(StoreUnusable, match=words):
        await check_redis(server, THERE, durability, max_bytes=1_000_000)


async def test_what_fits_the_tier_is_taken():
    for server, durability in (
        (Answers(aof_enabled=0, maxmemory=0), "memory"),
        (Answers(SYNCED | {"appendfsync": "always"}), "everysec"),
        (Answers(SYNCED | {"appendfsync": "always"}), "always"),
        (Answers(SYNCED, maxmemory=1_000_000), "everysec"),
    ):
        await check_redis(server, THERE, durability, max_bytes=1_000_000)


async def test_what_passes_by_itself_is_waited_for():
    with pytest.raises(StoreUnavailable, match="free room there"):
        await check_redis(Answers(SYNCED, aof_last_write_status="err"), THERE, "everysec")
