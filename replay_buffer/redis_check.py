"""Whether a Redis server may hold a ledger: its version, what it does when full, how it persists."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from replay_buffer.errors import StoreUnusable

OLDEST = (6, 0)


async def check_redis(redis: Redis, url: str, durability: str) -> None:
    """Raise `StoreUnusable` naming the setting to change; `RedisError` or OSError when nobody answers."""
    info = await redis.info()
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise StoreUnusable(
            f"Redis at {url} is version {version}; at least {OLDEST[0]}.{OLDEST[1]} is needed"
        )
    policy = info["maxmemory_policy"]
    if policy != "noeviction":
        raise StoreUnusable(
            f"Redis at {url} would drop keys when full: its maxmemory-policy is {policy}. Set it to "
            "noeviction."
        )
    if durability == "memory":
        return
    if not int(info["aof_enabled"]):
        raise StoreUnusable(
            f"Redis at {url} keeps no append-only file, which buffer.durability {durability} needs. Set "
            "appendonly to yes there, or buffer.durability to memory."
        )
    fsync = await _setting(redis, "appendfsync")
    if fsync == "no" or (durability == "always" and fsync not in (None, "always")):
        raise StoreUnusable(
            f"Redis at {url} has appendfsync {fsync}, but buffer.durability is {durability}. Make them agree."
        )


async def _setting(redis: Redis, name: str) -> str | None:
    """A configuration value, or None where this user may not ask for it."""
    try:
        answer = await redis.config_get(name)
    except ResponseError:
        return None
    value = answer.get(name)
    return str(value.decode() if isinstance(value, bytes) else value) if value is not None else None
