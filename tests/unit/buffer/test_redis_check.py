"""A Redis that could lose the ledger is refused, with the setting to change."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import NoPermissionError

from replay_buffer.errors import StoreUnusable
from replay_buffer.redis_check import check_redis


class Answers:
    """What a server says of itself; `settings` None: this user may not ask."""

    def __init__(self, settings=None, **info):
        self._info = {"redis_version": "7.0.15", "maxmemory_policy": "noeviction", "aof_enabled": 1} | info
        self._settings = settings

    async def info(self):
        return self._info

    async def config_get(self, name):
        if self._settings is None:
            raise NoPermissionError("no permission")
        return {name: self._settings[name]}


@pytest.mark.parametrize(
    ("server", "durability", "words"),
    [
        (Answers(redis_version="5.0.7"), "everysec", "at least 6.0"),
        (Answers(maxmemory_policy="allkeys-lru"), "memory", "Set it to noeviction"),
        (Answers(aof_enabled=0), "everysec", "Set appendonly to yes"),
        (Answers({"appendfsync": b"no"}), "everysec", "appendfsync no"),
        (Answers({"appendfsync": b"everysec"}), "always", "Make them agree"),
    ],
)
def test_what_could_lose_the_ledger_is_refused(server, durability, words):
    with pytest.raises(StoreUnusable, match=words):
        asyncio.run(check_redis(server, "redis://there", durability))


@pytest.mark.parametrize(
    ("server", "durability"),
    [
        (Answers(aof_enabled=0), "memory"),
        (Answers(), "always"),
        (Answers({"appendfsync": "always"}), "everysec"),
        (Answers({"appendfsync": b"everysec"}), "everysec"),
    ],
)
def test_what_fits_the_tier_is_taken(server, durability):
    asyncio.run(check_redis(server, "redis://there", durability))
