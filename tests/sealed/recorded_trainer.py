"""A rank of a trainer that trains the recorded batches on its host instead of a buffer's: a module for the
trainer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_async.service.main import run_service
from tests.unit.trainer.rank_process import RecordedBuffer
from trainer_service import main as trainer

BATCHES = "/tmp/batches"


class OpenedBuffer(RecordedBuffer):
    """It is left as a client is."""

    def connect(self) -> None:
        return

    def close(self) -> None:
        return


def recorded(*_: Any, **__: Any) -> OpenedBuffer:
    return OpenedBuffer(Path(BATCHES))


if __name__ == "__main__":
    trainer.SyncClient = recorded  # type: ignore[misc, assignment]
    run_service("trainer", trainer.main)
