"""Writing and reading one safetensors file of a snapshot: every byte is hashed while it is copied.

Tensors are worked on by a few threads, one tensor each, in pieces small enough to be still in the cache when
they are hashed: memory is read once for both. Hash and copy release Python's lock.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from areal_async.errors import SnapshotError
from areal_async.weights import layout
from areal_async.weights.manifest import HASH_PREFIX, Manifest, Part, Shard, hash_of

CHUNK_BYTES = 512 << 10
"""Copied, then hashed: it should fit into a core's second-level cache."""
MAX_THREADS = 8
THREADS_FROM_BYTES = 8 << 20
"""Smaller files are done before threads would have started."""

T = TypeVar("T")
R = TypeVar("R")


class MappedFile:
    """A file mapped for writing. Kept from one snapshot to the next, it is filled at the speed of memcpy;
    written anew (or by `write`), shared memory takes two to twenty times as long."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Open or make `path` and give it `size_bytes`. Raises `OSError`."""
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size_bytes)
            # Room is asked for here: without it, a write into the mapping would end the process.
            os.posix_fallocate(fd, 0, size_bytes)
            self._map = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)

    @property
    def size_bytes(self) -> int:
        return len(self._map)

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Raises `ValueError` outside of the file."""
        n = memoryview(data).nbytes
        if n:
            np.copyto(self.view(at, at + n), np.frombuffer(data, np.uint8))

    def view(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """These bytes of the file, writable. Must be let go before `close`."""
        return (
            np.frombuffer(self._map, np.uint8, end - begin, begin) if end > begin else np.empty(0, np.uint8)
        )

    def flush(self) -> None:
        """What was written is in the file for whoever reads it, on another host too. Costs nothing in shared
        memory."""
        fd = os.open(self.path, os.O_RDWR)
        try:
            # Not the mapping's own flush, which would hold Python's lock while a disk works.
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """The file stays; only the mapping goes: now, or with the last view of it."""
        with suppress(BufferError):
            self._map.close()


def write_shard(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, tuple[list[int], list[int]]] | None = None,
) -> tuple[Shard, list[Part]]:
    """Write one safetensors file, over an existing one if there is one.

    `boxes` gives (global shape, offset) of the tensors that are only a piece; the others are whole.
    """
    shard, parts, mapped = fill_shard(path, tensors, boxes)
    mapped.close()
    return shard, parts


def fill_shard(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, tuple[list[int], list[int]]] | None = None,
    reuse: MappedFile | None = None,
) -> tuple[Shard, list[Part], MappedFile]:
    """As `write_shard`, and give the mapping too. `reuse` is that of the file which lies at `path`."""
    header, order = layout.plan(tensors)
    places = []
    size = len(header)
    for name in order:
        places.append((name, size))
        size += tensors[name].numel() * tensors[name].element_size()
    if reuse is not None and reuse.size_bytes != size:
        reuse.close()
        reuse = None
    mapped = reuse if reuse is not None else MappedFile(path, size)
    mapped.path = path
    mapped.write(0, header)

    def write(place: tuple[str, int]) -> Part:
        name, at = place
        tensor = tensors[name].detach().cpu().contiguous()
        hashed = Hashing()
        for piece in _chunks(layout.tensor_bytes(tensor)):
            mapped.write(at, piece)
            hashed.add(piece)
            at += piece.nbytes
        extent = list(tensor.shape)
        shape, offset = (boxes or {}).get(name, (extent, [0] * len(extent)))
        return Part(name, layout.DTYPES[tensor.dtype], shape, offset, extent, path.name, hashed.named())

    parts = in_threads(write, places, size)
    mapped.flush()
    return Shard(path.name, size, len(header), hash_of(header)), parts, mapped


def read_shard(
    directory: Path, shard: Shard, manifest: Manifest, *, private: bool
) -> dict[str, torch.Tensor]:
    """Verify every byte of a file. `private`: return its pieces by tensor name, in memory of this process
    that was itself hashed; otherwise nothing is kept and nothing returned. Raises `SnapshotError`."""
    data_bytes = shard.size_bytes - shard.header_bytes
    if not 8 <= shard.header_bytes <= layout.MAX_HEADER_BYTES or data_bytes < 0:
        raise SnapshotError(f"{shard.file} has an impossible size in the manifest")
    fd = os.open(directory / shard.file, os.O_RDONLY)
    try:
        if os.fstat(fd).st_size != shard.size_bytes:
            raise SnapshotError(
                f"{shard.file} has {os.fstat(fd).st_size} bytes instead of {shard.size_bytes}"
            )
        entries = layout.parse_header(read_header(fd, shard))
        parts = parts_of(shard, manifest, entries, data_bytes)
        data = torch.empty(data_bytes if private else 0, dtype=torch.uint8)
        # A mapping is hashed without a copy. No file is cut short while it is read: a retired one that
        # somebody might still be reading is unlinked, never written again.
        view = layout.tensor_bytes(data) if private else mapping_of(fd)

        def check(name: str) -> None:
            begin, end = entries[name].data_offsets
            if private:
                found = _read_hashed(fd, shard.header_bytes + begin, view[begin:end])
            else:
                found = hash_of(view[shard.header_bytes + begin : shard.header_bytes + end])
            if found != parts[name].hash:
                raise SnapshotError(f"{name} in {shard.file} does not match its hash")

        in_threads(check, list(entries), data_bytes)
    finally:
        os.close(fd)
    return {name: layout.view_of(data, entry) for name, entry in entries.items()} if private else {}


def read_header(fd: int, shard: Shard) -> bytes:
    """The header of a file that is at its beginning. Raises `SnapshotError`."""
    header = bytearray(shard.header_bytes)
    layout.read_all(fd, memoryview(header))
    if hash_of(memoryview(header)) != shard.header_hash:
        raise SnapshotError(f"the header of {shard.file} does not match its hash")
    return bytes(header)


class Hashing:
    """A hash over pieces that follow one another."""

    def __init__(self) -> None:
        self._hash = blake3()

    def add(self, data: bytes | memoryview) -> None:
        self._hash.update(data)

    def named(self) -> str:
        """As `manifest.hash_of` gives it."""
        return HASH_PREFIX + self._hash.hexdigest()


def in_threads(work: Callable[[T], R], items: Iterable[T], size_bytes: int) -> list[R]:
    """`work` of every item, in order of the items; `size_bytes` says whether threads are worth it. The first
    error is raised once nothing runs any more."""
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if size_bytes < THREADS_FROM_BYTES or threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))


def parts_of(
    shard: Shard, manifest: Manifest, entries: Mapping[str, layout.Entry], data_bytes: int
) -> dict[str, Part]:
    """The parts that the manifest has in this file, which must be what its header says."""
    if max((entry.data_offsets[1] for entry in entries.values()), default=0) != data_bytes:
        raise SnapshotError(f"{shard.file} has bytes that belong to no tensor")
    parts = {part.tensor: part for part in manifest.parts if part.file == shard.file}
    if parts.keys() != entries.keys():
        raise SnapshotError(f"{shard.file} holds other tensors than the manifest says")
    for name, entry in entries.items():
        if parts[name].dtype != entry.dtype or parts[name].extent != entry.shape:
            raise SnapshotError(f"{name} in {shard.file} has another dtype or shape than the manifest says")
    return parts


def mapping_of(fd: int) -> memoryview:
    """The whole file, read-only. Raises `ValueError` for an empty one."""
    return memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))


def _read_hashed(fd: int, at: int, into: memoryview) -> str:
    hashed = Hashing()
    for piece in _chunks(into):
        read_at(fd, at, piece)
        hashed.add(piece)
        at += piece.nbytes
    return hashed.named()


def read_at(fd: int, at: int, into: memoryview) -> None:
    """Fill `into` from offset `at`; `SnapshotError` when the file ends before."""
    while into.nbytes:
        n = os.preadv(fd, [into], at)
        if not n:
            raise SnapshotError("a file ends before its time")
        at += n
        into = into[n:]


def _chunks(data: memoryview) -> Iterable[memoryview]:
    return (data[at : at + CHUNK_BYTES] for at in range(0, data.nbytes, CHUNK_BYTES))
