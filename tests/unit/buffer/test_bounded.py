"""nothing_is_unbounded: with its consumer gone, generation slows down and stops; memory stays flat; when the
consumer is back, nothing was lost and everything flows. The real service, a real Redis, workers that wait."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import psutil
import pytest

from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    ExportLedger,
    Lease,
    NextBatch,
    OpenTrainer,
    PutVerdicts,
    Stats,
    Waiting,
)
from areal_async.rpc.schema import VersionTag
from areal_async.rpc.verdicts import Score
from tests.callers import put
from tests.redis_client import connect
from tests.unit.buffer.conftest import serving

LIMIT_S = 300.0
ATTEMPTS = 400
FLAT_BYTES = 4 << 20
"""Far less than the attempts would add if they stayed anywhere."""


class Job:
    """Everybody of a job but the buffer: two workers, a scorer and a trainer; each can be held up."""

    def __init__(self, ctx, blob, client):
        self.ctx, self.blob, self.client, self.name = ctx, blob, client, ctx.job.job
        self.acknowledged: set[str] = set()
        self.trained: list[str] = []
        self.step = 0
        self.epoch = 0
        self.reasons: dict[str, str] = {}
        """Why each worker was last given nothing; empty while it is given something."""
        self.waiting: Waiting | None = None
        self.runs = {role: asyncio.Event() for role in ("worker", "scorer", "trainer")}
        for event in self.runs.values():
            event.set()

    def tag(self):
        return VersionTag("policy", self.epoch, self.step)

    async def work(self, name):
        while True:
            await self.runs["worker"].wait()
            leases = await self.client.call(Lease(name, 2, [self.tag()], wait_ms=50))
            self.reasons[name] = leases.reason
            for group in leases.groups:
                await asyncio.sleep(0.002)
                await self.put(group)

    async def put(self, group):
        version, epoch = self.step, self.epoch
        episodes = {
            sample: self.blob(self.name, group.group_id, sample, version=version, epoch=epoch, n=2000)
            for sample in group.missing
        }
        ack = await put(self.client, group.lease_id, group.group_id, episodes)
        self.acknowledged |= {f"{group.group_id}.{sample}" for sample in ack.stored}
        return ack

    async def score(self):
        while True:
            await self.runs["scorer"].wait()
            claims, _ = await self.client.exchange(Claim("reward-0", 64, wait_ms=50))
            verdicts = [EpisodeVerdict(i.episode_id, i.claim_id, Score(0.5)) for i in claims.items]
            if verdicts:
                await self.client.call(PutVerdicts("reward-0", verdicts))

    async def train(self):
        while True:
            await self.runs["trainer"].wait()
            batch = await self.client.call(NextBatch("policy", self.epoch, self.step, wait_ms=50))
            if not isinstance(batch, Batch):
                self.waiting = batch
                continue
            self.waiting = None
            self.trained += [e.episode_id for group in batch.groups for e in group.episodes]
            await self.client.call(Commit("policy", self.epoch, self.step))
            self.step += 1
            await self.client.exchange(ExportLedger("policy", self.epoch, self.step))
            await self.client.call(Checkpointed("policy", self.epoch, self.step))

    async def until(self, condition, what):
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + LIMIT_S
        while not condition():
            for task in self.tasks:
                if task.done():
                    task.result()
            assert loop.time() < deadline_s, f"{what} did not happen in time"
            await asyncio.sleep(0.005)

    async def until_generation_stops(self, words):
        """Both workers are told to wait for this reason, and nothing is on its way any more. On the way there
        they may wait for another, such as a version that lags."""
        self.reasons.clear()
        await self.until(
            lambda: len(self.reasons) == 2 and all(words in reason for reason in self.reasons.values()),
            f"a stop because {words}",
        )


@pytest.fixture
def a_job(context, blob):
    """`async with a_job(…) as job`: a job that runs, with these settings of its buffer."""

    @asynccontextmanager
    async def make(**buffer):
        ctx = context(rows=50, **{"batch_groups": 4, "durability": "memory"} | buffer)
        async with serving(ctx) as client:
            job = Job(ctx, blob, client)
            job.epoch = (await client.call(OpenTrainer("policy", "trainer", 0))).epoch
            everybody = (job.work("w0"), job.work("w1"), job.score(), job.train())
            job.tasks = [asyncio.create_task(part) for part in everybody]
            try:
                yield job
            finally:
                for task in job.tasks:
                    task.cancel()
                await asyncio.gather(*job.tasks, return_exceptions=True)

    return make


async def memory_stays_flat(job, redis_url):
    """Ask for many more leases, and put what nobody has a lease for."""
    redis = connect(redis_url)

    async def redis_bytes():
        return int((await redis.info("memory"))["used_memory"])

    async def attempt(count):
        payload = {0: job.blob(job.name, "cafe:1:0#0", 0, n=2000)}
        for _ in range(count):
            assert not (await job.client.call(Lease("w2", 100, [job.tag()]))).groups
            assert (await put(job.client, "no-such-lease", "cafe:1:0#0", payload)).stored == []
        return len(payload[0])

    await attempt(50)  # caches and pools have their size from here on
    before, rss = await redis_bytes(), psutil.Process().memory_info().rss
    assert await attempt(ATTEMPTS) * ATTEMPTS > 2 * FLAT_BYTES
    assert await redis_bytes() - before < FLAT_BYTES
    assert psutil.Process().memory_info().rss - rss < FLAT_BYTES
    await redis.aclose()


async def test_nothing_is_unbounded_while_a_consumer_is_gone(a_job, redis_url):
    async with a_job() as job:
        await job.until(lambda: job.step >= 3, "training")
        job.runs["scorer"].clear()
        await job.until_generation_stops("8 groups are outstanding and at most 8 may be")
        stats = await job.client.call(Stats())
        assert stats.policies["policy"].outstanding == stats.policies["policy"].capacity == 8
        await job.until(lambda: job.waiting is not None, "the trainer's wait")
        assert "scor" in job.waiting.edge
        acknowledged = set(job.acknowledged)
        await memory_stays_flat(job, redis_url)
        assert job.acknowledged == acknowledged
        assert (await job.client.call(Stats())).payload_bytes == stats.payload_bytes
        job.runs["scorer"].set()
        step = job.step
        await job.until(lambda: job.step >= step + 6, "training again")
        # All that was acknowledged by then is trained, each episode once.
        assert acknowledged <= set(job.trained)
        assert len(job.trained) == len(set(job.trained))
        assert (await job.client.call(Stats())).episodes_dropped == 0


async def test_nothing_is_unbounded_where_staleness_bounds_nothing(a_job):
    """With a staleness bound that lets everything in, the limit on bytes holds: it is left by training."""
    async with a_job(max_staleness=500, pacing="full", max_bytes=1 << 20) as job:
        job.runs["trainer"].clear()
        await job.until_generation_stops("buffer.max_bytes (1048576)")
        assert (await job.client.call(Stats())).payload_bytes < 1.1 * (1 << 20)  # a group under way is taken
        acknowledged = set(job.acknowledged)
        job.runs["trainer"].set()
        await job.until(lambda: acknowledged <= set(job.trained), "training what was held")
