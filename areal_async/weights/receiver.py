"""A receiver's end of the weights plane: hear of snapshots, open them verified, acknowledge them.

    news = await receiver.next(serving, wait_ms=5000)
    snapshot = await receiver.open(news)           # brought to this host; every hash matched
    await receiver.ack(news.tag, stall_ms=12.0)    # after the swap

Promise (`versions_are_true`): `open` returns tensors only after every hash of exactly the announced snapshot
matched, here or in another process of this host (`verified.py`). After `ack` the publisher may overwrite the
files; what was opened stays as it is.
"""

from __future__ import annotations

import asyncio

from areal_async.base.addresses import Address
from areal_async.base.errors import SnapshotError
from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.schema import Welcome
from areal_async.rpc.secret import Access
from areal_async.rpc.weights_messages import AckSnapshot, NoNews, SnapshotNotice, WaitSnapshot
from areal_async.service.context import ServiceContext
from areal_async.weights.adapter import MergedWeights, Merger, is_adapter
from areal_async.weights.channels import ReceivingEnd, channel_of
from areal_async.weights.retention import Purpose
from areal_async.weights.snapshot import Snapshot, open_snapshot
from areal_async.weights.verified import HostRecords

VERIFIED = "verified"  # Folder in the shared memory of the run
ANSWER_S = 10.0  # What an answer may take beyond the wait that was asked for


class Receiver:
    """One receiver of the publisher at `address`, on one event loop."""

    def __init__(
        self,
        address: str | Address,
        *,
        job: str,
        name: str,
        access: Access,
        purpose: Purpose = "serve",
        channel: ReceivingEnd | None = None,
        tensors: bool = True,
        records: HostRecords | None = None,
        merger: Merger | None = None,
    ) -> None:
        """Create the receiver. `channel` brings the files to this host. With `tensors` False, snapshots are
        verified in place, for an engine that reads the directory. `records` avoid hashing files that another
        process of this host has hashed. `merger` merges a job's adapters into whole weights."""
        self._records = records
        self._name = name
        self._channel = channel if channel is not None else ReceivingEnd()
        self._tensors = tensors or merger is not None
        self._merger = merger
        self._purpose: Purpose = purpose
        self._client = Client(address, job=job, role=f"receiver-{purpose}", name=name, access=access)

    async def connect(self, timeout_s: float = 10.0) -> Welcome:
        return await self._client.connect(timeout_s)

    async def next(self, after: VersionTag | None, wait_ms: int = 0) -> SnapshotNotice | NoNews:
        """Return the next snapshot for this purpose that is newer than `after`, waiting at most `wait_ms`."""
        ask = WaitSnapshot(self._name, self._purpose, after, wait_ms, self._channel.makes_deltas)
        return await self._client.call(ask, timeout_s=ANSWER_S)

    async def open(self, notice: SnapshotNotice) -> Snapshot | MergedWeights:
        """Read and verify the announced snapshot, in a thread, after bringing it to this host if need be; an
        adapter is merged with the base.

        Raises `SnapshotError`; then `ack` with the error and ask again."""
        path = await self._channel.bring(notice, self._client)
        try:
            snapshot = await asyncio.to_thread(
                open_snapshot,
                path,
                manifest_hash=notice.manifest_hash,
                tensors=self._tensors,
                records=self._records,
            )
        except SnapshotError:
            self._channel.distrust(notice)
            raise
        if snapshot.tag != notice.tag:
            raise SnapshotError(f"{path} holds {snapshot.tag}, announced as {notice.tag}")
        if self._merger is not None and is_adapter(snapshot.manifest):
            return await self._merger.merged(snapshot, notice.manifest_hash)
        return snapshot

    async def ack(self, tag: VersionTag, stall_ms: float = 0.0, error: str = "") -> None:
        """Acknowledge that `tag` is served (or evaluated), or could not be, and that its files are no longer
        read."""
        message = AckSnapshot(self._name, self._purpose, tag, stall_ms, error)
        self._channel.served(tag, failed=bool(error))
        if self._merger is not None:
            self._merger.served(tag, failed=bool(error))
        await self._client.call(message, timeout_s=ANSWER_S)

    async def close(self) -> None:
        await self._client.close()
        await self._channel.close()
        if self._merger is not None:
            self._merger.close()


def make_receiver(ctx: ServiceContext, purpose: Purpose, *, name: str = "", tensors: bool = True) -> Receiver:
    """Return the receiver of this process, under the process's name or another. `tensors` False: its engine
    reads the directory itself. Raises `EndpointError`."""
    name = name or ctx.name
    merger = None
    if ctx.job.trainer.lora.rank:
        import torch  # adapters are merged here

        root = ctx.shm_dir / "merged" / ctx.node_id
        merger = Merger(ctx.job.model, getattr(torch, ctx.job.trainer.dtype), root, tensors=tensors)
    return Receiver(
        ctx.weights,
        job=ctx.job.job,
        name=name,
        access=ctx.keys,
        purpose=purpose,
        channel=channel_of(ctx.job).receiving_end(ctx, name),
        tensors=tensors,
        records=HostRecords(ctx.shm_dir / VERIFIED),
        merger=merger,
    )
