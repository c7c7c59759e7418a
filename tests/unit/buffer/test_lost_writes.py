"""Redis comes back without writes that it had confirmed: noticed, counted, and nothing waits for it."""

from __future__ import annotations

import asyncio
import time

from areal_async.wire.messages import Claim, Lease, VersionTag
from replay_buffer.clock import RedisClock
from replay_buffer.confirmed import ConfirmedRevision
from replay_buffer.front import Front
from replay_buffer.keys import Keys
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState
from replay_buffer.ledger.rules import Rules
from replay_buffer.ledger.storing import Arrival, StoreEpisodes
from replay_buffer.store import Store, connect

RULES = Rules(group_size=2, batch_groups=2, max_staleness=1)


def test_the_mark_outlives_its_process(tmp_path):
    mark = ConfirmedRevision(tmp_path / "buffer" / "confirmed")
    assert mark.read() == 0
    mark.write(1 << 40)
    assert ConfirmedRevision(tmp_path / "buffer" / "confirmed").read() == 1 << 40


def test_a_new_front_notices_what_redis_has_lost_and_ends_the_claims(redis_url, job_name, counted_tasks):
    async def run():
        confirmed = []
        clock = RedisClock(time.monotonic)
        first = Front(
            Store(redis_url, job_name, "cafe0123", "everysec", clock),
            RULES,
            counted_tasks(),
            clock,
            on_confirmed=confirmed.append,
        )
        await first.start()
        await first.execute(OpenedWith("t", 0))
        (group,) = (await first.execute(Lease("w", 1, VersionTag(1, 0)))).reply.groups
        arrivals = tuple(Arrival(i, 1, 8, 4, 0, 0, 1) for i in range(2))
        await first.execute(StoreEpisodes(group.lease_id, group.group_id, arrivals), (b"a", b"b"))
        assert (await first.execute(Claim("s", 10))).reply.items
        assert confirmed == sorted(confirmed)
        assert confirmed[-1] == first.index.revision
        await first.stop()
        # The claim is still in Redis, as it is when the verdicts for it are among what was lost.
        second = Front(
            Store(redis_url, job_name, "cafe0123", "everysec", clock, confirmed=confirmed[-1] + 3),
            RULES,
            counted_tasks(),
            clock,
        )
        await second.start()
        try:
            assert second.lost_writes == 3
            assert not second.index.claims
            states = [episode.state for episode in second.index.groups[group.group_id].episodes]
            assert states == [EpisodeState.STORED] * 2
        finally:
            await second.stop()

    asyncio.run(run())


def test_a_front_is_not_fenced_by_an_attempt_of_its_own_to_come_back(redis_url, job_name):
    """The attempt got through, and its answer was lost."""

    async def run():
        store = Store(redis_url, job_name, "cafe0123", "everysec", RedisClock(time.monotonic))
        opened = await store.open(lambda error: None)
        redis = connect(redis_url)
        await redis.hincrby(Keys(job_name).meta, "front", 1)
        again = await store.open(lambda error: None)
        assert again.front_epoch == opened.front_epoch + 2
        await store.close()
        await redis.aclose()

    asyncio.run(run())
