"""Many commands under way on one connection to a real Redis."""

from __future__ import annotations

import asyncio

import hiredis
import pytest

from replay_buffer.redis.address import RedisAddress, StoreUnavailable, StoreUnusable
from replay_buffer.redis.connection import RedisConnection, greetings
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


async def test_a_redis_that_does_not_answer_is_given_up(redis_url):
    pipe = await RedisConnection.open(redis_url, answer_limit_s=0.05)
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
