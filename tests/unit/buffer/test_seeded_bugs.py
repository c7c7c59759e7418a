"""A sample of bugs put in on purpose, each of which breaks one promise of the buffer: the ledger's machine
(`ledger_machine.py`) must find it. `tests/mutants` has all of them and runs the tests that must fail."""

from __future__ import annotations

import asyncio

from areal_async.base.errors import FaultError
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.redis.writer import Keys
from tests.redis_client import connect
from tests.unit.buffer.conftest import front_of, lease, store
from tests.waiting import LIMIT_S

N = 2


async def test_nothing_is_acknowledged_that_a_lost_write_takes_away(redis_url, job_name):
    """A worker puts a group, until it is acknowledged, into a Redis that refuses the first write."""
    redis = connect(redis_url)
    async with front_of(redis_url, job_name) as buffer:
        await buffer.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(buffer)
        # From here on Redis knows another revision than the front, so its next write is not taken.
        await redis.hincrby(Keys(job_name).meta, "revision", 7)
        acknowledged: set[int] = set()
        async with asyncio.timeout(LIMIT_S):
            while not acknowledged:
                try:
                    acknowledged = set((await store(buffer, group, (b"byte",) * N)).stored)
                except FaultError:
                    await asyncio.sleep(0.01)
    held = {int(sample) for sample in await redis.hkeys(Keys(job_name).blobs(group.group_id))}
    await redis.aclose()
    assert acknowledged == held == set(range(N))
