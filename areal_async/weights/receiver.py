"""The receiver of snapshots: it waits for a snapshot, opens and verifies it, and acknowledges it.

    news = await receiver.next(serving, wait_ms=5000)
    snapshot = await receiver.open(news)           # brought to this host; every hash matched
    await receiver.ack(news.tag, stall_ms=12.0)    # after the swap

Promise (`versions_are_true`): `open` returns tensors only after every hash of the announced snapshot matched.
After `ack` the publisher may overwrite the files. Opened tensors do not change.
"""

from __future__ import annotations

import asyncio

from areal_async.base.errors import SnapshotError
from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.schema import Welcome
from areal_async.rpc.weights_messages import AckSnapshot, NoNews, SnapshotNotice, WaitSnapshot
from areal_async.service.context import ServiceContext
from areal_async.weights.adapter import Merger, is_adapter
from areal_async.weights.channels import ReceivingEnd, channel_of
from areal_async.weights.retention import Purpose
from areal_async.weights.snapshot import Snapshot, open_snapshot

ANSWER_S = 10.0  # seconds that an answer may take beyond the requested wait


class Receiver:
    """One receiver, called `name`, on one event loop. It gets snapshots from the publisher to which `client`
    is connected. Closing the receiver closes `client` and `channel`."""

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        purpose: Purpose = "serve",
        channel: ReceivingEnd | None = None,
        tensors: bool = True,
        merger: Merger | None = None,
    ) -> None:
        """Create a receiver.

        `channel` brings the files to this host. If `tensors` is False, snapshots are verified in place, for
        an engine that reads the directory. `merger` merges adapters into whole weights, if the job trains
        adapters.
        """
        self._name = name
        self._channel = channel if channel is not None else ReceivingEnd()
        self._tensors = tensors or merger is not None
        self._merger = merger
        self._purpose: Purpose = purpose
        self._client = client

    async def connect(self, timeout_s: float = 10.0) -> Welcome:
        return await self._client.connect(timeout_s)

    async def next(self, after: VersionTag | None, wait_ms: int = 0) -> SnapshotNotice | NoNews:
        """Return the next snapshot that is newer than `after` and offered for the receiver's purpose. Waits
        at most `wait_ms`."""
        ask = WaitSnapshot(self._name, self._purpose, after, wait_ms, self._channel.makes_deltas)
        return await self._client.call(ask, timeout_s=ANSWER_S)

    async def open(self, notice: SnapshotNotice) -> Snapshot:
        """Bring the announced snapshot to this host if necessary, then read and verify it in a thread.

        An adapter is merged with the base. Raises `SnapshotError`. The caller then calls `ack` with the error
        and tries again.
        """
        path = await self._channel.bring(notice, self._client)
        try:
            snapshot = await asyncio.to_thread(
                open_snapshot, path, manifest_hash=notice.manifest_hash, tensors=self._tensors
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
        """Acknowledge that `tag` is served (or evaluated), or report the error. The caller must not read the
        snapshot's files any more."""
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
    """Return the receiver of this process, under the process's name or under `name`.

    Set `tensors` to False if the engine reads the directory itself. Raises `EndpointError`.
    """
    name = name or ctx.name
    merger = None
    if ctx.job.trainer.lora.rank:
        import torch  # this process merges adapters

        root = ctx.shm_dir / "merged" / ctx.node_id
        merger = Merger(ctx.job.model, getattr(torch, ctx.job.trainer.resolved_dtype), root, tensors=tensors)
    return Receiver(
        Client(ctx.weights, job=ctx.job.job, role=f"receiver-{purpose}", name=name, access=ctx.keys),
        name,
        purpose=purpose,
        channel=channel_of(ctx.job).receiving_end(ctx, name),
        tensors=tensors,
        merger=merger,
    )
