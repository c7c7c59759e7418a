"""One safetensors file of a snapshot: mapped, filled with pieces of tensors, hashed and read.

Format: u64 little-endian header size, JSON header `{name: {dtype, shape, data_offsets}}`, data; `layout.py`
says what lies where. The package of that name writes whole new files only; here an existing allocation is
filled again, by several processes.

Parts are hashed by a few threads, one part each, which lets go of Python's lock.
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

from areal_async.base.errors import SnapshotError
from areal_async.base.own_files import map_open, reserve
from areal_async.weights.layout import ITEM_BYTES, HashedRange, Layout, TensorEntry, file_dtype, torch_dtype
from areal_async.weights.manifest import Manifest, Part, Shard, hash_of
from areal_async.weights.pieces import TensorPiece
from areal_async.weights.verified import FileIdentity

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
MAX_HEADER_BYTES = 256 << 20
MAX_THREADS = 8
THREADS_FROM_BYTES = 8 << 20  # Smaller files are done before threads would have started

T = TypeVar("T")
R = TypeVar("R")


class MappedFile:
    """A file mapped for writing. Kept from one snapshot to the next, it is filled at the speed of memcpy;
    written anew (or by `write`), shared memory takes two to twenty times as long."""

    def __init__(self, path: Path, size_bytes: int, mode: int = 0o600) -> None:
        """Open or make `path` (with `mode`, less the umask) and give it `size_bytes`. Raises `OSError`."""
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
        """Enter every page into this process's tables, so that the first copy is as fast as any. Reads only:
        other processes may be writing."""
        np.add.reduce(self.view(0, self.size_bytes)[::PAGE_BYTES])

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Raises `ValueError` outside of the file."""
        n = memoryview(data).nbytes
        if n:
            np.copyto(self.view(at, at + n), np.frombuffer(data, np.uint8))

    def view(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Return a writable view of these bytes of the file. Release it before `close`."""
        return (
            np.frombuffer(self._map, np.uint8, end - begin, begin) if end > begin else np.empty(0, np.uint8)
        )

    def flush(self) -> None:
        """Flush written data, so that other hosts can read it. In shared memory this costs nothing."""
        with self.path.open("r+b") as file:
            # Not the mapping's own flush, which would hold Python's lock while a disk works.
            os.fdatasync(file.fileno())

    def close(self) -> None:
        """Close the mapping, now or with the last view of it. The file stays."""
        with suppress(BufferError):
            self._map.close()


def fill(mapped: MappedFile, layout: Layout, piece: TensorPiece) -> None:
    """Copy a piece, from any device, to its place in the file. It is the only copy. On a GPU the copy may
    still be running when this returns. Raises `SnapshotError` for a piece of another layout."""
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
    """Return the parts of these ranges with the hashes of the bytes that are in the file now."""

    def hashed(found: HashedRange) -> Part:
        return msgspec.structs.replace(found.part, hash=hash_of(mapped.view(found.begin, found.end).data))

    return in_threads(hashed, ranges, sum(found.end - found.begin for found in ranges))


class TensorFile:
    """A file of a snapshot mapped for reading; its header equals the manifest.

    A mapping is read without a copy. No file is truncated while it is read: a retired file that may still be
    read is unlinked, and never overwritten.
    """

    def __init__(self, directory: Path, shard: Shard, manifest: Manifest) -> None:
        """Raises `SnapshotError` and `OSError`."""
        self._path = directory / shard.file
        if not 8 <= shard.header_bytes <= min(MAX_HEADER_BYTES, shard.size_bytes):
            raise SnapshotError(f"{shard.file} has an impossible size in the manifest")
        with self._path.open("rb") as file:
            self.identity = FileIdentity.of(os.fstat(file.fileno()))
            size = self.identity.size_bytes
            if size != shard.size_bytes:
                raise SnapshotError(f"{shard.file} has {size} bytes instead of {shard.size_bytes}")
            self.data = memoryview(map_open(file.fileno()))
        self.header = bytes(self.data[: shard.header_bytes])
        if hash_of(self.header) != shard.header_hash:
            raise SnapshotError(f"the header of {shard.file} does not match its hash")
        self.entries = parse_header(self.header)
        if max((e.data_offsets[1] for e in self.entries.values()), default=0) != size - shard.header_bytes:
            raise SnapshotError(f"{shard.file} has bytes that belong to no tensor")
        parts = parts_of_file(manifest, shard.file)
        if parts.keys() != self.entries.keys():
            raise SnapshotError(f"{shard.file} holds other tensors than the manifest says")
        self.places: list[tuple[Part, int, int]] = []
        """Each part with [begin, end) of its bytes in the file, in the manifest's order."""
        for name, found in parts.items():
            entry = self.entries[name]
            if (found[0].dtype, found[0].shape) != (entry.dtype, entry.shape):
                raise SnapshotError(
                    f"{name} in {shard.file} has another dtype or shape than the manifest says"
                )
            begin = shard.header_bytes + entry.data_offsets[0]
            for part in found:
                end = begin + math.prod(part.extent) * ITEM_BYTES[part.dtype]
                self.places.append((part, begin, end))
                begin = end

    def identity_now(self) -> FileIdentity:
        """Return the identity of the file at this path now, which may be another. Raises `OSError`."""
        return FileIdentity.of(os.stat(self._path))

    def verify(self) -> None:
        """Hash every part. Raises `SnapshotError` where one does not match."""
        in_threads(lambda at: self._check(at[0], self.data[at[1] : at[2]]), self.places, len(self.data))

    def read(self, *, verify: bool = True) -> dict[str, torch.Tensor]:
        """Return the tensors by name, in memory of this process. With `verify` that memory was itself hashed:
        raises `SnapshotError` where a part does not match."""
        copies = {
            name: np.empty(entry.data_offsets[1] - entry.data_offsets[0], np.uint8)
            for name, entry in self.entries.items()
        }

        def read(place: tuple[Part, int, int]) -> None:
            part, begin, end = place
            at = begin - len(self.header) - self.entries[part.tensor].data_offsets[0]
            copy = copies[part.tensor][at : at + end - begin]
            np.copyto(copy, np.frombuffer(self.data[begin:end], np.uint8))
            if verify:
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


def parts_of_file(manifest: Manifest, file: str) -> dict[str, list[Part]]:
    """Return the parts of each tensor in a file, in the manifest's order: consecutive rows. Raises
    `SnapshotError` unless they cover it exactly."""
    by_tensor: dict[str, list[Part]] = {}
    for part in manifest.parts:
        if part.file == file:
            by_tensor.setdefault(part.tensor, []).append(part)
    for name, parts in by_tensor.items():
        shape, row = parts[0].shape, 0
        for part in parts:
            if (part.shape, part.dtype) != (shape, parts[0].dtype):
                raise SnapshotError(f"the parts of {name} disagree about its shape or dtype")
            zeros, rest = [0] * (len(shape) - 1), shape[1:]
            if shape and (part.offset != [row, *zeros] or part.extent[1:] != rest or part.extent[0] < 0):
                raise SnapshotError(f"the parts of {name} are not its rows in their order")
            row += part.extent[0] if shape else 1
        if row != (shape[0] if shape else 1) or (not shape and parts[0].offset + parts[0].extent):
            raise SnapshotError(f"the parts of {name} do not cover it")
    return by_tensor


def parse_header(data: bytes) -> dict[str, TensorEntry]:
    """Return the entries of a header (with its size field), in order of their bytes. Raises
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
    """`work` of every item, in order of the items; `size_bytes` says whether threads are worth it. The first
    error is raised once nothing runs any more."""
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if size_bytes < THREADS_FROM_BYTES or threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        return list(pool.map(work, items))
