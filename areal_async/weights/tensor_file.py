"""One safetensors file of a snapshot: every byte is hashed while it is copied.

Format: u64 little-endian header size, JSON header `{name: {dtype, shape, data_offsets}}`, data. Tensors lie
in order of falling element size, so each is aligned to its element once the data is. The package of that name
writes whole new files only; here an existing allocation is filled again.

Tensors are worked on by a few threads, one tensor each, in pieces small enough to be still in the cache when
they are hashed: memory is read once for both. Hash and copy release Python's lock.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from areal_async.errors import SnapshotError
from areal_async.weights.manifest import Manifest, Part, Shard, hash_of, named

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}
HEADER_ALIGN_BYTES = 64
MAX_HEADER_BYTES = 256 << 20
PIECE_BYTES = 512 << 10  # Bytes copied, then hashed: they should fit into a core's second-level cache
MAX_THREADS = 8
THREADS_FROM_BYTES = 8 << 20  # Smaller files are done before threads would have started

T = TypeVar("T")
R = TypeVar("R")


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the file; `data_offsets` are relative to the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


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


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, reuse: MappedFile | None = None
) -> tuple[Shard, list[Part], MappedFile]:
    """Write the file `path`; `reuse` is the mapping of the file that lies there already."""
    header, order = plan(tensors)
    places = []
    size = len(header)
    for name in order:
        places.append((name, size))
        size += tensors[name].nbytes
    if reuse is not None and reuse.size_bytes != size:
        reuse.close()
        reuse = None
    mapped = reuse if reuse is not None else MappedFile(path, size)
    mapped.path = path
    mapped.write(0, header)

    def write(place: tuple[str, int]) -> Part:
        name, at = place
        tensor = tensors[name].detach().cpu().contiguous()
        hashed = blake3()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, data.nbytes, PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            mapped.write(at + begin, piece)
            hashed.update(piece)
        shape = list(tensor.shape)
        return Part(name, DTYPES[tensor.dtype], shape, [0] * len(shape), shape, path.name, named(hashed))

    parts = in_threads(write, places, size)
    mapped.flush()
    return Shard(path.name, size, len(header), hash_of(header)), parts, mapped


class TensorFile:
    """A file of a snapshot mapped for reading; its header is what the manifest says of it.

    A mapping is read without a copy. No file is cut short while it is read: a retired one that somebody might
    still be reading is unlinked, never written again."""

    def __init__(self, directory: Path, shard: Shard, manifest: Manifest) -> None:
        """Raises `SnapshotError` and `OSError`."""
        self._path = directory / shard.file
        if not 8 <= shard.header_bytes <= min(MAX_HEADER_BYTES, shard.size_bytes):
            raise SnapshotError(f"{shard.file} has an impossible size in the manifest")
        fd = os.open(self._path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size != shard.size_bytes:
                raise SnapshotError(f"{shard.file} has {size} bytes instead of {shard.size_bytes}")
            self.data = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        self.header = bytes(self.data[: shard.header_bytes])
        if hash_of(self.header) != shard.header_hash:
            raise SnapshotError(f"the header of {shard.file} does not match its hash")
        entries = parse_header(self.header)
        if max((e.data_offsets[1] for e in entries.values()), default=0) != size - shard.header_bytes:
            raise SnapshotError(f"{shard.file} has bytes that belong to no tensor")
        self.parts = {part.tensor: part for part in manifest.parts if part.file == shard.file}
        if self.parts.keys() != entries.keys():
            raise SnapshotError(f"{shard.file} holds other tensors than the manifest says")
        for name, entry in entries.items():
            if self.parts[name].dtype != entry.dtype or self.parts[name].extent != entry.shape:
                raise SnapshotError(
                    f"{name} in {shard.file} has another dtype or shape than the manifest says"
                )
        self._entries = entries

    def place(self, tensor: str) -> tuple[int, int]:
        """[begin, end) of a tensor's bytes in the file."""
        begin, end = self._entries[tensor].data_offsets
        return len(self.header) + begin, len(self.header) + end

    def tensor_bytes(self, tensor: str) -> memoryview:
        begin, end = self.place(tensor)
        return self.data[begin:end]

    def verify(self) -> None:
        """Hash every tensor. Raises `SnapshotError` where one does not match."""
        in_threads(
            lambda name: self._check(name, hash_of(self.tensor_bytes(name))), self.parts, len(self.data)
        )

    def read(self) -> dict[str, torch.Tensor]:
        """The pieces by tensor name, in memory of this process that was itself hashed. Raises `SnapshotError`
        where one does not match."""

        def read(name: str) -> torch.Tensor:
            data = np.array(self.tensor_bytes(name))
            self._check(name, hash_of(data.data))
            entry = self._entries[name]
            flat = torch.from_numpy(data) if data.size else torch.empty(0, dtype=torch.uint8)
            return flat.view(DTYPE_OF[entry.dtype]).view(entry.shape)

        return dict(zip(self._entries, in_threads(read, self._entries, len(self.data)), strict=True))

    def _check(self, name: str, found: str) -> None:
        if found != self.parts[name].hash:
            raise SnapshotError(f"{name} in {self._path.name} does not match its hash")


def plan(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """The header of a file of `tensors`, and the order in which their bytes follow it."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise SnapshotError(f"{name} has dtype {tensor.dtype}, which a snapshot cannot hold")
        header[name] = TensorEntry(DTYPES[tensor.dtype], list(tensor.shape), (at, at + tensor.nbytes))
        at += tensor.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % HEADER_ALIGN_BYTES)
    return struct.pack("<Q", len(text)) + text, order


def parse_header(data: bytes) -> dict[str, TensorEntry]:
    """The entries of a header (with its size field), in order of their bytes. Raises `SnapshotError`."""
    try:
        raw = msgspec.json.decode(data[8:], type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(r, type=TensorEntry)
            for name, r in raw.items()
            if name != "__metadata__"
        }
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"not a safetensors header: {error}") from error
    if struct.unpack("<Q", data[:8])[0] != len(data) - 8:
        raise SnapshotError("the safetensors header has another size than the manifest says")
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        dtype = DTYPE_OF.get(entry.dtype)
        if dtype is None:
            raise SnapshotError(f"{name} has the unknown dtype {entry.dtype!r}")
        size = math.prod(entry.shape) * dtype.itemsize
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
