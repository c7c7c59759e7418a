"""Every call on the buffer as a value: what is sent, how long the buffer may wait, how the reply is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from typing_extensions import Buffer

from areal_async.errors import ProtocolError
from areal_async.rpc.messages import (
    Arrived,
    Batch,
    BufferStats,
    Checkpointed,
    Claim,
    Claims,
    Commit,
    Drain,
    EpisodeVerdict,
    ExportLedger,
    Fetch,
    Fetched,
    Heartbeat,
    HeartbeatAck,
    Lease,
    Leases,
    LedgerCopy,
    Message,
    NextBatch,
    Ok,
    OpenTrainer,
    PutAck,
    PutEpisodes,
    PutVerdicts,
    Release,
    Stats,
    TrainerOpened,
    VerdictAck,
    VersionTag,
    Waiting,
)

T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Call(Generic[T]):
    message: Message
    read: Callable[[Message, list[memoryview]], T]
    wait_ms: int = 0
    attachments: Sequence[Buffer] = ()


def expect(reply: Message, kind: type[M]) -> M:
    """`reply`, which must be of `kind`; raises `ProtocolError`."""
    if not isinstance(reply, kind):
        raise ProtocolError(f"the buffer answered {type(reply).__name__} where {kind.__name__} was due")
    return reply


def _reply(kind: type[M]) -> Callable[[Message, list[memoryview]], M]:
    return lambda reply, _: expect(reply, kind)


def _done(reply: Message, _: list[memoryview]) -> None:
    expect(reply, Ok)


def lease(worker: str, capacity: int, serving: VersionTag, wait_ms: int) -> Call[Leases]:
    return Call(Lease(worker, capacity, serving, wait_ms), _reply(Leases), wait_ms)


def heartbeat(worker: str, lease_ids: Sequence[str], serving: VersionTag) -> Call[HeartbeatAck]:
    return Call(Heartbeat(worker, list(lease_ids), serving), _reply(HeartbeatAck))


def arrived(name: str) -> Call[None]:
    return Call(Arrived(name), _done)


def release(worker: str, lease_id: str, reason: str, *, failed: bool = False) -> Call[None]:
    return Call(Release(worker, lease_id, reason, failed), _done)


def drain(worker: str, reason: str) -> Call[None]:
    return Call(Drain(worker, reason), _done)


def put(lease_id: str, group_id: str, episodes: Mapping[int, Buffer]) -> Call[PutAck]:
    message = PutEpisodes(lease_id, group_id, list(episodes))
    return Call(message, _reply(PutAck), attachments=list(episodes.values()))


def claim(
    scorer: str, max_episodes: int, wait_ms: int, holds: Collection[str] | None
) -> Call[tuple[Claims, list[memoryview]]]:
    message = Claim(scorer, max_episodes, wait_ms, None if holds is None else list(holds))
    return Call(message, lambda reply, blobs: (expect(reply, Claims), blobs), wait_ms)


def verdicts(scorer: str, items: Sequence[EpisodeVerdict]) -> Call[VerdictAck]:
    return Call(PutVerdicts(scorer, list(items)), _reply(VerdictAck))


def open_trainer(trainer: str, step: int, ledger: bytes, after_epoch: int) -> Call[TrainerOpened]:
    attachments = [ledger] if ledger else []
    return Call(OpenTrainer(trainer, step, after_epoch), _reply(TrainerOpened), attachments=attachments)


def next_batch(epoch: int, step: int, wait_ms: int) -> Call[Batch | Waiting]:
    def read(reply: Message, _: list[memoryview]) -> Batch | Waiting:
        return reply if isinstance(reply, Waiting) else expect(reply, Batch)

    return Call(NextBatch(epoch, step, wait_ms), read, wait_ms)


def fetch(episode_ids: Sequence[str]) -> Call[list[memoryview]]:
    def read(reply: Message, blobs: list[memoryview]) -> list[memoryview]:
        expect(reply, Fetched)
        return blobs

    return Call(Fetch(list(episode_ids)), read)


def commit(epoch: int, step: int, same_as: Sequence[int]) -> Call[None]:
    return Call(Commit(epoch, step, list(same_as)), _done)


def export_ledger(epoch: int, step: int) -> Call[bytes]:
    def read(reply: Message, blobs: list[memoryview]) -> bytes:
        expect(reply, LedgerCopy)
        return bytes(blobs[0])

    return Call(ExportLedger(epoch, step), read)


def checkpointed(epoch: int, step: int) -> Call[None]:
    return Call(Checkpointed(epoch, step), _done)


def stats() -> Call[BufferStats]:
    return Call(Stats(), _reply(BufferStats))
