"""A snapshot directory in chunks: the division into chunks, the hash of every chunk, and the chunks that are
on this host.

A `ChunkTable` names one directory by the hash of its manifest. Chunks are numbered across all files in the
order of the table. The manifest's chunks come last. Each chunk has `chunk_bytes`, except for the last chunk
of a file.

Chunks are read from a `ChunkStore`. This is a complete directory, or a `PartialDownload`: a directory that is
filled under a hidden name beside its final name. Promises of a `PartialDownload`:
- A chunk is readable only after its bytes are in the file and its hash matched.
- `resume` hashes all data of an interrupted download and keeps the chunks that match.
- One rename gives the directory its name. Before that, every chunk is present and the manifest is the
  announced manifest.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import threading
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import msgspec
from blake3 import blake3

from areal_async.base.errors import SnapshotError
from areal_async.base.own_files import map_path, open_beneath, reserve
from areal_async.weights.manifest import HASH_PREFIX, MANIFEST_FILE, check_file_name, hash_of

TABLE_SCHEMA = 1
DIGEST_BYTES = 32
MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 4 << 20
WANTED_CHUNKS = 256
"""Number of chunks of a snapshot.

With this many chunks, a transfer along a chain of receivers takes little longer than a transfer to one
receiver. A chunk is still much larger than the message that requests it.
"""
MAX_CHUNKS = 1 << 26
PARTIAL_PREFIX = ".partial-"


class ChunkTable(msgspec.Struct, frozen=True):
    """Files with their sizes in bytes, and the concatenated BLAKE3 digests of all chunks."""

    schema: int
    manifest_hash: str
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    files: list[tuple[str, Annotated[int, msgspec.Meta(ge=0)]]]
    digests: bytes

    @property
    def size_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(size for _, size in self.files)


class ChunkLayout:
    """Places of the chunks of a table."""

    def __init__(self, table: ChunkTable) -> None:
        self.table = table
        counts = [count_chunks(size, table.chunk_bytes) for _, size in table.files]
        *self._first, self.n_chunks = accumulate(counts, initial=0)
        """Number of the first chunk of each file, and the number of all chunks."""

    def chunk(self, number: int) -> tuple[int, int, int]:
        """Return the file of a chunk (index into the table's files), its offset in the file and its size, in
        bytes."""
        file = bisect_right(self._first, number) - 1
        while self.table.files[file][1] == 0:  # an empty file has no chunk and starts with the next file
            file -= 1
        offset = (number - self._first[file]) * self.table.chunk_bytes
        return file, offset, min(self.table.chunk_bytes, self.table.files[file][1] - offset)

    def matches(self, number: int, data: memoryview) -> bool:
        """Return whether `data` is chunk `number`, byte for byte."""
        at = number * DIGEST_BYTES
        expected = self.table.digests[at : at + DIGEST_BYTES]
        return data.nbytes == self.chunk(number)[2] and blake3(data).digest() == expected


class ChunkStore:
    """The chunks of a complete directory. Each file is mapped at its first read."""

    def __init__(self, directory: Path, table: ChunkTable) -> None:
        self.directory = directory
        self.layout = ChunkLayout(table)
        self._maps: list[mmap.mmap | bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    async def when_here(self, number: int) -> None:
        """Wait until chunk `number` can be read. Raises `SnapshotError` if the chunk cannot arrive any
        more."""

    def data(self, number: int) -> memoryview:
        """Return the bytes of a present chunk, mapped and not copied.

        Raises `SnapshotError` if the store is closed or the directory no longer exists.
        """
        file, offset, size = self.layout.chunk(number)
        with self._lock:
            if self._closed:
                raise SnapshotError(f"{self.directory} is not given out any more")
            if self._maps is None:
                self._maps = self._mapped()
            mapped = self._maps[file]
        return memoryview(mapped)[offset : offset + size]

    def _mapped(self) -> list[mmap.mmap | bytes]:
        return [map_file(self.directory / name, size) for name, size in self.layout.table.files]

    def close(self) -> bool:
        """Stop giving out chunks. Return True if no reader (including sockets) uses a chunk any more.

        The files may be overwritten only if the result is True. They may be removed in either case.
        """
        with self._lock:
            self._closed = True
            maps, self._maps = [m for m in self._maps or () if isinstance(m, mmap.mmap)], None
        quiet = True
        for mapped in maps:
            try:
                mapped.close()
            except BufferError:  # a view is still in use; the mapping closes with the last view
                quiet = False
        return quiet


class PartialDownload(ChunkStore):
    """A directory that is being downloaded and becomes `final`. All its files have their full size from the
    start.

    The object belongs to one event loop. Any thread may call `resume` and `put`.
    """

    def __init__(self, final: Path, table: ChunkTable) -> None:
        digest = table.manifest_hash.removeprefix(HASH_PREFIX)[:16]
        super().__init__(final.with_name(f"{PARTIAL_PREFIX}{final.name}-{digest}"), table)
        self.final = final
        self._fds: list[int] = []
        self._here = bytearray(self.layout.n_chunks)
        self._arrivals: dict[int, asyncio.Future[None]] = {}  # chunks that a caller awaits

    @property
    def missing(self) -> list[int]:
        """Return the numbers of the missing chunks."""
        return [number for number, here in enumerate(self._here) if not here]

    @property
    def progress(self) -> float:
        """Return the share of present chunks, 0 to 1."""
        return sum(self._here) / len(self._here)

    def resume(self) -> None:
        """Make the files, or reuse the files of an interrupted download. Raises `SnapshotError`."""
        try:
            begun = self.directory.exists()
            self.directory.mkdir(parents=True, exist_ok=True)
            named = {name for name, _ in self.layout.table.files}
            for name in os.listdir(self.directory):
                if name not in named:
                    (self.directory / name).unlink()
            for name, size in self.layout.table.files:
                self._fds.append(open_beneath(self.directory, name, os.O_RDWR | os.O_CREAT))
                reserve(self._fds[-1], size)
            for number in range(self.layout.n_chunks) if begun else ():
                self._here[number] = self.layout.matches(number, self.data(number))
        except OSError as error:
            self.abandon()
            shutil.rmtree(self.directory, ignore_errors=True)  # its old data takes the room that is needed
            raise SnapshotError(f"{self.directory} cannot be filled: {error}") from error

    def _mapped(self) -> list[mmap.mmap | bytes]:
        if not self._fds:
            return super()._mapped()
        # The mappings show later writes, and the files already have all their room.
        files = zip(self._fds, self.layout.table.files, strict=True)
        return [mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b"" for fd, (_, size) in files]

    def put(self, number: int, data: memoryview) -> bool:
        """Store chunk `number` if its hash is right. Return whether it is. Raises `SnapshotError` if it
        cannot be written."""
        if not self.layout.matches(number, data):
            return False
        file, at, _ = self.layout.chunk(number)
        try:
            while data.nbytes:
                n = os.pwrite(self._fds[file], data, at)
                data, at = data[n:], at + n
        except OSError as error:
            raise SnapshotError(f"{self.directory} cannot be filled: {error}") from error
        self._here[number] = 1
        return True

    def announce(self, number: int) -> None:
        """Wake the callers that wait for chunk `number`, which is now stored."""
        if (arrival := self._arrivals.pop(number, None)) is not None:
            arrival.set_result(None)

    async def when_here(self, number: int) -> None:
        if not self._here[number]:
            loop = asyncio.get_running_loop()
            await asyncio.shield(self._arrivals.setdefault(number, loop.create_future()))

    def finish(self) -> None:
        """Give the directory its final name. Raises `SnapshotError` unless its manifest is the announced
        one."""
        manifest = self.layout.table.files[-1][0]
        try:
            sealed = (self.directory / manifest).read_bytes()
            if not all(self._here) or hash_of(sealed) != self.layout.table.manifest_hash:
                shutil.rmtree(self.directory, ignore_errors=True)
                raise SnapshotError(f"what was fetched for {self.final.name} has another manifest")
            os.rename(self.directory, self.final)
            self.directory = self.final
        except OSError as error:
            raise SnapshotError(f"{self.final} cannot be made: {error}") from error
        self._close_files()

    def abandon(self) -> None:
        """Stop before the download is complete. Stored chunks stay for `resume`. No thread may be in
        `put`."""
        self._close_files()
        self.close()
        for arrival in self._arrivals.values():
            arrival.set_exception(SnapshotError(f"the download of {self.final.name} was ended"))
            arrival.exception()  # marks the error as seen: its waiter may have left
        self._arrivals.clear()

    def _close_files(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def count_chunks(size_bytes: int, chunk_bytes: int) -> int:
    return -(-size_bytes // chunk_bytes)


def chunk_bytes_for(size_bytes: int) -> int:
    """Return the size of a chunk: a power of two within the limits. If the limits allow, it divides
    `size_bytes` into `WANTED_CHUNKS` to twice as many chunks."""
    wanted = max(1, size_bytes // WANTED_CHUNKS)
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, 1 << (wanted.bit_length() - 1)))


def build_table(directory: Path, manifest_hash: str) -> ChunkTable:
    """Read and hash every file of a published directory, once. Hashing releases Python's lock.

    Raises `SnapshotError` if the directory has another manifest or no longer exists.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if name != MANIFEST_FILE)
        if hash_of((directory / MANIFEST_FILE).read_bytes()) != manifest_hash:
            raise SnapshotError(f"{directory} has another manifest than was announced")
        files = [(name, (directory / name).stat().st_size) for name in [*names, MANIFEST_FILE]]
        chunk_bytes = chunk_bytes_for(sum(size for _, size in files))
        digests = bytearray()
        for name, size in files:
            view = memoryview(map_file(directory / name, size))
            for at in range(0, size, chunk_bytes):
                digests += blake3(view[at : at + chunk_bytes]).digest()
    except OSError as error:
        raise SnapshotError(f"{directory} cannot be read: {error}") from error
    return ChunkTable(TABLE_SCHEMA, manifest_hash, chunk_bytes, files, bytes(digests))


def map_file(path: Path, size: int) -> mmap.mmap | bytes:
    """Return a file of `size` bytes mapped for reading. Raises `SnapshotError` for another size or a missing
    file."""
    try:
        mapped = map_path(path)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error
    if len(mapped) != size:
        raise SnapshotError(f"{path} does not have {size} bytes")
    return mapped


def encode_table(table: ChunkTable) -> bytes:
    return msgspec.msgpack.encode(table)


def decode_table(data: bytes | memoryview) -> ChunkTable:
    """Return the chunk table. Raises `SnapshotError` for data that `build_table` cannot have made."""
    try:
        table = msgspec.msgpack.decode(data, type=ChunkTable)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SnapshotError(f"not a chunk table: {error}") from error
    if table.schema != TABLE_SCHEMA:
        raise SnapshotError(f"a chunk table of schema {table.schema}; this program reads {TABLE_SCHEMA}")
    names = [name for name, _ in table.files]
    if not names or names[-1] != MANIFEST_FILE or len(set(names)) != len(names):
        raise SnapshotError("a chunk table must name each file once, and the manifest last")
    for name in names[:-1]:
        check_file_name(name)
    if table.files[-1][1] == 0:
        raise SnapshotError("a chunk table with an empty manifest")
    n = sum(count_chunks(size, table.chunk_bytes) for _, size in table.files)
    if n > MAX_CHUNKS or len(table.digests) != n * DIGEST_BYTES:
        raise SnapshotError(f"a chunk table of {len(table.digests)} digest bytes for {n} chunks")
    return table
