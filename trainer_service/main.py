"""The trainer's process: builds what the loops need and takes it down again."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import ExitStack

import torch
from transformers.utils import logging as transformers_logging

from areal_async.rpc.client import SyncClient
from areal_async.runtime.context import ServiceContext
from areal_async.runtime.log import get_logger
from areal_async.status.record import RunLog
from areal_async.weights.publisher import make_publisher
from trainer_service.backends.base import TrainingBackend
from trainer_service.checkpoint import newest_usable
from trainer_service.disk import companion_files
from trainer_service.loop.learner import load_backend
from trainer_service.loop.rl import RlTrainer
from trainer_service.loop.sft import SftTrainer
from trainer_service.ranks import Ranks, join_ranks

BUFFER_PATIENCE_S = 600.0
"""How long one call waits for a buffer that is away: giving up would cost the steps since the checkpoint."""

log = get_logger("trainer")


async def main(ctx: ServiceContext) -> None:
    """Train the job of `ctx` to its end, in a thread of its own: the loop of this one answers signals.

    A daemon thread, not one of the loop's pool: a process told to stop must not wait for a long step."""
    ended: Future[None] = Future()
    ended.set_running_or_notify_cancel()  # a service that is cancelled does not wait for its end

    def work() -> None:
        try:
            train(ctx)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=work, name="train", daemon=True).start()
    await asyncio.wrap_future(ended)


def train(ctx: ServiceContext) -> None:
    """Train to the job's end; blocking. Raises `ArealError`."""
    section = ctx.job.trainer
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(section.torch_threads)
    torch.manual_seed(ctx.job.seed)
    ctx.run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ranks = join_ranks(0, 1, device=section.device)
        stack.callback(ranks.leave)
        backend = load_backend(ctx.job, ranks)
        run_log = stack.enter_context(RunLog(ctx.run_log))
        log.info("model loaded", model=str(ctx.job.model), ranks=ranks.world, dtype=section.dtype)
        if ctx.job.kind == "sft":
            ctx.ready()
            finished = _sft(ctx, ranks, backend, run_log)
        else:
            finished = _rl(ctx, ranks, backend, run_log, stack)
        log.info("training ends", finished=finished)


def _rl(
    ctx: ServiceContext, ranks: Ranks, backend: TrainingBackend, run_log: RunLog, stack: ExitStack
) -> bool:
    files = companion_files(ctx.job.model, ctx.job.trainer.dtype)
    restored = newest_usable(ctx.run_dir / "checkpoints", job=ctx.job.job, policy=ctx.job.policy)
    if restored is not None:
        log.info("going on from a checkpoint", step=restored.manifest.step, folder=str(restored.folder))
    buffer = stack.enter_context(
        SyncClient(
            ctx.buffer_endpoint,
            job=ctx.job.job,
            role="trainer",
            name=ctx.name,
            access=ctx.secret,
            timeout_s=BUFFER_PATIENCE_S,
        )
    )
    publisher = make_publisher(ctx, files=files, tied=backend.tied)
    publisher.start()
    # What is left goes with the run's shared memory: a worker may still be reading the last snapshot.
    stack.callback(publisher.close, remove=False)
    trainer = RlTrainer(
        ctx.job,
        ranks,
        backend,
        buffer,
        run_dir=ctx.run_dir,
        files=files,
        publisher=publisher,
        run_log=run_log,
        stopping=ctx.stopping,
    )
    return trainer.run(name=ctx.name, ready=ctx.ready, restored=restored)


def _sft(ctx: ServiceContext, ranks: Ranks, backend: TrainingBackend, run_log: RunLog) -> bool:
    trainer = SftTrainer(ctx.job, ranks, backend, run_dir=ctx.run_dir, run_log=run_log, stopping=ctx.stopping)
    return trainer.run()
