"""nothing_is_unbounded: with nobody who scores or trains, generation is told to wait and memory stays flat;
once they are there nothing was lost. The real service on a real Redis."""

from __future__ import annotations

import psutil
import pytest

from areal_async.base.verdicts import Score
from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    Lease,
    NextBatch,
    OpenTrainer,
    PutVerdicts,
    Stats,
)
from tests.callers import put
from tests.redis_client import connect
from tests.unit.buffer.conftest import serving

ATTEMPTS = 400
FLAT_BYTES = 4 << 20
"""Far less than the attempts would add if they stayed anywhere."""


async def memory_stays_flat(client, tag, stray, redis_url):
    """Ask for many more leases, and put what nobody has a lease for."""
    redis = connect(redis_url)

    async def attempt(count):
        for _ in range(count):
            assert not (await client.call(Lease("w2", 100, [tag]))).groups
            assert (await put(client, "no-such-lease", "cafe:1:0#0", {0: stray})).stored == []
        return (await redis.info("memory"))["used_memory"], psutil.Process().memory_info().rss

    assert len(stray) * ATTEMPTS > 2 * FLAT_BYTES
    before = await attempt(50)  # caches and pools have their size from here on
    after = await attempt(ATTEMPTS)
    assert all(now - then < FLAT_BYTES for then, now in zip(before, after, strict=True))
    await redis.aclose()


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        ({}, "8 groups are outstanding and at most 8 may be"),
        ({"max_staleness": 500, "pacing": "full", "max_bytes": 1 << 20}, "buffer.max_bytes (1048576)"),
    ],
    ids=["staleness", "bytes"],
)
async def test_nothing_is_unbounded_while_the_consumers_are_gone(
    context, blob, job_name, redis_url, buffer, words
):
    settings = {"batch_groups": 4, "durability": "memory"} | buffer
    async with serving(context(rows=50, **settings)) as client:
        epoch = (await client.call(OpenTrainer("policy", "trainer", 0))).epoch
        tag, acknowledged = VersionTag("policy", epoch, 0), set()
        while (leases := await client.call(Lease("w0", 2, [tag]))).groups:
            for group in leases.groups:
                episodes = {n: blob(job_name, group.group_id, n, epoch=epoch, n=2000) for n in group.missing}
                ack = await put(client, group.lease_id, group.group_id, episodes)
                acknowledged |= {f"{group.group_id}.{sample}" for sample in ack.stored}
        assert words in leases.reason
        stats = await client.call(Stats())
        assert stats.payload_bytes < 1.1 * (1 << 20)  # a group under way is always taken
        stray = blob(job_name, "cafe:1:0#0", 0, n=2000)
        await memory_stays_flat(client, tag, stray, redis_url)
        assert (await client.call(Stats())).payload_bytes == stats.payload_bytes
        claims, _ = await client.exchange(Claim("reward-0", 10_000))
        verdicts = [EpisodeVerdict(i.episode_id, i.claim_id, Score(0.5)) for i in claims.items]
        await client.call(PutVerdicts("reward-0", verdicts))
        trained = []
        for step in range(len(acknowledged) // 8):
            batch = await client.call(NextBatch("policy", epoch, step))
            assert isinstance(batch, Batch)
            trained += [e.episode_id for group in batch.groups for e in group.episodes]
            await client.call(Commit("policy", epoch, step))
            await client.call(Checkpointed("policy", epoch, step + 1))
        assert len(trained) == len(set(trained)) > len(acknowledged) - 8
        assert set(trained) <= acknowledged
        assert (await client.call(Lease("w0", 2, [VersionTag("policy", epoch, step + 1)]))).groups
