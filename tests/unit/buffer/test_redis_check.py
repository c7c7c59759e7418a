"""A Redis that could lose the ledger is refused, with the setting to change."""

from __future__ import annotations

import pytest

from replay_buffer.redis.address import RedisAddress, StoreUnavailable, StoreUnusable, refusal
from replay_buffer.redis.store import check_redis

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
