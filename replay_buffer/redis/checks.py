"""Whether a Redis server may hold a ledger: its version and role, whether it serves the job's keys, what it
does when full, how it persists. All is checked at start, and each error names the setting to change."""

from __future__ import annotations

from typing import Any, Protocol

import hiredis

from replay_buffer.errors import StoreUnavailable, StoreUnusable, refusal
from replay_buffer.redis.address import RedisServer
from replay_buffer.redis.connection import RedisConnection
from replay_buffer.redis.keys import Keys

OLDEST = (6, 0)


class RedisReader(Protocol):
    """The part of a `RedisConnection` that the checks need."""

    async def info(self) -> dict[str, str]: ...

    async def ask(self, *command: str) -> Any: ...


async def check_redis(
    redis: RedisReader, place: RedisServer, durability: str, *, max_bytes: int = 0, follows: bool = False
) -> None:
    """Raise `StoreUnusable` naming the setting to change; `StoreUnavailable` for what passes by itself.

    `max_bytes`: what the job may hold. `follows`: the place came from Sentinels, which may be about to name
    another."""
    info = await redis.info()
    _check_server(info, place, max_bytes)
    _check_role(info, place, follows)
    if durability != "memory":
        await _check_persistence(redis, info, place, durability)


def _check_server(info: dict[str, str], place: RedisServer, max_bytes: int) -> None:
    version = info["redis_version"]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise StoreUnusable(
            f"Redis at {place} is version {version}; at least {OLDEST[0]}.{OLDEST[1]} is needed"
        )
    policy = info["maxmemory_policy"]
    if policy != "noeviction":
        raise StoreUnusable(
            f"Redis at {place} would drop keys when full: its maxmemory-policy is {policy}. Set it to "
            "noeviction."
        )
    limit = int(info.get("maxmemory", 0))
    if limit and limit < max_bytes:
        raise StoreUnusable(
            f"Redis at {place} has maxmemory {limit}, less than the {max_bytes} bytes of episodes that the "
            "job may hold. Raise maxmemory there to about 1.3 times that, or lower buffer.max_bytes."
        )


def _check_role(info: dict[str, str], place: RedisServer, follows: bool) -> None:
    if info.get("role", "master") == "master":
        return
    master = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
    if follows:
        raise StoreUnavailable(f"Redis at {place} is not the master yet; it follows {master}", "replica")
    raise StoreUnusable(
        f"Redis at {place} is a replica of {master}, and takes no writes. Set buffer.redis to the master, or "
        "to sentinel://HOST:PORT/SERVICE to follow it."
    )


async def _check_persistence(
    redis: RedisReader, info: dict[str, str], place: RedisServer, durability: str
) -> None:
    if not int(info["aof_enabled"]):
        raise StoreUnusable(
            f"Redis at {place} keeps no append-only file, which buffer.durability {durability} needs. Set "
            "appendonly to yes there, or buffer.durability to memory."
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        raise refusal(f"MISCONF the last write of the append-only file of {place} failed")
    fsync = await _setting(redis, "appendfsync")
    if fsync is None:
        raise StoreUnusable(
            f"Redis at {place} does not tell its appendfsync, so that it fits buffer.durability {durability} "
            "is not known. Allow the user +config|get, or set buffer.durability to memory."
        )
    if fsync == "no" or (durability == "always" and fsync != "always"):
        raise StoreUnusable(
            f"Redis at {place} has appendfsync {fsync}, but buffer.durability is {durability}. Make them "
            "agree."
        )
    if await _setting(redis, "no-appendfsync-on-rewrite") == "yes":
        raise StoreUnusable(
            f"Redis at {place} does not flush its file while it rewrites it. Set no-appendfsync-on-rewrite "
            "to no there, or buffer.durability to memory."
        )


async def _setting(redis: RedisReader, name: str) -> str | None:
    """A configuration value, or None where this server does not tell."""
    try:
        answer: list[bytes] = await redis.ask("CONFIG", "GET", name)
    except StoreUnavailable as error:
        if error.trouble == "gone":
            raise
        return None
    return answer[1].decode() if answer else None


async def check_keys(redis: RedisConnection, place: RedisServer, keys: Keys) -> None:
    """Raise `StoreUnusable` where this server, or this user of it, cannot have the keys of the job."""
    answer = await redis.call("HEXISTS", keys.meta, "front")
    if not isinstance(answer, hiredis.ReplyError):
        return
    text = str(answer)
    if text.startswith("NOPERM"):
        raise StoreUnusable(
            f"the user {place.user!r} of Redis at {place} lacks rights to {keys.prefix}*: {text} "
            "(docs/redis.md)"
        )
    if not text.startswith(("MOVED", "ASK")):
        raise refusal(text)
    words = text.split()
    where = f"slot {words[1]} is served by {words[2]}" if words[0] == "MOVED" and len(words) > 2 else text
    raise StoreUnusable(
        f"Redis at {place} is a cluster node that does not serve the keys {keys.prefix}*: {where}. Set "
        "buffer.redis to that node: a job lives on one shard"
    )
