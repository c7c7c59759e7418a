"""Redis comes back without writes that it had confirmed, or with another time: noticed, and nothing waits."""

from __future__ import annotations

import time

import pytest

from areal_async.rpc.messages import Claim
from replay_buffer.coordinator import Coordinator
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState
from replay_buffer.redis import store as store_module
from replay_buffer.redis.address import StoreFenced, StoreUnavailable
from replay_buffer.redis.store import SCHEMA, TAKE_SCRIPT, Store
from replay_buffer.redis.writer import ConfirmedRevision, Keys, LedgerClock
from tests.unit.buffer.conftest import RULES, CountedTasks, lease, store


def test_the_mark_outlives_its_process(tmp_path):
    mark = ConfirmedRevision(tmp_path / "buffer" / "confirmed")
    assert mark.read() == 0
    mark.write(1 << 40)
    assert ConfirmedRevision(tmp_path / "buffer" / "confirmed").read() == 1 << 40


async def test_a_new_front_notices_what_redis_has_lost_and_ends_the_claims(a_front):
    confirmed = []
    async with a_front(on_confirmed=confirmed.append) as first:
        await first.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(first)
        await store(first, group, (b"a", b"b"))
        assert (await first.execute(Claim("s", 10))).reply.items
        assert confirmed == sorted(confirmed)
        assert confirmed[-1] == first.index.revision
    # The claim is still in Redis, as it is when the verdicts for it are among what was lost.
    async with a_front(confirmed=confirmed[-1] + 3) as second:
        assert second.lost_writes == 3
        assert not second.index.claims
        states = [episode.state for episode in second.index.groups[group.group_id].episodes]
        assert states == [EpisodeState.STORED] * 2


@pytest.fixture
def a_store(redis_url, job_name):
    """`a_store(confirmed=…)`: a front's way to the ledger of this test's job."""
    clock = LedgerClock(time.monotonic)
    return lambda confirmed=0: Store(redis_url, job_name, "cafe0123", "everysec", clock, confirmed=confirmed)


def nothing_fails(error):
    raise AssertionError(error)


async def test_an_attempt_that_dies_between_its_steps_counts_for_nothing(
    a_store, redis, job_name, monkeypatch
):
    """The job is taken over, and Redis goes away before its ledger is read: the next attempt finds the same
    writes missing."""
    mine = a_store()
    await mine.open(nothing_fails)
    redis.hset(Keys(job_name).meta, "revision", 58)
    await mine.open(nothing_fails)
    redis.hset(Keys(job_name).meta, "revision", 1)
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
            await mine.open(nothing_fails)
    opened = await mine.open(nothing_fails)
    await mine.close()
    assert opened.revision == 1
    assert opened.lost_writes == 57


async def test_what_a_front_has_told_to_be_lost_is_not_told_again(tmp_path, redis_url, job_name):
    """It dies before its first write; its successor finds Redis as it was left."""
    mark = ConfirmedRevision(tmp_path / "confirmed")
    mark.write(58)
    told = []
    for _ in range(2):
        clock = LedgerClock()
        mine = Store(redis_url, job_name, "cafe0123", "everysec", clock, confirmed=mark.read())
        front = Coordinator(mine, RULES, CountedTasks(), clock, on_confirmed=mark.write)
        await front.start()
        told.append(front.lost_writes)
        await mine.close()  # and no word more
    assert told == [57, 0]


async def test_a_front_that_dies_before_it_tells_leaves_the_telling_to_the_next(a_store):
    first, second = a_store(confirmed=58), a_store(confirmed=58)
    assert (await first.open(nothing_fails)).lost_writes == 57
    await first.close()
    opened = await second.open(nothing_fails)
    await second.close()
    assert opened.lost_writes == 57


async def test_of_two_fronts_with_one_epoch_the_newer_one_has_the_job(a_store, redis, job_name):
    """Redis has lost the older one's opening, so that the newer one was given the same epoch."""
    older, newer = a_store(), a_store()
    await older.open(nothing_fails)
    redis.hset(Keys(job_name).meta, mapping={"front": 0, "owner": "who was before"})
    assert (await newer.open(nothing_fails)).front_epoch == older.front_epoch
    with pytest.raises(StoreFenced):
        await older.open(nothing_fails)
    await older.close()
    await newer.close()


async def test_an_attempt_that_arrives_late_takes_nothing_over(a_store, redis, job_name):
    """Redis stood still, and runs the script of an attempt after that of the one which followed it."""
    mine, meta = a_store(), Keys(job_name).meta
    found = (await mine.open(nothing_fails)).front_epoch
    opened = await mine.open(nothing_fails)
    assert redis.eval(TAKE_SCRIPT, 1, meta, found, found + 1, "a late owner", SCHEMA, b"") == [b"moved"]
    front, owner = redis.hmget(meta, "front", "owner")
    assert (int(front), owner == b"a late owner") == (opened.front_epoch, False)
    await mine.close()


async def test_a_front_is_not_fenced_by_an_attempt_of_its_own_to_come_back(a_store, redis, job_name):
    """The attempt got through, and its answer was lost."""
    mine = a_store()
    opened = await mine.open(nothing_fails)
    redis.hincrby(Keys(job_name).meta, "front", 1)
    again = await mine.open(nothing_fails)
    assert again.front_epoch == opened.front_epoch + 2
    await mine.close()


def test_the_ledger_s_clock_goes_on_from_the_last_write_and_never_back():
    local_s, wall_s = 100.0, 5_000.0
    clock = LedgerClock(lambda: local_s, lambda: wall_s)
    with pytest.raises(RuntimeError):
        clock.now_ms()
    assert clock.begin(None) == 0
    assert clock.now_ms() == 5_000_000
    local_s, wall_s = local_s + 10, wall_s - 3600
    assert clock.now_ms() == 5_010_000, "a clock of the day that is set back does not move it"
    assert clock.begin(5_004_000) == 6_000, "Redis was away for six seconds"
    assert clock.begin(5_060_000) == 0, "a write of later is no outage"
    local_s, wall_s = 3.0, 9e9
    successor = LedgerClock(lambda: local_s, lambda: wall_s)
    assert successor.begin(5_010_000) == 0
    assert successor.now_ms() == 5_010_000
