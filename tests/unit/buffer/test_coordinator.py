"""The front on a real Redis: what is confirmed is there, a new front finds it, an old one is fenced."""

from __future__ import annotations

import asyncio
import time

import pytest

from areal_async.base.errors import FaultError
from areal_async.base.verdicts import Failure
from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import Claim, Commit, Heartbeat, Lease, Leases, NextBatch, Waiting
from replay_buffer.coordinator import Coordinator
from replay_buffer.ledger.decide import ExpireDeadlines, KeepAlive
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.rules import Rules, VerdictPolicy
from replay_buffer.redis import store as store_module
from replay_buffer.redis.address import StoreFenced, StoreUnusable
from replay_buffer.redis.writer import Keys
from tests.unit.buffer.conftest import judge, lease, store, stored
from tests.waiting import LIMIT_S, until

BLOBS = (b"a" * 10, b"b" * 10)


async def some_life(front):
    """A bit of everything: a trained step, a batch given out, and groups in every other state."""
    await front.execute(OpenedWith("policy", "t", 0))
    for group in await lease(front, 2):
        await store(front, group, BLOBS)
    await judge(front)
    await front.execute(NextBatch("policy", 1, 0))
    await front.execute(Commit("policy", 1, 0))
    groups = await lease(front, 4, version=0) + await lease(front, 4, version=1)
    for group in groups[:2]:
        await store(front, group, BLOBS)
    await judge(front)
    await store(front, groups[2], BLOBS)
    await front.execute(Claim("s", 1))
    return groups


def ledger(front):
    meta, *tables = stored(front.index)
    return meta, *map(dict, tables)


def orders_of(front):
    index = front.index
    return [list(order) for order in (index.consumers["policy"].ready, index.claimable, index.deadlines)]


async def test_one_death_is_local_a_new_front_finds_the_ledger_as_it_was(a_front):
    async with a_front() as front:
        groups = await some_life(front)
        before = ledger(front)
        orders = orders_of(front)
        revision = front.index.revision
        blobs = await front.blobs([(groups[0].group_id, 1), (groups[3].group_id, 0)])
    async with a_front() as again:
        # The old front's last word is a write, and an outage that moves deadlines on; the rest stays.
        assert again.index.revision in (revision + 1, revision + 2)
        meta, held, leases, claims, batches = ledger(again)
        assert (meta, held, batches) == (before[0], before[1], before[4])
        assert set(leases) == set(before[2])
        assert set(claims) == set(before[3])
        assert orders_of(again) == orders
        assert await again.blobs([(groups[0].group_id, 1), (groups[3].group_id, 0)]) == blobs
        assert blobs == [b"b" * 10, None]
        assert again.front_epoch == front.front_epoch + 1


async def test_decisions_in_flight_are_written_in_order(a_front):
    async with a_front(Rules.alone(group_size=2, batch_groups=40, max_staleness=1)) as front:
        await front.execute(OpenedWith("policy", "t", 0))
        granted = await asyncio.gather(*(lease(front) for _ in range(60)))
        ids = [groups[0].group_id for groups in granted]
        assert ids == [f"cafe0123:{row}:0#0" for row in range(60)]
        meta = front.index.meta
    async with a_front() as again:
        assert set(again.index.groups) == set(ids)
        assert again.index.meta == meta


async def test_a_poll_answers_empty_handed_when_its_wait_is_over_or_the_front_stops(a_front):
    async with a_front() as front:
        reply = await front.poll(Claim("s", 1), 20, "claim", lambda reply: True)
        assert reply.items == []
        polling = asyncio.ensure_future(
            front.poll(
                Lease("w", 1, [VersionTag("policy", 9, 9)]), 60_000, "lease", lambda reply: not reply.groups
            )
        )
        await asyncio.sleep(0)
    assert isinstance(await asyncio.wait_for(polling, LIMIT_S), Leases)


async def test_a_claim_waits_a_moment_for_a_group_to_become_complete(a_front):
    async with a_front() as front:
        await front.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(front)
        await store(front, group, (b"a",))

        def more_comes(index):
            return not index.claimable_group

        claiming = asyncio.ensure_future(
            front.poll(Claim("s", 10), 60_000, "claim", lambda reply: not reply.items, more_comes)
        )
        await asyncio.sleep(0)
        await store(front, group, (b"b",), [1])
        assert len((await claiming).items) == 2


async def test_deadlines_expire_when_nobody_asks(a_front):
    rules = Rules.alone(group_size=2, batch_groups=2, max_staleness=1, lease_ms=30)
    async with a_front(rules) as front:
        await front.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(front)
        await until(lambda: not front.index.leases)
        assert front.index.meta.counts["queued:lease_expired"] == 1
        assert group.group_id in front.index.queue


async def test_an_outage_of_the_front_moves_deadlines_on(a_front):
    """As after SIGSTOP: nobody could renew a lease meanwhile, so none expires for it."""
    shift = 0.0
    rules = Rules.alone(group_size=2, batch_groups=2, max_staleness=1, lease_ms=10_000)
    async with a_front(rules, clock=lambda: time.monotonic() + shift) as front:
        await front.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(front)
        deadline_ms = front.index.leases[group.lease_id].deadline_ms
        shift = 30.0
        await front.execute(ExpireDeadlines())
        moved_ms = front.index.leases[group.lease_id].deadline_ms - deadline_ms
        assert 29_000 < moved_ms < 31_000


def left_ms(front: Coordinator, lease_id: str) -> int:
    return front.index.leases[lease_id].deadline_ms - front.now_ms


@pytest.mark.parametrize("set_s", [0.0, 3600.0, -3600.0, -5e6])
async def test_a_restart_leaves_a_lease_as_long_as_it_had_whatever_a_clock_of_the_day_says(a_front, set_s):
    rules = Rules.alone(group_size=2, batch_groups=2, max_staleness=1, lease_ms=3_600_000)
    local_s = 1000.0
    async with a_front(rules, clock=lambda: local_s) as front:
        await front.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(front)
        local_s += 1.0
        await front.execute(KeepAlive())
        left = left_ms(front, group.lease_id)
        assert left == 3_599_000
    # The machine was restarted in between, and its clock of the day set: its monotonic clock begins again.
    async with a_front(rules, clock=lambda: 7.0, wall=lambda: time.time() + set_s) as again:
        assert left_ms(again, group.lease_id) == left


@pytest.mark.parametrize("set_s", [3600, -3600, -86_400 * 365])
async def test_redis_clock_that_is_set_neither_keeps_a_lease_nor_ends_one(a_front, monkeypatch, redis, set_s):
    """A worker hangs, another one lives, and somebody sets the clock of Redis' machine."""
    redis.set("set_s", 0)
    told = b"local time = redis.call('TIME'); time[1] = time[1] + redis.call('GET', 'set_s')"
    script = store_module.SCRIPT.replace(b"local time = redis.call('TIME')", told)
    assert script != store_module.SCRIPT
    monkeypatch.setattr(store_module, "SCRIPT", script)
    shift_s = 0.0
    rules = Rules.alone(group_size=1, batch_groups=2, max_staleness=1, lease_ms=5_000)
    async with a_front(rules, clock=lambda: time.monotonic() + shift_s) as front:
        await front.execute(OpenedWith("policy", "t", 0))
        (lives,) = await lease(front)
        asked = await front.execute(Lease("hangs", 1, [VersionTag("policy", 1, 0)]))
        (hung,) = asked.reply.groups
        redis.set("set_s", set_s)
        for _ in range(5):
            shift_s += 1.5
            await front.execute(Heartbeat("w", [lives.lease_id]))
            assert all(0 < left_ms(front, lease_id) <= 5_000 for lease_id in front.index.leases)
        assert [*front.index.leases] == [lives.lease_id]
        assert front.index.meta.counts["queued:lease_expired"] == 1
    assert hung.group_id != lives.group_id


async def test_a_front_without_anything_to_write_says_that_it_lives(a_front, redis, job_name, monkeypatch):
    monkeypatch.setattr("replay_buffer.coordinator.ALIVE_MS", 20)
    seen = set()
    async with a_front():
        await until(lambda: seen.add(redis.hget(Keys(job_name).meta, "alive_ms")) or len(seen) > 2)


async def test_another_schema_or_data_set_is_refused(a_front, redis, job_name):
    async with a_front():
        pass
    with pytest.raises(StoreUnusable, match="begun with the data set cafe0123"):
        async with a_front(dataset="other"):
            pass
    redis.hset(Keys(job_name).meta, "schema", 99)
    with pytest.raises(StoreUnusable, match="has schema 99"):
        async with a_front():
            pass


async def test_a_ledger_that_is_gone_ends_the_front(a_front, redis, job_name):
    async with a_front() as front:
        await front.execute(OpenedWith("policy", "t", 0))
        redis.delete(Keys(job_name).meta)
        with pytest.raises(FaultError):
            await lease(front)
        error = await asyncio.wait_for(asyncio.shield(front.ended), LIMIT_S)
        assert isinstance(error, StoreFenced | StoreUnusable)


async def test_a_front_whose_own_opening_was_lost_is_not_fenced_by_its_older_self(a_front, redis, job_name):
    async with a_front() as front:
        await some_life(front)
        epoch, revision = front.front_epoch, front.index.revision
        # Redis goes back to before this front took over, as after a failover.
        redis.hset(Keys(job_name).meta, mapping={"front": epoch - 1, "revision": revision - 3})
        for client in redis.client_list():
            if client["cmd"] != "client|list" and client["cmd"] != "client":
                redis.client_kill_filter(_id=client["id"])
        with pytest.raises(FaultError):
            await front.execute(OpenedWith("policy", "t", 1))
        await until(lambda: front.index is not None)
        assert front.lost_writes == 3
        assert front.front_epoch == epoch + 1


async def test_a_failed_job_wakes_its_trainer_and_a_buffer_that_begins_lifts_the_failure(a_front):
    rules = Rules.alone(group_size=1, batch_groups=1, max_staleness=1, on_error=VerdictPolicy(0, "fail_job"))
    async with a_front(rules) as front:
        await front.execute(OpenedWith("policy", "t", 0))
        (group,) = await lease(front)
        await store(front, group, BLOBS[:1])
        waiting = asyncio.create_task(
            front.poll(NextBatch("policy", 1, 0), 30_000, "batch", lambda reply: isinstance(reply, Waiting))
        )
        await judge(front, Failure("exception", "no grader"))
        reply = await asyncio.wait_for(waiting, LIMIT_S)
        assert (reply.kind, FaultError.of(reply).restart_helps) == ("failed", False)
        assert "no grader" in reply.message
    async with a_front(rules) as front:
        (item,) = (await front.execute(Claim("s", 9))).reply.items
        assert (item.episode_id, item.tries) == (f"{group.group_id}.0", 0)
