"""Publishers, receivers and snapshots of tests, with deadlines short enough to be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from areal_async.rpc.endpoints import Access
from areal_async.rpc.messages import VersionTag
from areal_async.rpc.secret import RunSecret
from areal_async.weights.snapshot import Written, write_snapshot
from areal_async.weights.transport.fetch import Fetch
from areal_async.weights.transport.holding import Growing, Holding
from areal_async.weights.transport.station import Station
from areal_async.weights.transport.table import ChunkTable, build_table

PATIENCE_S = 0.3
LIMIT_S = 60.0
SECRET = RunSecret(bytes(32))


def written(root: Path, version: int = 0, mib: float = 3.0, seed: int = 0, epoch: int = 1) -> Written:
    """A snapshot of about `mib` MiB of random bytes, with two files beside the model's."""
    generator = torch.Generator().manual_seed(1000 * seed + version)
    n = int(mib * (1 << 20)) // 4
    tensors = {"w": torch.rand(n, generator=generator), "b": torch.arange(7 + version)}
    files: dict[str, bytes | Path] = {"config.json": b"{}", "empty.txt": b""}
    return write_snapshot(root, VersionTag(epoch, version), tensors, files=files)


@contextmanager
def station(
    source: str = "peer", listen: str = "tcp://127.0.0.1:0", access: Access = SECRET
) -> Iterator[Station]:
    made = Station(listen, source=source, access=access)
    made.start()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def publisher(snapshot: Written, table: ChunkTable | None = None, **options: Any) -> Iterator[Station]:
    """A station that hands out `snapshot`."""
    with station("publisher", **options) as made:
        made.hold(Holding(snapshot.path, table or table_of(snapshot)))
        yield made


def table_of(snapshot: Written) -> ChunkTable:
    return build_table(snapshot.path, snapshot.manifest_hash)


def fetch(
    at: Station,
    snapshot: Written,
    root: Path,
    sources: list[str],
    table: ChunkTable | None = None,
    **options: Any,
) -> Fetch:
    """Begin to fetch `snapshot` into `root`, with the chunks of an earlier try."""
    root.mkdir(parents=True, exist_ok=True)
    growing = Growing(root / snapshot.path.name, table or table_of(snapshot))
    have = growing.resume()
    return at.fetch(growing, sources, have=have, **{"patience_s": PATIENCE_S, "give_up_s": LIMIT_S} | options)


def die_after_sending(at: Station, n: int) -> None:
    """The thread of this station ends, with its sockets, as it is about to hand out chunk number `n`."""
    send, count = at._send_chunk, 0

    def counting(fetcher: bytes, holding: Holding, index: int) -> None:
        nonlocal count
        if count >= n:
            at._closing = True
            return
        count += 1
        send(fetcher, holding, index)

    at._send_chunk = counting  # type: ignore[method-assign]


def die_after_receiving(at: Station, growing: Growing, n: int) -> None:
    """The same as it has written `n` chunks, before the last of them is handed on or known to be there."""
    put, count = growing.put, 0

    def counting(index: int, data: memoryview) -> bool:
        nonlocal count
        if count >= n:
            at._closing = True
            return False
        count += 1
        return put(index, data)

    growing.put = counting  # type: ignore[method-assign]


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
