"""Services of a run that trains on recorded batches: the supervisor and the trainer are real, the buffer
serves a recording and the others do nothing.

    areal_async.runner.run_job.run_job(job, modules=MODULES | {"trainer": "trainer_service"})

The recording's run folder is named by the environment variable `AREAL_RECORDING`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from areal_async.rpc.messages import (
    Checkpointed,
    Commit,
    ExportLedger,
    Fetch,
    Fetched,
    LedgerCopy,
    NextBatch,
    OpenTrainer,
    TrainerOpened,
    Waiting,
)
from areal_async.rpc.schema import Ok
from areal_async.rpc.server import Answer, Peer, Server
from areal_async.service.context import ServiceContext
from areal_async.service.main import run_service
from trainer_service.data.recording import Recording

VARIABLE = "AREAL_RECORDING"
MODULES = dict.fromkeys(("buffer", "reward", "rollout", "evaluator"), "recorded_services")


class RecordedBuffer:
    """The trainer's side of a buffer, whose batches are on disk."""

    def __init__(self, run_dir: Path) -> None:
        self._recording = Recording(run_dir)
        self._blobs: dict[str, bytes] = {}

    async def handle(self, peer: Peer, request: object, attachments: list[memoryview]) -> Answer:
        match request:
            case OpenTrainer(step=step):
                return TrainerOpened(1, step)
            case NextBatch(step=step):
                if step not in self._recording.steps:
                    return Waiting("recording", f"step {step} is not recorded")
                found = self._recording.read(step)
                self._blobs = dict(found.blobs)
                return found.batch
            case Fetch(episode_ids=names):
                return Fetched(names), [self._blobs[name] for name in names]
            case ExportLedger(step=step):
                return LedgerCopy(step), [b"a recording has no ledger"]
            case Commit() | Checkpointed():
                return Ok()
            case _:
                raise NotImplementedError(type(request).__name__)


async def main(ctx: ServiceContext) -> None:
    server = None
    if ctx.role == "buffer":
        buffer = RecordedBuffer(Path(os.environ[VARIABLE]))
        server = Server(
            ctx.buffer.endpoint, service="buffer", job=ctx.job.job, access=ctx.keys, handler=buffer.handle
        )
        await server.start()
    ctx.ready()
    await ctx.stop.wait()
    if server is not None:
        await server.stop()


if __name__ == "__main__":
    name = sys.argv[sys.argv.index("--name") + 1]
    run_service(name.partition("-")[0], main)  # type: ignore[arg-type]
