"""The trainer and the scorer of a run that measures the rest: a step takes its time, and every score is 1.

    areal_async.runner.run_job.run_job(job, modules=MODULES | {"trainer": "timed_services", …})

The trainer opens its buffer, publishes a tiny model through the product's publisher, takes batches, fetches
them, commits and records its steps. It ends, and the run with it, when the measurement is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import cast

import torch
from scale import CHECKPOINT_STEPS, CLAIM_EPISODES, FETCH_EPISODES, Shared
from timer_engine import OVER, STEP_S

from areal_async.base.errors import FaultError, RpcTimeout
from areal_async.base.topology import Role
from areal_async.base.verdicts import Score
from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.messages import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EpisodeVerdict,
    Fetch,
    NextBatch,
    OpenTrainer,
    PutVerdicts,
)
from areal_async.service.context import ServiceContext
from areal_async.service.main import run_service
from areal_async.service.record import open_records
from trainer_service.publishing.publisher import make_publisher

WAIT_MS = 500


async def train(ctx: ServiceContext) -> None:
    """Train until the measurement is over; then the run is done."""
    shared, step_s = Shared(Path(ctx.job.rollout.engine_args["phase"])), float(os.environ[STEP_S])
    tensors = {"weight": torch.zeros(16, 16)}
    policy = ctx.job.policy
    publisher = make_publisher(ctx, files={}, tied={})
    publisher.start()
    records = open_records(ctx)
    buffer = Client(ctx.buffer, job=ctx.job.job, role="trainer", name=ctx.name, access=ctx.keys)
    await buffer.connect(60)
    epoch = (await buffer.call(OpenTrainer(policy, ctx.name, 0))).epoch
    await asyncio.to_thread(publisher.publish, VersionTag(policy, epoch, 0), tensors)
    ctx.ready()
    step = 0
    while shared.phase != OVER and not ctx.stop.is_set():
        batch = await buffer.call(NextBatch(policy, epoch, step, WAIT_MS))
        if not isinstance(batch, Batch):
            continue
        began_s = time.monotonic()
        ids = [each.episode_id for group in batch.groups for each in group.episodes]
        for start in range(0, len(ids), FETCH_EPISODES):
            await buffer.exchange(Fetch(ids[start : start + FETCH_EPISODES]))
        await asyncio.sleep(max(0.0, began_s + step_s - time.monotonic()))
        step += 1
        await asyncio.to_thread(publisher.publish, VersionTag(policy, epoch, step), tensors)
        await buffer.call(Commit(policy, epoch, step - 1))
        if step % CHECKPOINT_STEPS == 0:
            await buffer.call(Checkpointed(policy, epoch, step))
        await asyncio.to_thread(records.write, "step", step=step - 1, version=step - 1, reward_mean=1.0)
    if shared.phase == OVER:
        ctx.finished.set()
    await asyncio.to_thread(records.close)
    await asyncio.to_thread(publisher.close)
    await buffer.close()


async def score(ctx: ServiceContext) -> None:
    """Give every episode the score 1, until told to stop."""
    async with Client(ctx.buffer, job=ctx.job.job, role="reward", name=ctx.name, access=ctx.keys) as buffer:
        ctx.ready()
        while not ctx.stop.is_set():
            with contextlib.suppress(RpcTimeout, FaultError):
                claims, _ = await buffer.exchange(Claim(ctx.name, CLAIM_EPISODES, WAIT_MS))
                if claims.items:
                    done = [EpisodeVerdict(i.episode_id, i.claim_id, Score(1.0), 0.1) for i in claims.items]
                    await buffer.call(PutVerdicts(ctx.name, done))


async def main(ctx: ServiceContext) -> None:
    await (train if ctx.role == "trainer" else score)(ctx)


if __name__ == "__main__":
    run_service(cast(Role, sys.argv[sys.argv.index("--name") + 1]), main)
