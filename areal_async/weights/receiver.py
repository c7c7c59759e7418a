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

With an `Inlet` it also receives from other hosts: `open` first brings the files here, and is ended with
`SnapshotSkipped` when that takes so long that a newer one should be fetched instead.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from areal_async.errors import ArealError, SnapshotError
from areal_async.rpc.client import Client
from areal_async.rpc.endpoints import Access
from areal_async.rpc.messages import (
    AckSnapshot,
    FindSources,
    NoNews,
    SnapshotNotice,
    Sources,
    VersionTag,
    WaitSnapshot,
    Welcome,
)
from areal_async.weights import metrics
from areal_async.weights.shelf import Purpose
from areal_async.weights.snapshot import Snapshot, open_snapshot
from areal_async.weights.transport.inlet import Inlet

ANSWER_S = 10.0
"""What an answer may take beyond the wait that was asked for."""
TABLE_S = 120.0
"""What the answer with a chunk table may take: the publisher reads the whole snapshot for it, once."""
NEWER_WAIT_MS = 10_000


class Receiver:
    """One receiver of the publisher at `endpoint`, on one event loop."""

    def __init__(
        self,
        endpoint: str,
        *,
        job: str,
        name: str,
        access: Access,
        purpose: Purpose = "serve",
        inlet: Inlet | None = None,
        tensors: bool = True,
    ) -> None:
        """`tensors` False: snapshots are verified where they lie, for an engine that reads the directory."""
        self._name = name
        self._inlet = inlet
        self._tensors = tensors
        self._deltas = False
        """Whether the newest snapshot was brought here, so that the next can be made of it."""
        self._purpose: Purpose = purpose
        self._client = Client(endpoint, job=job, role=f"receiver-{purpose}", name=name, access=access)

    async def connect(self, timeout_s: float = 10.0) -> Welcome:
        return await self._client.connect(timeout_s)

    async def next(self, after: VersionTag | None, wait_ms: int = 0) -> SnapshotNotice | NoNews:
        """The next snapshot for this purpose that is newer than `after`, waiting at most `wait_ms`."""
        return await self._ask(after, wait_ms, self._deltas)

    async def _ask(self, after: VersionTag | None, wait_ms: int, deltas: bool) -> SnapshotNotice | NoNews:
        ask = WaitSnapshot(self._name, self._purpose, after, wait_ms, deltas)
        return await self._client.call(ask, timeout_s=ANSWER_S)

    async def open(self, notice: SnapshotNotice) -> Snapshot:
        """Read and verify the announced snapshot, in a thread, after bringing it to this host if need be.

        Raises `SnapshotError`; then `ack` with the error and ask again. `SnapshotSkipped`: just ask again."""
        self._deltas = False
        if self._inlet is None or self._inlet.is_here(notice):
            path = Path(notice.path)
            if notice.channel == "disk":
                metrics.RECEIVED.labels("disk", "publisher").inc(notice.size_bytes)
            return await self._read(notice, path)
        newer = asyncio.ensure_future(self._newer(notice.tag)) if self._purpose == "serve" else None
        try:
            path = await self._inlet.bring(notice, self._find_sources, newer)
        finally:
            if newer is not None:
                newer.cancel()
                await asyncio.gather(newer, return_exceptions=True)
        try:
            snapshot = await self._read(notice, path)
        except SnapshotError:
            self._inlet.distrust(notice)
            raise
        self._deltas = self._inlet.applies
        return snapshot

    async def _read(self, notice: SnapshotNotice, path: Path) -> Snapshot:
        snapshot = await asyncio.to_thread(
            open_snapshot, path, manifest_hash=notice.manifest_hash, tensors=self._tensors
        )
        if snapshot.tag != notice.tag:
            raise SnapshotError(f"{path} holds {snapshot.tag}, announced as {notice.tag}")
        return snapshot

    async def _newer(self, tag: VersionTag) -> bool:
        """Return once a snapshot after `tag` is announced; False when none will be, or nobody answers."""
        with suppress(ArealError):
            while True:
                news = await self._ask(tag, NEWER_WAIT_MS, deltas=False)
                if isinstance(news, SnapshotNotice):
                    return True
                if news.finished:
                    return False
        return False

    async def _find_sources(self, question: FindSources) -> tuple[Sources, list[memoryview]]:
        timeout_s = ANSWER_S if question.known else TABLE_S
        return await self._client.exchange(question, timeout_s=timeout_s)

    async def ack(self, tag: VersionTag, stall_ms: float = 0.0, error: str = "") -> None:
        """Say that `tag` is served (or evaluated), or could not be, and that its files are no longer read."""
        message = AckSnapshot(self._name, self._purpose, tag, stall_ms, error)
        if self._inlet is not None:
            self._inlet.served(tag, error)
        await self._client.call(message, timeout_s=ANSWER_S)

    async def close(self) -> None:
        await self._client.close()
        if self._inlet is not None:
            await self._inlet.close()
