"""`python -m reward_service --context FILE --name NAME`: the process of the reward service."""

from __future__ import annotations

import contextlib

from areal_async.base.log import get_logger
from areal_async.base.metrics import sums_of
from areal_async.rpc.board import board
from areal_async.rpc.client import Client
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.rpc.messages import Arrived
from areal_async.service.context import ServiceContext
from areal_async.service.main import run_service
from reward_service import metrics
from reward_service.router import Router, watch
from reward_service.sdk import RewardLoadError
from reward_service.server import RewardServer

log = get_logger("reward")


async def main(ctx: ServiceContext) -> None:
    """Serve the job: start its rewards, connect to its buffer, and run `RewardServer`."""
    client = Client(ctx.buffer, job=ctx.job.job, role="reward", name=ctx.name, access=ctx.keys)
    async with contextlib.AsyncExitStack() as stack:
        try:
            router = await stack.enter_async_context(Router(ctx.job.reward, inline=ctx.inline))
        except RewardLoadError as error:
            # If a server that answered before in this run is unavailable, the service restarts and waits for
            # it. At the job's first start, an unavailable server counts as a mistake of the job file.
            if error.may_pass and ctx.served_before:
                error.restart_helps = True
            raise
        watch(router)
        board.figures = lambda: ServiceFigures(
            workers_alive=router.alive, sums={"calls": sums_of(metrics.CALL_SECONDS)}
        )
        buffer = await stack.enter_async_context(client)
        await buffer.call(Arrived(ctx.name))
        ctx.ready()
        log.info("reward service serves", rewards=[spec.name for spec in router.specs])
        server = RewardServer(buffer, router, scorer=ctx.name)
        metrics.PENDING.set_function(lambda: server.pending)
        await server.run(ctx.stop)


if __name__ == "__main__":
    run_service("reward", main)
