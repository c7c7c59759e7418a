"""The service over the wire: front, real Redis, RPC, client."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import prometheus_client
import psutil
import pytest

from areal_async.base.errors import ArealError, FaultError
from areal_async.base.verdicts import Score
from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.frames import REQUESTS
from areal_async.rpc.messages import (
    Arrived,
    Batch,
    Checkpointed,
    Claim,
    Commit,
    Drain,
    EpisodeVerdict,
    ExportLedger,
    Fetch,
    GroupSamples,
    Heartbeat,
    Lease,
    NextBatch,
    OpenTrainer,
    PutEpisodes,
    PutVerdicts,
    Release,
    SeeTasks,
    Stats,
    Waiting,
)
from areal_async.rpc.weights_messages import WaitSnapshot
from replay_buffer import coordinator, metrics
from replay_buffer.ledger.decide import decide
from replay_buffer.redis.store import Store
from replay_buffer.redis.writer import LedgerClock
from replay_buffer.server import BufferServer, main
from tests.callers import put
from tests.processes import words_of
from tests.unit.buffer.conftest import serving
from tests.waiting import LIMIT_S, until


async def waiting_at(client, *requests):
    """Calls of these requests. They were sent before another one that is answered, so the buffer has them."""
    calls = [asyncio.create_task(client.call(request)) for request in requests]
    await asyncio.sleep(0)
    await client.call(Stats())
    return calls


async def opened(client, groups, worker="w0"):
    """A trainer opens and a worker leases: the version it serves, and what it was given."""
    tag = VersionTag("policy", (await client.call(OpenTrainer("policy", "trainer", 0))).epoch, 0)
    return tag, (await client.call(Lease(worker, groups, [tag]))).groups


async def generate(client, blob, job, groups):
    for group in groups:
        episodes = {sample: blob(job, group.group_id, sample) for sample in group.missing}
        ack = await put(client, group.lease_id, group.group_id, episodes)
        assert ack.stored == group.missing


async def score(client):
    claims, blobs = await client.exchange(Claim("reward-0", 100, wait_ms=2000))
    assert len(claims.items) == len(blobs)
    verdicts = [EpisodeVerdict(i.episode_id, i.claim_id, Score(0.5)) for i in claims.items]
    assert (await client.call(PutVerdicts("reward-0", verdicts))).refused == []
    return claims.items, blobs


async def test_a_step_over_the_wire(context, blob, job_name):
    async with serving(context()) as client:
        tag, groups = await opened(client, 2)
        assert [group.task.prompt for group in groups] == ["0+1=", "1+1="]
        assert (await client.call(Heartbeat("w0", [group.lease_id for group in groups]))).lost == []
        assert isinstance(await client.call(NextBatch("policy", tag.epoch, 0)), Waiting)
        await generate(client, blob, job_name, groups)
        items, blobs = await score(client)
        assert {item.task.ground_truth for item in items} == {1, 2}
        batch = await client.call(NextBatch("policy", tag.epoch, 0, wait_ms=5000))
        assert isinstance(batch, Batch)
        ids = [episode.episode_id for group in batch.groups for episode in group.episodes]
        assert {(*episode.rows,) for group in batch.groups for episode in group.episodes} == {((5, 3, 0),)}
        _, fetched = await client.exchange(Fetch(ids[::-1]))
        by_id = dict(zip((item.episode_id for item in items), map(bytes, blobs), strict=True))
        assert [bytes(part) for part in fetched] == [by_id[id_] for id_ in ids[::-1]]
        named = [group.task_id for group in batch.groups]
        seen = await client.call(SeeTasks([*named, "other:0:0", f"{named[0].split(':')[0]}:999:0", "?"]))
        assert [(task.task_id, task.ground_truth) for task in seen.tasks] == [(named[0], 1), (named[1], 2)]
        await client.call(Commit("policy", tag.epoch, 0))
        _, (copy,) = await client.exchange(ExportLedger("policy", tag.epoch, 1))
        assert len(copy) > 0
        await client.call(Checkpointed("policy", tag.epoch, 1))
        stats = await client.call(Stats())
        policy = stats.policies["policy"]
        assert (policy.v_train, policy.episodes_trained, stats.payload_bytes) == (1, 4, 0)
        assert stats.reasons["committed"] == 2
        with pytest.raises(FaultError, match="is not held here"):
            await client.exchange(Fetch(ids))


async def test_waiting_calls_are_answered_as_soon_as_they_can_be(context, blob, job_name):
    async with serving(context()) as client:
        epoch = (await client.call(OpenTrainer("policy", "trainer", 0))).epoch
        tag = VersionTag("policy", epoch, 0)
        batching = asyncio.create_task(client.call(NextBatch("policy", epoch, 0, wait_ms=30_000)))
        scoring = asyncio.create_task(score(client))
        leases = await client.call(Lease("rollout-0", 4, [tag]))
        await generate(client, blob, job_name, leases.groups[:2])
        items, _ = await scoring
        while len(items) < 4:
            more, _ = await score(client)
            items += more
        assert isinstance(await asyncio.wait_for(batching, LIMIT_S), Batch)
        leasing = asyncio.create_task(client.call(Lease("rollout-1", 1, [tag], wait_ms=30_000)))
        await client.call(Release("rollout-0", leases.groups[2].lease_id, "test"))
        assert len((await asyncio.wait_for(leasing, LIMIT_S)).groups) == 1


async def test_the_ledger_decides_for_a_waiting_trainer_only_once_enough_groups_are_scored(
    context, blob, job_name, monkeypatch
):
    decided = Counter()

    def counted(index, command, now_ms):
        decided[type(command)] += 1
        return decide(index, command, now_ms)

    monkeypatch.setattr(coordinator, "decide", counted)
    monkeypatch.setattr(coordinator, "GATHER_S", 600.0)
    async with serving(context()) as client:
        tag, groups = await opened(client, 2)
        (batching,) = await waiting_at(client, NextBatch("policy", tag.epoch, 0, wait_ms=30_000))
        for group in groups:
            await client.call(Stats())
            assert decided[NextBatch] == 0
            await generate(client, blob, job_name, [group])
            await score(client)
        assert isinstance(await asyncio.wait_for(batching, LIMIT_S), Batch)
        assert decided[NextBatch] == 1


async def test_a_newer_lease_request_of_a_worker_ends_the_wait_of_its_older_one(context):
    """A worker that serves a new version asks again beside its waiting request, which is of no use then."""
    async with serving(context()) as client:

        def lease(worker, version):
            return Lease(worker, 1, [VersionTag("policy", 0, version)], wait_ms=20_000)

        while (await client.call(Lease("w0", 4, [VersionTag("policy", 0, 0)]))).groups:
            pass  # until there is no more room
        older, other = await waiting_at(client, lease("w0", 0), lease("w1", 0))
        (newer,) = await waiting_at(client, lease("w0", 1))
        answer = await asyncio.wait_for(older, LIMIT_S)
        assert not answer.groups
        assert answer.reason
        assert not other.done()
        assert not newer.done()
        for waiting in (other, newer):
            waiting.cancel()
        await asyncio.gather(other, newer, return_exceptions=True)


async def test_a_worker_that_drains_has_its_waiting_request_answered_and_its_missing_samples_leased_on(
    context, blob, job_name
):
    async with serving(context()) as client:
        tag, groups = await opened(client, 4)
        waiting, other = await waiting_at(
            client, Lease("w0", 1, [tag], wait_ms=20_000), Lease("w1", 1, [tag], wait_ms=20_000)
        )
        await put(client, groups[0].lease_id, groups[0].group_id, {1: blob(job_name, groups[0].group_id, 1)})
        await client.call(Drain("w0", "it is moved"))
        answer = await asyncio.wait_for(waiting, LIMIT_S)
        assert (answer.groups, answer.drain) == ([], True)
        assert "it is moved" in answer.reason
        assert (await client.call(Heartbeat("w0", [groups[0].lease_id]))).drain
        await client.call(Release("w0", groups[0].lease_id, "drained"))
        (handed_over,) = (await asyncio.wait_for(other, LIMIT_S)).groups
        assert (handed_over.group_id, handed_over.missing) == (groups[0].group_id, [0])
        await client.call(Arrived("w0"))
        assert not (await client.call(Heartbeat("w0", []))).drain


async def test_a_planned_stop_of_the_buffer_answers_who_waits_and_hands_over_to_the_next(
    context, blob, job_name
):
    ctx = context()
    async with serving(ctx) as client:
        tag, groups = await opened(client, 4)
        await generate(client, blob, job_name, groups[:1])
        leasing, batching = await waiting_at(
            client,
            Lease("w1", 1, [tag], wait_ms=30_000),
            NextBatch("policy", tag.epoch, 0, wait_ms=30_000),
        )
        ctx.stop.set()
        answer = await asyncio.wait_for(leasing, LIMIT_S)
        assert answer.groups == []
        assert isinstance(await asyncio.wait_for(batching, LIMIT_S), Waiting)
    async with serving(context()) as client:
        kept = await client.call(Heartbeat("w0", [group.lease_id for group in groups[1:]]))
        assert kept.lost == []
        await generate(client, blob, job_name, groups[1:2])
        items, _ = await score(client)
        assert len(items) == 4


async def test_blobs_that_are_not_what_they_are_said_to_be_are_refused(context, blob, job_name):
    async with serving(context()) as client:
        _, (group,) = await opened(client, 1)
        wrong = {
            "another sample": blob(job_name, group.group_id, 1),
            "another group": blob(job_name, "cafe:1:0#0", 0),
            "another job": blob("other", group.group_id, 0),
            "no episode": b"nonsense" * 20,
            "altered": blob(job_name, group.group_id, 0)[:-1] + b"!",
        }
        for what, data in wrong.items():
            ack = await put(client, group.lease_id, group.group_id, {0: data})
            assert ack.stored == [], what
            assert ack.refused[0].reason.startswith("invalid"), what
        assert (await client.call(Stats())).reasons["refused:invalid"] == len(wrong)


def test_every_request_that_is_declared_for_the_buffer_has_one_handler():
    declared = {request for request in REQUESTS if request.__module__ == Lease.__module__}
    assert set(BufferServer(None, "job", SimpleNamespace(attachments=None)).handlers) == declared


async def test_a_message_that_makes_no_sense_is_invalid(context, job_name):
    ctx = context()
    async with serving(ctx) as client:
        raw = Client(ctx.buffer.endpoint, job=job_name, role="test", name="raw", access=ctx.keys)
        async with raw:
            for message in (PutEpisodes([GroupSamples("l", "g", [0, 1])]), WaitSnapshot("r", "serve")):
                with pytest.raises(FaultError) as caught:
                    await raw.call(message, timeout_s=60, attachments=[b"x"])
                assert caught.value.kind == "invalid"
        with pytest.raises(FaultError, match="is not an episode id"):
            await client.exchange(Fetch(["nonsense"]))


async def test_its_own_redis_starts_and_ends_with_it_and_is_started_again_when_it_dies(
    context, blob, job_name
):
    """With tier always nothing acknowledged is lost, and the calls meanwhile only wait."""
    ctx = context(redis="embedded", durability="always")
    async with serving(ctx) as client:
        tag, groups = await opened(client, 2)
        await generate(client, blob, job_name, groups)
        (redis,) = (p for p in psutil.Process().children() if str(ctx.socket_dir) in " ".join(words_of(p)))
        redis.kill()
        await score(client)
        batch = await client.call(NextBatch("policy", tag.epoch, 0, wait_ms=5000))
        assert isinstance(batch, Batch)
        ids = [e.episode_id for g in batch.groups for e in g.episodes]
        assert len((await client.exchange(Fetch(ids)))[1]) == 4
        assert (ctx.socket_dir / "redis").exists()
    assert not (ctx.socket_dir / "redis").exists()
    assert list((ctx.run_dir / "buffer").glob("appendonly*"))


async def test_a_redis_that_cannot_be_used_ends_the_service_with_one_paragraph(context):
    with pytest.raises(ArealError, match="does not answer") as caught:
        async with serving(context(redis="unix:///nowhere/redis.sock")):
            pass
    assert "\n" not in str(caught.value)


async def test_a_second_front_ends_the_first_service(context, redis_url, job_name):
    ctx = context()
    ask = Lease("w", 1, [VersionTag("policy", 1, 0)])
    service = asyncio.create_task(main(ctx, prometheus_client.CollectorRegistry()))
    async with Client(ctx.buffer.endpoint, job=job_name, role="t", name="t", access=ctx.keys) as client:
        await client.call(OpenTrainer("policy", "trainer", 0), timeout_s=60)
        (group,) = (await client.call(ask, timeout_s=60)).groups
        dataset_hash = group.task.task_id.partition(":")[0]
        thief = Store(redis_url, job_name, dataset_hash, "everysec", LedgerClock())
        await thief.open(lambda error: None)
        asking = asyncio.create_task(client.call(ask, timeout_s=60))
        with pytest.raises(ArealError, match="taken over this job"):
            await asyncio.wait_for(service, LIMIT_S)
        asking.cancel()
        await thief.close()


async def test_the_figures_are_served_to_prometheus(context, blob, job_name):
    registry = prometheus_client.CollectorRegistry()

    def read():
        return prometheus_client.generate_latest(registry).decode()

    async with serving(context(), registry) as client:
        _, groups = await opened(client, 3)
        await generate(client, blob, job_name, groups[:1])
        await until(lambda: 'areal_buffer_groups{state="generated"} 1.0' in read())
        text = read()
    for line in (
        'areal_buffer_groups{state="leased"} 2.0',
        'areal_buffer_episodes{state="stored"} 2.0',
        'areal_buffer_transitions_total{reason="leased"} 3.0',
        'areal_buffer_outstanding_groups{policy="policy"} 3.0',
        'areal_buffer_capacity_groups{policy="policy"} 4.0',
        'areal_buffer_version{policy="policy"} 0.0',
        'areal_buffer_max_staleness_seen{policy="policy"} 0.0',
    ):
        assert line in text
    assert "areal_buffer_payload_bytes" in text
    assert "areal_buffer_redis_bytes" in text


async def test_a_redis_that_confirms_nothing_shows_in_the_metrics():
    loop = asyncio.get_running_loop()
    writes, now_s = [loop.create_future()], 100.0
    collector = metrics.BufferCollector(lambda: writes[-1], lambda: now_s)
    assert collector.unconfirmed_s() == 0.0
    now_s = 107.0
    writes.append(loop.create_future())
    assert collector.unconfirmed_s() == 7.0
    writes[0].set_result(None)
    assert collector.unconfirmed_s() == 0.0, "the second one is new"
    now_s = 109.0
    assert collector.unconfirmed_s() == 2.0
    writes[1].set_result(None)
    assert collector.unconfirmed_s() == 0.0
