"""Which server is the master now, as the Sentinels say."""

from __future__ import annotations

import asyncio

import hiredis

from replay_buffer.address import Place, RedisAddress
from replay_buffer.errors import StoreUnavailable, StoreUnusable
from replay_buffer.pipe import RedisPipe

SENTINEL_LIMIT_S = 2.0
"""A Sentinel that takes longer is passed over."""


async def find_place(address: RedisAddress) -> Place:
    """The server to connect to: the address's own, or the master that its Sentinels agreed on last.

    Raises `StoreUnavailable` when no Sentinel answers, `StoreUnusable` when none knows the service."""
    if not address.has_sentinels:
        return address.place()
    sentinels = address.sentinels()
    answers = await asyncio.gather(*(_ask(sentinel, address.url.service) for sentinel in sentinels))
    masters = [answer for answer in answers if isinstance(answer, tuple)]
    if not masters:
        reasons = "; ".join(
            f"{sentinel}: {answer}" for sentinel, answer in zip(sentinels, answers, strict=True)
        )
        if any("No such master" in str(answer) for answer in answers):
            raise StoreUnusable(
                f"no Sentinel of {address} watches a service {address.url.service!r}: correct the name in "
                f"buffer.redis ({reasons})"
            )
        raise StoreUnavailable(f"no Sentinel of {address} says where the master is ({reasons})", "gone")
    # One that was cut off still names the master of before: the latest election counts.
    _, host, port = max(masters)
    return address.place((host, port))


async def _ask(sentinel: Place, service: str) -> tuple[int, str, int] | str:
    """(epoch of its configuration, host, port) of the master that one Sentinel knows, or why not."""
    try:
        async with asyncio.timeout(SENTINEL_LIMIT_S):
            pipe = await RedisPipe.open(sentinel)
            try:
                answer = await pipe.call("SENTINEL", "MASTER", service)
            finally:
                pipe.close()
    except (StoreUnavailable, StoreUnusable) as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {SENTINEL_LIMIT_S:g} s"
    if isinstance(answer, hiredis.ReplyError):
        return str(answer)
    facts = dict(zip(answer[::2], answer[1::2], strict=True))
    return int(facts[b"config-epoch"]), facts[b"ip"].decode(), int(facts[b"port"])
