"""One rank of a trainer whose ranks are on hosts that share nothing: a script for each rank of a test.

python hosts_process.py RANK WORLD HOST MODEL BATCHES FOLDER STORE

It is the process that the supervisor starts, but for a buffer whose batches are on disk. HOST is the name of
its host and of the folder below FOLDER that stands for that host's disk and shared memory. STOP_AFTER in the
environment ends it as a stop would, after so many steps. Rank 0 prints the step that it began with.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_async.base.events import arm
from areal_async.config.job import JobConfig
from areal_async.rpc.messages import NextBatch, Waiting
from areal_async.service.context import ServiceContext
from areal_async.service.rank_group import Meeting
from tests.contexts import context_for_test
from tests.unit.trainer.rank_process import RecordedBuffer, job_of
from trainer_service import main, saved_states
from trainer_service.loop.rl import RlTrainer

STEPS = 6


def job_on(model: Path, folder: Path, store: str, ranks: int) -> JobConfig:
    """The job, as it is on the host of `folder`."""
    job = job_of(model, folder / "run", steps=STEPS, ranks=ranks)
    values = job.model_dump(mode="json")
    values["checkpoint"] |= {"every_steps": 2, "keep": 4, "store": store}
    return JobConfig.model_validate(values)


class StoppingBuffer(RecordedBuffer):
    """Stops the trainer of `ctx` once it has trained as many steps as it was told to."""

    def __init__(self, root: Path, ctx: ServiceContext) -> None:
        super().__init__(root)
        self._ctx = ctx
        self._last = int(os.environ.get("STOP_AFTER", STEPS))

    def connect(self) -> None:
        return

    def close(self) -> None:
        return

    def exchange(self, request: Any, *, attachments: Any = ()) -> Any:
        if isinstance(request, NextBatch) and request.step == self._last:
            self._ctx.stopping.set()
            return Waiting("test", "it is to stop"), []
        return super().exchange(request, attachments=attachments)


class PatientTrainer(RlTrainer):
    """Begins no step while a state is being written, so that each step leaves its own."""

    def _one_step(self, step: int) -> bool:
        self._states.wait()
        return super()._one_step(step)


def run(
    rank: int, world: int, host: str, model: Path, batches: Path, folder: Path, store: str
) -> RecordedBuffer:
    here = folder / host
    name = f"trainer-{rank}" if rank else "trainer"
    ctx = context_for_test(job_on(model, here, store, world), here, "trainer", name, index=rank, node_id=host)
    ctx = replace(ctx, meeting=Meeting.from_environment())
    buffer = StoppingBuffer(batches, ctx)
    saved_states.MEMORY_SHARE = 1e9  # a state after each step
    main.RlTrainer = PatientTrainer  # type: ignore[misc]
    main.SyncClient = lambda *_, **__: buffer  # type: ignore[misc, assignment]
    main.train(ctx)
    return buffer


if __name__ == "__main__":
    number, size, place, *rest = sys.argv[1:]
    if os.environ.get("KILL_RANK") == number:
        arm(os.environ["KILL_AT"])
    try:
        found = run(int(number), int(size), place, *map(Path, rest[:3]), rest[3])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if number == "0":
        print(found.calls[0][1], flush=True)
    os._exit(0)
