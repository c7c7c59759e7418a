"""The Redis client of tests, which look past the product at what is in a Redis."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def connect(url: str) -> Redis:
    """A client of the server at `url`; it repeats nothing by itself."""
    return Redis.from_url(url, socket_timeout=20, retry=Retry(NoBackoff(), 0), protocol=2)
