"""Chunk servers, downloads and snapshots of tests, with deadlines short enough to be waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from areal_async.base.errors import FaultError
from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.secret import Access, RunSecret
from areal_async.rpc.server import Answer
from areal_async.rpc.weights_messages import GetChunk
from areal_async.weights.channels.chunks import ChunkStore, ChunkTable, PartialDownload, build_table
from areal_async.weights.channels.fetching import Download
from areal_async.weights.channels.serving import ChunkServer
from areal_async.weights.snapshot import SnapshotInfo
from tests.snapshots import write_snapshot
from tests.waiting import deadline_s

PATIENCE_S = 0.5
LIMIT_S = deadline_s(300)
SECRET = RunSecret(bytes(32))


def tag(version: int, epoch: int = 1) -> VersionTag:
    return VersionTag("policy", epoch, version)


def written(root: Path, version: int = 0, mib: float = 3.0, seed: int = 0, epoch: int = 1) -> SnapshotInfo:
    """A snapshot of about `mib` MiB of random bytes, with two files beside the model's."""
    generator = torch.Generator().manual_seed(1000 * seed + version)
    n = int(mib * (1 << 20)) // 4
    tensors = {"w": torch.rand(n, generator=generator), "b": torch.arange(7 + version)}
    files: dict[str, bytes | Path] = {"config.json": b"{}", "empty.txt": b""}
    return write_snapshot(root, tag(version, epoch), tensors, files=files)


def table_of(snapshot: SnapshotInfo) -> ChunkTable:
    return build_table(snapshot.path, snapshot.manifest_hash)


class Held(ChunkServer):
    """A chunk server that answers only so many requests: it refuses what comes later for now, until `limit`
    is raised."""

    def __init__(self, listen: str, *, limit: int = 1 << 30, **options: Any) -> None:
        super().__init__(listen, **options)
        self.limit = limit
        self.asked = 0

    async def chunk(self, message: GetChunk) -> Answer:
        self.asked += 1
        if self.asked > self.limit:
            raise FaultError("unavailable", "held back")
        return await super().chunk(message)


@asynccontextmanager
async def server(
    *held: SnapshotInfo,
    table: ChunkTable | None = None,
    source: str = "peer",
    listen: str = "tcp://127.0.0.1:0",
    access: Access = SECRET,
    limit: int = 1 << 30,
) -> AsyncIterator[Held]:
    """A chunk server with the snapshots `held`; `table` is what it takes for theirs."""
    made = Held(listen, job="j", source=source, access=access, limit=limit)
    await made.start()
    try:
        for snapshot in held:
            made.add(ChunkStore(snapshot.path, table or table_of(snapshot)))
        yield made
    finally:
        await made.close()


class Killed(Exception):
    """The process of a download has died."""


class Dying(PartialDownload):
    """A download whose process dies as it is about to verify another chunk than the first `limit`."""

    limit = 0

    def put(self, number: int, data: memoryview) -> bool:
        if self.limit == 0:
            raise Killed
        self.limit -= 1
        return super().put(number, data)


def download(
    at: ChunkServer | None,
    snapshot: SnapshotInfo,
    root: Path,
    sources: Sequence[str],
    table: ChunkTable | None = None,
    dies_after: int | None = None,
    access: Access = SECRET,
    **options: Any,
) -> Download:
    """A download of `snapshot` into `root`, with the chunks of an earlier try; the last of `sources` is taken
    for the publisher. `at` serves its chunks."""
    root.mkdir(parents=True, exist_ok=True)
    kind = PartialDownload if dies_after is None else Dying
    store = kind(root / snapshot.path.name, table or table_of(snapshot))
    if isinstance(store, Dying):
        store.limit = dies_after or 0
    store.resume()
    if at is not None:
        at.add(store)
    client = partial(Client, job="j", role="peer", name="r", access=access)
    limits = {"patience_s": PATIENCE_S, "give_up_s": LIMIT_S}
    return Download(store, sources, origin=sources[-1], client=client, **(limits | options))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(root: Path) -> set[str]:
    """What lies there under a name that is not hidden."""
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}
