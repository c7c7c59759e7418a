"""Redis comes back without writes that it had confirmed: noticed, counted, and nothing waits for it."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager

import pytest

from areal_async.rpc.messages import Claim, Lease
from areal_async.rpc.schema import VersionTag
from replay_buffer.coordinator import Coordinator
from replay_buffer.ledger.leasing import Arrival, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState, Versions
from replay_buffer.ledger.rules import Rules
from replay_buffer.redis import store as store_module
from replay_buffer.redis.address import StoreFenced, StoreUnavailable
from replay_buffer.redis.store import SCHEMA, TAKE_SCRIPT, Store
from replay_buffer.redis.writer import ConfirmedRevision, Keys, RedisClock
from tests.redis_client import connect

RULES = Rules.alone(group_size=2, batch_groups=2, max_staleness=1)


def test_the_mark_outlives_its_process(tmp_path):
    mark = ConfirmedRevision(tmp_path / "buffer" / "confirmed")
    assert mark.read() == 0
    mark.write(1 << 40)
    assert ConfirmedRevision(tmp_path / "buffer" / "confirmed").read() == 1 << 40


async def test_a_new_front_notices_what_redis_has_lost_and_ends_the_claims(
    redis_url, job_name, counted_tasks
):
    confirmed = []
    clock = RedisClock(time.monotonic)
    first = Coordinator(
        Store(redis_url, job_name, "cafe0123", "everysec", clock),
        RULES,
        counted_tasks(),
        clock,
        on_confirmed=confirmed.append,
    )
    await first.start()
    await first.execute(OpenedWith("policy", "t", 0))
    (group,) = (await first.execute(Lease("w", 1, [VersionTag("policy", 1, 0)]))).reply.groups
    arrivals = tuple(Arrival(i, 1, 8, 4, {"policy": Versions(0, 0, 1)}) for i in range(2))
    await first.execute(StoreEpisodes(group.lease_id, group.group_id, arrivals), (b"a", b"b"))
    assert (await first.execute(Claim("s", 10))).reply.items
    assert confirmed == sorted(confirmed)
    assert confirmed[-1] == first.index.revision
    await first.stop()
    # The claim is still in Redis, as it is when the verdicts for it are among what was lost.
    second = Coordinator(
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


@pytest.fixture
def a_store(redis_url, job_name):
    """`a_store(confirmed=…)`: a front's way to the ledger of this test's job."""

    def make(confirmed: int = 0) -> Store:
        clock = RedisClock(time.monotonic)
        return Store(redis_url, job_name, "cafe0123", "everysec", clock, confirmed=confirmed)

    return make


@asynccontextmanager
async def meta_of(redis_url, job_name):
    """`await change(revision=…)`: the ledger in Redis is an older one, as after a loss of writes."""
    redis = connect(redis_url)

    async def change(**fields):
        await redis.hset(Keys(job_name).meta, mapping=fields)

    try:
        yield change
    finally:
        await redis.aclose()


def nothing_fails(error):
    raise AssertionError(error)


async def test_an_attempt_that_dies_between_its_steps_counts_for_nothing(
    a_store, redis_url, job_name, monkeypatch
):
    """The job is taken over, and Redis goes away before its ledger is read: the next attempt finds the same
    writes missing."""
    store = a_store()
    async with meta_of(redis_url, job_name) as change:
        await store.open(nothing_fails)
        await change(revision=58)
        await store.open(nothing_fails)
        await change(revision=1)
    read, dies = store_module.read_ledger, 3

    async def gone(*arguments, **options):
        nonlocal dies
        dies -= 1
        if dies >= 0:
            raise StoreUnavailable("Connection reset by peer", "gone")
        return await read(*arguments, **options)

    monkeypatch.setattr(store_module, "read_ledger", gone)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await store.open(nothing_fails)
    opened = await store.open(nothing_fails)
    await store.close()
    assert opened.revision == 1
    assert opened.lost_writes == 57


async def test_what_a_front_has_told_to_be_lost_is_not_told_again(
    a_store, tmp_path, redis_url, job_name, counted_tasks
):
    """It dies before its first write; its successor finds Redis as it was left."""
    mark = ConfirmedRevision(tmp_path / "confirmed")
    mark.write(58)
    told = []
    for _ in range(2):
        clock = RedisClock(time.monotonic)
        store = Store(redis_url, job_name, "cafe0123", "everysec", clock, confirmed=mark.read())
        front = Coordinator(store, RULES, counted_tasks(), clock, on_confirmed=mark.write)
        await front.start()
        told.append(front.lost_writes)
        await store.close()  # and no word more
    assert (told) == [57, 0]


async def test_a_front_that_dies_before_it_tells_leaves_the_telling_to_the_next(a_store):
    first, second = a_store(confirmed=58), a_store(confirmed=58)
    assert (await first.open(nothing_fails)).lost_writes == 57
    await first.close()
    opened = await second.open(nothing_fails)
    await second.close()
    assert (opened).lost_writes == 57


async def test_of_two_fronts_with_one_epoch_the_newer_one_has_the_job(a_store, redis_url, job_name):
    """Redis has lost the older one's opening, so that the newer one was given the same epoch."""
    async with meta_of(redis_url, job_name) as change:
        older, newer = a_store(), a_store()
        await older.open(nothing_fails)
        await change(front=0, owner="who was before")
        assert (await newer.open(nothing_fails)).front_epoch == older.front_epoch
        with pytest.raises(StoreFenced):
            await older.open(nothing_fails)
        await older.close()
        await newer.close()


async def test_an_attempt_that_arrives_late_takes_nothing_over(a_store, redis_url, job_name):
    """Redis stood still, and runs the script of an attempt after that of the one which followed it."""
    redis = connect(redis_url)
    store = a_store()
    await store.open(nothing_fails)
    found = store.front_epoch
    opened = await store.open(nothing_fails)
    late = (found, found + 1, store._owner, SCHEMA, b"")
    answer = await redis.eval(TAKE_SCRIPT, 1, Keys(job_name).meta, *late)
    held = await redis.hmget(Keys(job_name).meta, "front", "owner")
    await store.close()
    await redis.aclose()
    assert answer == [b"moved"]
    assert int(held[0]) == opened.front_epoch


async def test_a_front_is_not_fenced_by_an_attempt_of_its_own_to_come_back(redis_url, job_name):
    """The attempt got through, and its answer was lost."""
    store = Store(redis_url, job_name, "cafe0123", "everysec", RedisClock(time.monotonic))
    opened = await store.open(lambda error: None)
    redis = connect(redis_url)
    await redis.hincrby(Keys(job_name).meta, "front", 1)
    again = await store.open(lambda error: None)
    assert again.front_epoch == opened.front_epoch + 2
    await store.close()
    await redis.aclose()
