"""One safetensors file of a snapshot: mapped, filled with pieces of tensors, hashed and read.

Format: u64 little-endian header size, JSON header `{name: {dtype, shape, data_offsets}}`, data. `layout.py`
defines the position of each tensor. The safetensors package is not used, because it only writes whole new
files, while here several processes fill parts of an existing file.

A few threads hash parts, one part each. Hashing releases Python's lock.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from areal_async.base.errors import SnapshotError
from areal_async.base.own_files import map_open, reserve
from areal_async.weights.layout import (
    ITEM_BYTES,
    HashedRange,
    Layout,
    TensorEntry,
    file_dtype,
    parts_of,
    torch_dtype,
)
from areal_async.weights.manifest import Manifest, Part, hash_of
from areal_async.weights.pieces import TensorPiece

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
MAX_HEADER_BYTES = 256 << 20
MAX_THREADS = 8
THREADS_FROM_BYTES = 8 << 20  # threads do not pay off for smaller files

T = TypeVar("T")
R = TypeVar("R")


class MappedFile:
    """A file mapped for writing.

    The mapping is kept between snapshots and filled at the speed of memcpy. A new file in shared memory, or
    calls of `write`, would take 2 to 20 times as long.
    """

    def __init__(self, path: Path, size_bytes: int, mode: int = 0o600) -> None:
        """Open or create `path` and give it `size_bytes`. A new file gets `mode`, less the umask. Raises
        `OSError`."""
        self.path = path
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, mode), "r+b") as file:
            try:
                reserve(file.fileno(), size_bytes)
                self._map = mmap.mmap(file.fileno(), size_bytes)
            except OSError:
                path.unlink(missing_ok=True)
                raise

    @property
    def size_bytes(self) -> int:
        return len(self._map)

    def touch(self) -> None:
        """Enter every page into this process's page tables, so that the first copy is fast.

        This only reads the pages, because other processes may be writing to the file.
        """
        np.add.reduce(self.view(0, self.size_bytes)[::PAGE_BYTES])

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write `data` at byte `at`. Raises `ValueError` for a range outside the file."""
        n = memoryview(data).nbytes
        if n:
            np.copyto(self.view(at, at + n), np.frombuffer(data, np.uint8))

    def view(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Return bytes [begin, end) of the file as a writable view. The caller must release the view before
        `close`."""
        return (
            np.frombuffer(self._map, np.uint8, end - begin, begin) if end > begin else np.empty(0, np.uint8)
        )

    def flush(self) -> None:
        """Flush written bytes, so that other hosts can read them. Costs nothing in shared memory."""
        with self.path.open("r+b") as file:
            # The mapping's own flush would hold Python's lock while the disk works.
            os.fdatasync(file.fileno())

    def close(self) -> None:
        """Close the mapping now, or when its last view is released. The file stays."""
        with suppress(BufferError):
            self._map.close()


def fill(mapped: MappedFile, layout: Layout, piece: TensorPiece) -> None:
    """Copy a piece from its device to its place in the file. This is the only copy of the piece.

    A copy from a GPU may still be in progress when this function returns. Raises `SnapshotError` if the piece
    does not fit the layout.
    """
    entry = layout.entries.get(piece.name)
    tensor = piece.tensor.detach()
    if entry is None or (entry.dtype, entry.shape) != (file_dtype(tensor.dtype), list(piece.shape)):
        raise SnapshotError(f"{piece.name} is not what the layout was planned for")
    if not tensor.numel():
        return
    import torch

    whole = torch.from_numpy(mapped.view(*layout.place(piece.name))).view(tensor.dtype).view(entry.shape)
    box = whole[tuple(slice(o, o + e) for o, e in zip(piece.offset, tensor.shape, strict=True))]
    if box.shape != tensor.shape:
        raise SnapshotError(f"a piece of {piece.name} lies outside of it")
    box.copy_(tensor, non_blocking=box.is_contiguous())


def hash_ranges(mapped: MappedFile, ranges: Sequence[HashedRange]) -> list[Part]:
    """Return the parts of these ranges, with the hashes of the file's current bytes."""

    def hashed(found: HashedRange) -> Part:
        return replace(found.part, hash=hash_of(mapped.view(found.begin, found.end).data))

    return in_threads(hashed, ranges, sum(found.end - found.begin for found in ranges))


class TensorFile:
    """A file of a snapshot mapped for reading. Its header must match the manifest.

    Reading a mapping needs no copy. The mapping is safe because no file is truncated while a process reads
    it, and because a retired file that may still have readers is unlinked and never overwritten.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Raises `SnapshotError` and `OSError`."""
        (shard,) = manifest.shards
        self._path = directory / shard.file
        if not 8 <= shard.header_bytes <= min(MAX_HEADER_BYTES, shard.size_bytes):
            raise SnapshotError(f"{shard.file} has an impossible size in the manifest")
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != shard.size_bytes:
                raise SnapshotError(f"{shard.file} has {size} bytes instead of {shard.size_bytes}")
            self.data = memoryview(map_open(file.fileno()))
        self.header = bytes(self.data[: shard.header_bytes])
        if hash_of(self.header) != shard.header_hash:
            raise SnapshotError(f"the header of {shard.file} does not match its hash")
        self.entries = parse_header(self.header)
        if max((e.data_offsets[1] for e in self.entries.values()), default=0) != size - shard.header_bytes:
            raise SnapshotError(f"{shard.file} has bytes that belong to no tensor")
        planned: list[tuple[Part, int, int]] = []
        for name, entry in self.entries.items():
            begin = shard.header_bytes + entry.data_offsets[0]
            for part, part_bytes in parts_of(name, entry, shard.file):
                planned.append((part, begin, begin + part_bytes))
                begin += part_bytes
        if [part for part, _, _ in planned] != [replace(part, hash="") for part in manifest.parts]:
            raise SnapshotError(f"the tensors of {shard.file} and their parts are not as the manifest says")
        pairs = zip(manifest.parts, planned, strict=True)
        self.places = [(part, begin, end) for part, (_, begin, end) in pairs]
        """Each part with its byte range [begin, end) in the file, in the manifest's order."""

    def verify(self) -> None:
        """Hash every part. Raises `SnapshotError` if a hash does not match."""
        in_threads(lambda at: self._check(at[0], self.data[at[1] : at[2]]), self.places, len(self.data))

    def read(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, in memory of this process.

        The hashes are computed over that memory. Raises `SnapshotError` if a hash does not match.
        """
        copies = {
            name: np.empty(entry.data_offsets[1] - entry.data_offsets[0], np.uint8)
            for name, entry in self.entries.items()
        }

        def read(place: tuple[Part, int, int]) -> None:
            part, begin, end = place
            at = begin - len(self.header) - self.entries[part.tensor].data_offsets[0]
            copy = copies[part.tensor][at : at + end - begin]
            np.copyto(copy, np.frombuffer(self.data[begin:end], np.uint8))
            self._check(part, copy.data)

        in_threads(read, self.places, len(self.data))
        import torch

        tensors = {}
        for name, entry in self.entries.items():
            data, dtype = copies[name], torch_dtype(entry.dtype)
            flat = torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)
            tensors[name] = flat.view(entry.shape)
        return tensors

    def _check(self, part: Part, data: memoryview) -> None:
        if hash_of(data) != part.hash:
            raise SnapshotError(f"{part.tensor} in {self._path.name} does not match its hash")


def parse_header(data: bytes) -> dict[str, TensorEntry]:
    """Return the entries of a header (with its size field), in the order of their bytes. Raises
    `SnapshotError`."""
    try:
        raw = msgspec.json.decode(data[8:], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"not a safetensors header: {error}") from error
    if struct.unpack("<Q", data[:8])[0] != len(data) - 8:
        raise SnapshotError("the safetensors header has another size than the manifest says")
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        item_bytes = ITEM_BYTES.get(entry.dtype)
        if item_bytes is None:
            raise SnapshotError(f"{name} has the unknown dtype {entry.dtype!r}")
        size = math.prod(entry.shape) * item_bytes
        if begin != at or end - begin != size or min(entry.shape, default=1) < 0:
            raise SnapshotError(f"{name} does not lie where its shape puts it")
        at = end
    return entries


def in_threads(work: Callable[[T], R], items: Iterable[T], size_bytes: int) -> list[R]:
    """Return the results of `work` for all items, in the order of the items.

    `size_bytes` decides whether threads are used. Raises the first error after all calls have ended.
    """
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if size_bytes < THREADS_FROM_BYTES or threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))
