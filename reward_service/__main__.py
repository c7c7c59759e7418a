"""`python -m reward_service --context FILE --name NAME`: the process of the reward service."""

from __future__ import annotations

from areal_async.control.context import ServiceContext
from areal_async.control.service import run_service
from areal_async.observe.log import get_logger
from replay_buffer.client import BufferClient
from reward_service.pool import Pool
from reward_service.server import RewardServer

log = get_logger("reward")


async def main(ctx: ServiceContext) -> None:
    """Pool, connection, loops; `RewardServer.run` says what ends it."""
    section = ctx.job.reward
    async with Pool(section.name, workers=section.workers, timeout_s=section.timeout_s) as pool:
        async with BufferClient(ctx.buffer_endpoint, job=ctx.job.job, role="reward", name=ctx.name) as buffer:
            await buffer.arrived(ctx.name)
            ctx.ready()
            log.info("reward service serves", reward=section.name, workers=section.workers)
            await RewardServer(buffer, pool, scorer=ctx.name, workers=section.workers).run(ctx.stop)


if __name__ == "__main__":
    run_service("reward", main)
