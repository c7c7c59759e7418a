"""A receiver's end of the weights plane: hear of snapshots, open them verified, acknowledge them.

    receiver = Receiver(endpoint, job=job, name="rollout-0", purpose="serve")
    await receiver.connect()
    news = await receiver.next(serving, wait_ms=5000)
    if isinstance(news, SnapshotNotice):
        snapshot = await receiver.open(news)       # every hash matched, in memory of this process
        …                                          # swap
        await receiver.ack(news.tag, stall_ms=12.0)

Promise (`versions_are_true`): `open` returns tensors only after every hash of exactly the announced
snapshot matched. After `ack` the publisher may overwrite the files; what was opened stays as it is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from areal_async.errors import ProtocolError, SnapshotError
from areal_async.weights.shelf import Purpose
from areal_async.weights.snapshot import Snapshot, open_snapshot
from areal_async.wire.messages import AckSnapshot, NoNews, SnapshotNotice, VersionTag, WaitSnapshot, Welcome
from areal_async.wire.rpc import Client, CurveKeys

ANSWER_S = 10.0
"""What an answer may take beyond the wait that was asked for."""


class Receiver:
    """One receiver of the publisher at `endpoint`, on one event loop."""

    def __init__(
        self, endpoint: str, *, job: str, name: str, purpose: Purpose = "serve", keys: CurveKeys | None = None
    ) -> None:
        self._name = name
        self._purpose: Purpose = purpose
        self._client = Client(endpoint, job=job, role=f"receiver-{purpose}", name=name, keys=keys)

    async def connect(self, timeout_s: float = 10.0) -> Welcome:
        return await self._client.connect(timeout_s)

    async def next(self, after: VersionTag | None, wait_ms: int = 0) -> SnapshotNotice | NoNews:
        """The next snapshot for this purpose that is newer than `after`, waiting at most `wait_ms`."""
        ask = WaitSnapshot(self._name, self._purpose, after, wait_ms)
        reply, _ = await self._client.call(ask, timeout_s=wait_ms / 1000 + ANSWER_S)
        if not isinstance(reply, SnapshotNotice | NoNews):
            raise ProtocolError(f"the weights publisher answered {type(reply).__name__} to WaitSnapshot")
        return reply

    async def open(self, notice: SnapshotNotice) -> Snapshot:
        """Read and verify the announced snapshot, in a thread. Raises `SnapshotError`; then `ack` with the
        error
        and ask again."""
        snapshot = await asyncio.to_thread(
            open_snapshot, Path(notice.path), manifest_hash=notice.manifest_hash
        )
        if snapshot.tag != notice.tag:
            raise SnapshotError(f"{notice.path} holds {snapshot.tag}, announced as {notice.tag}")
        return snapshot

    async def ack(self, tag: VersionTag, stall_ms: float = 0.0, error: str = "") -> None:
        """Say that `tag` is served (or evaluated), or could not be, and that its files are no longer read."""
        message = AckSnapshot(self._name, self._purpose, tag, stall_ms, error)
        await self._client.call(message, timeout_s=ANSWER_S)

    async def close(self) -> None:
        await self._client.close()
