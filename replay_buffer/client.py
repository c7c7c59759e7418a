"""The buffer as its clients see it: one method per message, replies as typed values.

    async with BufferClient(endpoint, job="job", role="rollout", name="rollout-0", access=secret) as buffer:
        leases = await buffer.lease("rollout-0", 8, serving, wait_ms=1000)

`SyncBufferClient` is the same for code that blocks. Every method may raise the errors of the RPC client:
`FaultError` for a refusal (its `kind` says what may be done), `RpcTimeout` when no answer came within
`timeout_s` beyond the wait that was asked for. A buffer that is away or rebuilding is waited for inside that
time; every call may be repeated after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from typing_extensions import Buffer

from areal_async.rpc.messages import (
    Batch,
    BufferStats,
    Claims,
    EpisodeVerdict,
    HeartbeatAck,
    Leases,
    PutAck,
    TrainerOpened,
    VerdictAck,
    VersionTag,
    Waiting,
)
from areal_async.rpc.rpc import Access, Client, SyncClient
from replay_buffer import calls
from replay_buffer.calls import Call

TIMEOUT_S = 60.0
"""Patience with a buffer that does not answer, beyond the wait that was asked for."""

T = TypeVar("T")


class BufferClient:
    """Belongs to one event loop; its calls may run concurrently."""

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        role: str,
        name: str,
        access: Access,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._client = Client(endpoint, job=job, role=role, name=name, access=access)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self, timeout_s: float = 10.0) -> None:
        await self._client.connect(timeout_s)

    async def close(self) -> None:
        await self._client.close()

    async def arrived(self, name: str) -> None:
        """What an earlier process of this name had leased or claimed is over."""
        await self._do(calls.arrived(name))

    async def lease(self, worker: str, capacity: int, serving: VersionTag, *, wait_ms: int = 0) -> Leases:
        """Groups to generate, at most `capacity`."""
        return await self._do(calls.lease(worker, capacity, serving, wait_ms))

    async def heartbeat(self, worker: str, lease_ids: Sequence[str], serving: VersionTag) -> HeartbeatAck:
        """Renew leases; those in `lost` are over."""
        return await self._do(calls.heartbeat(worker, lease_ids, serving))

    async def release(self, worker: str, lease_id: str, reason: str, *, failed: bool = False) -> None:
        """End a lease early; its missing samples are queued again. `failed`: by what its episodes do."""
        await self._do(calls.release(worker, lease_id, reason, failed=failed))

    async def drain(self, worker: str, reason: str) -> None:
        """Lease `worker` nothing more: it finishes what it has, or hands it back."""
        await self._do(calls.drain(worker, reason))

    async def put(self, lease_id: str, group_id: str, episodes: Mapping[int, Buffer]) -> PutAck:
        """Store codec blobs by sample. They must not change until this returns."""
        return await self._do(calls.put(lease_id, group_id, episodes))

    async def claim(
        self, scorer: str, max_episodes: int, *, wait_ms: int = 0, holds: Collection[str] | None = None
    ) -> tuple[Claims, list[memoryview]]:
        """Episodes to score, and their codec blobs in the same order. `holds`: the claims worked on."""
        return await self._do(calls.claim(scorer, max_episodes, wait_ms, holds))

    async def verdicts(self, scorer: str, verdicts: Sequence[EpisodeVerdict]) -> VerdictAck:
        """Verdicts on claimed episodes."""
        return await self._do(calls.verdicts(scorer, verdicts))

    async def open_trainer(
        self, trainer: str, step: int, ledger: bytes = b"", after_epoch: int = 0
    ) -> TrainerOpened:
        """Become the trainer. `ledger` is the copy in the checkpoint of `step`, empty at the start."""
        return await self._do(calls.open_trainer(trainer, step, ledger, after_epoch))

    async def next_batch(self, epoch: int, step: int, *, wait_ms: int = 0) -> Batch | Waiting:
        """The manifest of a step, or what it waits for."""
        return await self._do(calls.next_batch(epoch, step, wait_ms))

    async def fetch(self, episode_ids: Sequence[str]) -> list[memoryview]:
        """Codec blobs in the order of the ids."""
        return await self._do(calls.fetch(episode_ids))

    async def commit(self, epoch: int, step: int, same_as: Sequence[int] = ()) -> None:
        """Step `step` is trained, its snapshot published; it equals those of the epochs `same_as`."""
        return await self._do(calls.commit(epoch, step, same_as))

    async def export_ledger(self, epoch: int, step: int) -> bytes:
        """The ledger copy for the checkpoint after `step` steps."""
        return await self._do(calls.export_ledger(epoch, step))

    async def checkpointed(self, epoch: int, step: int) -> None:
        """The checkpoint after `step` steps is on disk."""
        return await self._do(calls.checkpointed(epoch, step))

    async def stats(self) -> BufferStats:
        """Counts and figures."""
        return await self._do(calls.stats())

    async def _do(self, call: Call[T]) -> T:
        reply, attachments = await self._client.call(
            call.message, timeout_s=self._timeout_s + call.wait_ms / 1000, attachments=call.attachments
        )
        return call.read(reply, attachments)


class SyncBufferClient:
    """Blocks; any thread may call."""

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        role: str,
        name: str,
        access: Access,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._client = SyncClient(endpoint, job=job, role=role, name=name, access=access)
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self, timeout_s: float = 10.0) -> None:
        self._client.connect(timeout_s)

    def close(self) -> None:
        self._client.close()

    def arrived(self, name: str) -> None:
        """What an earlier process of this name had leased or claimed is over."""
        self._do(calls.arrived(name))

    def lease(self, worker: str, capacity: int, serving: VersionTag, *, wait_ms: int = 0) -> Leases:
        """Groups to generate, at most `capacity`."""
        return self._do(calls.lease(worker, capacity, serving, wait_ms))

    def heartbeat(self, worker: str, lease_ids: Sequence[str], serving: VersionTag) -> HeartbeatAck:
        """Renew leases; those in `lost` are over."""
        return self._do(calls.heartbeat(worker, lease_ids, serving))

    def release(self, worker: str, lease_id: str, reason: str, *, failed: bool = False) -> None:
        """End a lease early; its missing samples are queued again. `failed`: by what its episodes do."""
        return self._do(calls.release(worker, lease_id, reason, failed=failed))

    def drain(self, worker: str, reason: str) -> None:
        """Lease `worker` nothing more: it finishes what it has, or hands it back."""
        return self._do(calls.drain(worker, reason))

    def put(self, lease_id: str, group_id: str, episodes: Mapping[int, Buffer]) -> PutAck:
        """Store codec blobs by sample. They must not change until this returns."""
        return self._do(calls.put(lease_id, group_id, episodes))

    def claim(
        self, scorer: str, max_episodes: int, *, wait_ms: int = 0, holds: Collection[str] | None = None
    ) -> tuple[Claims, list[memoryview]]:
        """Episodes to score, and their codec blobs in the same order. `holds`: the claims worked on."""
        return self._do(calls.claim(scorer, max_episodes, wait_ms, holds))

    def verdicts(self, scorer: str, verdicts: Sequence[EpisodeVerdict]) -> VerdictAck:
        """Verdicts on claimed episodes."""
        return self._do(calls.verdicts(scorer, verdicts))

    def open_trainer(
        self, trainer: str, step: int, ledger: bytes = b"", after_epoch: int = 0
    ) -> TrainerOpened:
        """Become the trainer. `ledger` is the copy in the checkpoint of `step`, empty at the start."""
        return self._do(calls.open_trainer(trainer, step, ledger, after_epoch))

    def next_batch(self, epoch: int, step: int, *, wait_ms: int = 0) -> Batch | Waiting:
        """The manifest of a step, or what it waits for."""
        return self._do(calls.next_batch(epoch, step, wait_ms))

    def fetch(self, episode_ids: Sequence[str]) -> list[memoryview]:
        """Codec blobs in the order of the ids."""
        return self._do(calls.fetch(episode_ids))

    def commit(self, epoch: int, step: int, same_as: Sequence[int] = ()) -> None:
        """Step `step` is trained, its snapshot published."""
        return self._do(calls.commit(epoch, step, same_as))

    def export_ledger(self, epoch: int, step: int) -> bytes:
        """The ledger copy for the checkpoint after `step` steps."""
        return self._do(calls.export_ledger(epoch, step))

    def checkpointed(self, epoch: int, step: int) -> None:
        """The checkpoint after `step` steps is on disk."""
        return self._do(calls.checkpointed(epoch, step))

    def stats(self) -> BufferStats:
        """Counts and figures."""
        return self._do(calls.stats())

    def _do(self, call: Call[T]) -> T:
        reply, attachments = self._client.call(
            call.message, timeout_s=self._timeout_s + call.wait_ms / 1000, attachments=call.attachments
        )
        return call.read(reply, attachments)
