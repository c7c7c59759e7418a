"""The rollout service's process: engines, connections and worker. `worker.py` has its promises.

Only one process at a time may have a given name. A second process with the name is refused, and the first is
not affected.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

from prometheus_client import REGISTRY

from areal_async.base.device_turns import DeviceTurns
from areal_async.base.errors import ArealError, FaultError, RpcTimeout
from areal_async.base.log import get_logger
from areal_async.base.metrics import sums_of
from areal_async.base.own_files import take_lock
from areal_async.base.processes import NO_RESTARTS
from areal_async.base.versions import VersionTag
from areal_async.config.devices import first_threads
from areal_async.config.engines import engine_part
from areal_async.rpc.board import board
from areal_async.rpc.client import Client
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.rpc.messages import Arrived
from areal_async.rpc.weights_messages import NoNews
from areal_async.service.context import ServiceContext
from areal_async.weights.metrics import FETCH_SECONDS
from areal_async.weights.receiver import make_receiver
from rollout_service.engines import make_engine
from rollout_service.engines.base import Weights
from rollout_service.gateway import Gateway
from rollout_service.metrics import STALL, EngineMetrics
from rollout_service.process import (
    connect,
    make_gateway,
    make_renderers,
    prepare,
    sampling_of,
    unless_stopped,
)
from rollout_service.replicas import ReplicaSet
from rollout_service.worker import WeightUpdates, Worker
from rollout_service.worker.device_turns import EngineTurns
from rollout_service.workflows import PolicyEngine, Renderer, workflow_of

log = get_logger("rollout")


def figures_of(engines: Sequence[ReplicaSet], doing: str = "") -> ServiceFigures:
    """Return the figures of a worker. `version` in them is the version of the first policy's engines."""
    stats = [engine.stats() for engine in engines]
    sums = {"updates": sums_of(STALL), "fetches": sums_of(FETCH_SECONDS)}
    if stats[0].passes:
        sums["passes"] = list(stats[0].passes)
    tokens = sum(each.tokens_total for each in stats)
    return ServiceFigures(engines[0].version.version, tokens, sums=sums, doing=doing)


class NameTaken(ArealError):
    """Another process of the run has this name."""

    restart_helps = True


class DeviceNotShared(ArealError):
    """Trainer and engines cannot take turns on one device."""

    restart_helps = False


def make_replicas(ctx: ServiceContext, *, on_serving: Callable[[float], None]) -> ReplicaSet:
    """Return the engines of this worker, not started yet. See `ReplicaSet` for the callbacks."""
    job = ctx.job
    part = engine_part(job.rollout.engine)
    numbers, slots = itertools.count(), job.rollout.max_concurrent

    @asynccontextmanager
    async def newest() -> AsyncIterator[Weights]:
        # A separate receiver name, so that acknowledgements of the worker or of another restarted replica do
        # not free the files in use.
        name = f"{ctx.name}/restart-{next(numbers)}"
        receiver = make_receiver(ctx, "serve", name=name, tensors=part.needs == "tensors")
        try:
            await receiver.connect()
            notice = await receiver.next(None)
            if isinstance(notice, NoNews):
                raise RpcTimeout("the trainer has published nothing yet")
            yield await receiver.open(notice)
            with suppress(RpcTimeout, FaultError):  # the publisher then keeps it a little longer
                await receiver.ack(notice.tag)
        finally:
            await receiver.close()

    # If an engine in this process fails, the process fails too, and the supervisor restarts the worker.
    restarts = job.supervisor.restart_policy() if part.is_server else NO_RESTARTS
    return ReplicaSet(
        lambda replica: make_engine(job, slots=slots, activity="rollout", place=ctx, replica=replica),
        job.rollout.replicas,
        restarts=restarts,
        stuck_s=job.rollout.stuck_s,
        newest=newest,
        on_serving=on_serving,
    )


@contextmanager
def name_of_our_own(ctx: ServiceContext) -> Iterator[None]:
    """Reserve the name of this process for its lifetime. Raises `NameTaken`."""
    path = ctx.socket_dir / f"{ctx.name}.name"
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not take_lock(lock_fd):
            holder = os.pread(lock_fd, 32, 0).decode() or "unknown"
            raise NameTaken(
                f"a worker called {ctx.name} works for this run already (process {holder}). Start this one "
                "with another --name, such as rollout-b."
            )
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock_fd)


async def main(ctx: ServiceContext) -> None:
    """Serve until `ctx.stop` is set or the worker is drained. Raises `ArealError` if the process cannot
    continue."""
    with name_of_our_own(ctx):
        await _serve(ctx)


class _PolicyServer:
    """The engines of one policy, with the updates of their weights. `ctx` is the policy's context."""

    def __init__(self, ctx: ServiceContext, worker: Callable[[], Worker]) -> None:
        self.job, policy = ctx.job, ctx.job.policy
        self.engine = make_replicas(
            ctx,  # its callbacks come only after the start, when `worker` exists
            on_serving=lambda share: worker().serving(policy, share),
        )
        tensors = engine_part(self.job.rollout.engine).needs == "tensors"
        self.receiver = make_receiver(ctx, "serve", tensors=tensors)
        self.updates = WeightUpdates(self.receiver, self.engine, on_change=lambda: worker().weights_changed())

    def beside(self) -> list[Coroutine[Any, Any, None]]:
        """Return the work that goes on while the worker runs."""
        turns = self.updates.turns
        return [self.updates.run(), self.engine.watch(), *([turns.run()] if turns is not None else [])]

    async def first_version(self) -> VersionTag:
        await connect(self.receiver)
        return await self.updates.start()

    async def close(self) -> None:
        await self.engine.stop()
        await self.receiver.close()


@asynccontextmanager
async def sharing(
    ctx: ServiceContext, server: _PolicyServer, render: Renderer, gateway: Gateway
) -> AsyncIterator[Callable[[], str]]:
    """Let the engine of `server` take turns with the trainer inside the block, and let it do the evaluations.
    Yield a function that returns the progress of a running evaluation. Without `placement.share`, do
    nothing."""
    job = ctx.job
    if job.placement.share is None:
        yield str
        return
    hosts = {place.node_id for place in ctx.topology.services if place.role in ("trainer", "rollout")}
    if len(hosts) > 1 or ctx.place.gpus_of_its_own or ctx.index:
        raise DeviceNotShared(
            "placement.share: one trainer and one engine take turns on one device of one host. This worker "
            "has another host, a device of its own, or a second engine. Remove it, or start the run on one "
            "machine with one worker."
        )
    async with AsyncExitStack() as stack:
        # Its locks end with this process, because the engine stops after this block.
        turns = DeviceTurns.open(ctx.socket_dir)
        ctx.held_fds.append(turns.turn_fd)
        server.updates.turns = EngineTurns(turns, server.engine)
        if job.tasks.evaluation is None:
            yield str
            return
        # It loads the evaluator, which other workers do not need.
        from rollout_service.evaluator import shared_evaluations

        evaluations = shared_evaluations(ctx, server.engine, render, gateway)
        server.updates.evaluations = await stack.enter_async_context(evaluations)
        yield server.updates.evaluations.evaluator.doing


async def _serve(ctx: ServiceContext) -> None:
    job = ctx.job
    computes = not engine_part(job.rollout.engine).is_server
    prepare(first_threads(job.rollout.torch_threads), computes=computes)
    workflow = workflow_of(job)
    renders = make_renderers(job)
    gateway = make_gateway(ctx, trains=True)
    servers = {policy: _PolicyServer(ctx.of(policy), lambda: worker) for policy in renders}
    series = EngineMetrics(*(server.engine for server in servers.values()))
    name, first = next(iter(servers.items()))
    try:
        async with (
            sharing(ctx, first, renders[name], gateway) as doing,
            Client(ctx.buffer, job=job.job, role="rollout", name=ctx.name, access=ctx.keys) as buffer,
        ):
            await buffer.call(Arrived(ctx.name))
            worker = Worker(
                buffer,
                {
                    policy: PolicyEngine(
                        each.engine,
                        renders[policy],
                        sampling_of(each.job.rollout.sampling),
                        each.job.rollout.max_model_len,
                    )
                    for policy, each in servers.items()
                },
                workflow,
                job=job,
                name=ctx.name,
                gateway=gateway,
                first_failure_ends=ctx.inline,
            )
            loading = asyncio.gather(*(server.first_version() for server in servers.values()))
            serving = await unless_stopped(ctx.stop, loading)
            if serving is None:
                return
            engines = [server.engine for server in servers.values()]
            REGISTRY.register(series)
            board.figures = lambda: figures_of(engines, doing())
            ctx.ready()
            versions = [tag.label for tag in serving]
            log.info("rollout worker serves", engine=job.rollout.engine, versions=versions)
            await worker.run(ctx.stop, *(work for each in servers.values() for work in each.beside()))
            if worker.drained:
                log.info("rollout worker is drained")
                ctx.finished.set()
    finally:
        with suppress(KeyError):  # it never served
            REGISTRY.unregister(series)
        await gateway.close()
        for server in servers.values():
            await server.close()
