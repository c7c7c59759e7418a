"""The process of the trainer, or of one of its ranks. It creates the objects that the training loops use, and
closes them.

Publisher, run log and the policy's metrics exist only on rank 0. If a rank finds that another has died, it
waits until the supervisor ends the whole group, so that the supervisor can report which rank died first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from transformers.utils import logging as transformers_logging

from areal_async.base.device_turns import DeviceTurns
from areal_async.base.log import get_logger
from areal_async.base.loop_thread import in_thread
from areal_async.config.devices import first_threads, rank_device
from areal_async.config.job import JobConfig
from areal_async.models.accelerator import begin_on
from areal_async.rpc.client import SyncClient
from areal_async.service.context import ServiceContext
from areal_async.service.rank_group import LATE, LATE_START, OUT_OF_MEMORY, Note, tell
from areal_async.service.record import RunRecords, open_records
from trainer_service.backends.base import SleepingBackend, TrainingBackend
from trainer_service.checkpoint import Checkpoint, CheckpointReader
from trainer_service.checkpoint_store import CheckpointStore
from trainer_service.collectives import watched
from trainer_service.durable_files import companion_files
from trainer_service.errors import RankError
from trainer_service.loop.device_turns import TrainerTurns
from trainer_service.loop.from_files import FileTrainer
from trainer_service.loop.learner import OBJECTIVE_FILE, load_backend
from trainer_service.loop.rl import Beside, RlTrainer
from trainer_service.loop.samples import StepSamples
from trainer_service.publishing.publisher import Publisher, make_publisher, root_of
from trainer_service.publishing.writing import PieceWriter
from trainer_service.ranks import GIVE_UP_S, Ranks, join_ranks, lost_peer
from trainer_service.saved_states import TrainingRun, left_in_memory
from trainer_service.trained_model import companions_of

BUFFER_PATIENCE_S = 600.0
"""Longest time that one call waits for an unavailable buffer. It is long because giving up would lose the
steps since the last checkpoint."""

MEETING_SHARE = 0.5
"""Share of `supervisor.ready_s` for which a rank waits for the others to start."""

log = get_logger("trainer")


async def main(ctx: ServiceContext) -> None:
    """Train the job of `ctx` to its end in a separate thread, while this event loop handles signals.

    The thread is a new daemon thread and not one of the event loop's pool, because a process that stops must
    not wait for a long step."""
    await asyncio.wrap_future(in_thread(lambda: train(ctx), "train"))


def train(ctx: ServiceContext) -> None:
    """Train to the job's end. This call blocks. Raises `ArealError`."""
    whole, ctx = ctx, ctx.of(ctx.place.policy)
    section = ctx.job.trainer
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(first_threads(section.torch_threads))
    torch.manual_seed(ctx.job.seed)
    ctx.run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ranks = _meet(ctx)
        stack.callback(ranks.leave)
        stack.enter_context(watched(ranks))
        # Closing may wait for a lost rank, so the supervisor is told about an error before anything closes.
        closing = stack.enter_context(ExitStack())
        stack.enter_context(_explained(ranks))
        turns = None
        if ctx.job.placement.share is not None:
            # They stay open until the process ends, because its memory on the device does too.
            locks = DeviceTurns.open(ctx.socket_dir)
            turns = TrainerTurns(locks, ctx.stopping, ctx.job.buffer.max_staleness)
            if not turns.take():  # before anything is on the device
                return
        backend = load_backend(ctx.job, ranks)
        if turns is not None:
            turns.backend = cast("SleepingBackend", backend)
        run_log: RunRecords | None = None
        if ranks.first:
            run_log = open_records(whole)
            closing.callback(run_log.close)
        log.info("model loaded", model=str(ctx.job.model), ranks=ranks.world, dtype=section.resolved_dtype)
        places = {"run_dir": ctx.run_dir, "shm_dir": ctx.shm_dir}
        training = TrainingRun(
            ctx.job, ranks, backend, run_log=run_log, stopping=ctx.stopping, turns=turns, **places
        )
        if ctx.job.kind == "rl":
            finished = _rl(ctx, training, closing, whole.job)
        else:
            restored, left = _newest(ctx, ranks, backend)
            trainer = FileTrainer(training)
            ctx.ready()  # only now, because a restart cannot help a file without valid examples
            finished = trainer.run(left or restored)
        log.info("training ends", finished=finished)


def _meet(ctx: ServiceContext) -> Ranks:
    """Join the other ranks. If a rank is missing, this is reported early enough that all ranks can still
    restart within `supervisor.ready_s`."""
    section, start_s = ctx.job.trainer, MEETING_SHARE * ctx.job.supervisor.ready_s
    device = rank_device(section.device, ctx.gpu_index)
    begin_on(device, dtype=section.resolved_dtype)
    try:
        return join_ranks(
            ctx.index,
            section.ranks,
            device=device,
            meeting=ctx.meeting,
            timeout_s=section.collective_s,
            start_s=start_s,
            host=ctx.host,
        )
    except RankError as error:
        _name_late(error.late, f"{LATE_START} within {start_s:g} s")
        raise


def _name_late(ranks: Sequence[int], how: str) -> None:
    """Report to the supervisor for which ranks this rank has waited in vain.

    The supervisor then kills these ranks, and this process too. This process must not exit before that,
    because the supervisor would treat its exit as the cause."""
    tell(Note(f"{how} and was killed", tuple(ranks)))
    time.sleep(GIVE_UP_S)


@contextmanager
def _explained(ranks: Ranks) -> Iterator[None]:
    """Report to the supervisor if an error was caused by the death of this rank or of another."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        tell(Note(f"{OUT_OF_MEMORY} ({str(error) or type(error).__name__})"))
        raise
    except Exception as error:
        if ranks.world == 1 or not lost_peer(error):
            raise
        log.warning("another rank is gone, or does not come", error=str(error))
        missing = ranks.missing()  # if a rank has died, the supervisor ends this process meanwhile
        if not missing or isinstance(error, RankError):
            raise
        late = f"{LATE} within {ranks.timeout_s:g} s"
        _name_late(missing, late)
        names = ", ".join(map(str, missing))
        raise RankError(f"rank {names} of the trainer {late} (trainer.collective_s)") from error


def _newest(
    ctx: ServiceContext, ranks: Ranks, backend: TrainingBackend
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Return the checkpoint to resume from, and a newer state that a trainer of this run left in memory."""

    def reads(files: Collection[str]) -> Collection[str]:
        return {*backend.reads(files), *({OBJECTIVE_FILE} & {*files})}

    reader = CheckpointReader(ctx.job.job, ctx.job.policy, ranks, reads)
    restored = reader.newest_of_all(ctx.run_dir / "checkpoints", CheckpointStore.of(ctx.job))
    left = left_in_memory(ctx.shm_dir, reader, restored)
    for found, what in ((restored, "checkpoint"), (left, "state in memory")):
        if found is not None:
            log.info(f"{what} to go on from", step=found.manifest.step, folder=str(found.folder))
    return restored, left


def _rl(ctx: ServiceContext, training: TrainingRun, closing: ExitStack, whole: JobConfig) -> bool:
    ranks, backend, run_log = training.ranks, training.backend, training.run_log
    files = companion_files(ctx.job.model, ctx.job.trainer.resolved_dtype)
    restored, left = _newest(ctx, ranks, backend)
    job, name, keys = ctx.job.job, ctx.name, ctx.keys
    buffer = SyncClient(
        ctx.buffer, job=job, role="trainer", name=name, access=keys, timeout_s=BUFFER_PATIENCE_S
    )
    closing.callback(buffer.close)
    buffer.connect()
    publisher: Publisher | PieceWriter
    if ranks.first:
        publisher = made = make_publisher(
            ctx, files=companions_of(ctx.job, backend, files), tied=backend.tied, group=ranks.side()
        )
        made.start()
        # Keep the last snapshot, because a worker may still read it. The run's end removes it.
        closing.callback(made.close, remove=False)
    else:
        publisher = PieceWriter(root_of(ctx), ranks.side(), tied=backend.tied)
        closing.callback(publisher.close)
    samples = None
    if run_log is not None:
        folder = f"policies/{ctx.job.policy}" if whole.policies else ""
        samples = StepSamples(ctx.job, run_log, buffer, folder)
    beside = Beside.of(whole, ctx.job.policy)
    trainer = RlTrainer(training, buffer, files=files, publisher=publisher, beside=beside, samples=samples)
    return trainer.run(name=ctx.name, ready=ctx.ready, restored=restored, left=left)
