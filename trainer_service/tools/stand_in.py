"""A buffer that is only a recording: it answers the trainer's messages and nobody else's.

Promises: the trainer is given the recorded batches in their order and the recorded bytes, whatever it asks in
between; after the last step that is to be replayed, or after `stop`, it is given nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from areal_async.errors import ArealError, FaultError
from areal_async.rpc.messages import (
    Checkpointed,
    Commit,
    ExportLedger,
    Fetch,
    Fetched,
    LedgerCopy,
    Message,
    NextBatch,
    Ok,
    OpenTrainer,
    TrainerOpened,
    Waiting,
)
from areal_async.rpc.server import Answer, Peer
from trainer_service.data.recording import RecordedStep
from trainer_service.recordings import Recording


class StandIn:
    """`handle` is the handler of an RPC server. `on_commit` is called with each step that was trained, before
    the trainer is told that it is committed."""

    def __init__(
        self, recording: Recording, last: int, on_commit: Callable[[RecordedStep, int], None]
    ) -> None:
        self.over = False
        """Whether the trainer has had all it will be given."""
        self.error: ArealError | None = None
        """Why the recording could not be given out."""
        self._recording = recording
        self._last = last
        self._on_commit = on_commit
        self._current: RecordedStep | None = None

    def stop(self) -> None:
        """Give out nothing more."""
        self.over = True

    async def handle(self, peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        match message:
            case OpenTrainer():
                return TrainerOpened(message.after_epoch + 1, message.step)
            case NextBatch():
                return self._next(message)
            case Fetch():
                return self._fetch(message)
            case Commit():
                if self._current is not None and self._current.batch.step == message.step:
                    self._on_commit(self._current, message.epoch)
                return Ok()
            case ExportLedger():
                # Empty: a checkpoint of a replay has no ledger, and no job can go on from it.
                return LedgerCopy(message.step), [b""]
            case Checkpointed():
                return Ok()
        raise FaultError("invalid", f"a recording does not answer {type(message).__name__}")

    def _next(self, message: NextBatch) -> Message:
        if message.step > self._last:
            self.stop()
        if self.over:
            return Waiting("recording", "there is nothing more to replay")
        if self._current is None or self._current.batch.step != message.step:
            try:
                self._current = self._recording.read(message.step)
            except ArealError as error:
                self.error = error
                self.stop()
                return Waiting("recording", str(error))
        return replace(self._current.batch, epoch=message.epoch)

    def _fetch(self, message: Fetch) -> Answer:
        blobs = self._current.blobs if self._current is not None else {}
        missing = [name for name in message.episode_ids if name not in blobs]
        if missing:
            raise FaultError("invalid", f"episode {missing[0]} is not in the batch of this step")
        return Fetched(message.episode_ids), [blobs[name] for name in message.episode_ids]
