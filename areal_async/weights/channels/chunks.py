"""A snapshot directory in chunks: how it is cut, the hash of every piece, and the pieces that are here.

A `ChunkTable` names one directory by the hash of its manifest. Chunks are numbered through all files in the
order of the table, the manifest's own come last; each is `chunk_bytes` long but for the last of a file.

Chunks are read from a `ChunkStore`, which is a complete directory, or a `PartialDownload`, a directory that
is being filled under a hidden name beside its final one. Promises of the latter:
- A chunk is readable only after its bytes, whose hash matched, are in the file.
- `resume` hashes everything that an interrupted download left, and keeps the chunks that match.
- The directory gets its name by one rename, when every chunk is there and the manifest is the announced one.
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
"""Intended number of chunks in a snapshot. With many chunks a chain of receivers costs little more than one
transfer; with too many the messages would cost more than their contents."""
MAX_CHUNKS = 1 << 26
PARTIAL_PREFIX = ".partial-"


class ChunkTable(msgspec.Struct, frozen=True):
    """Files with their sizes in bytes, and the BLAKE3 digests of all chunks one after another."""

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
        """The number of the first chunk of each file, and how many there are."""

    def chunk(self, number: int) -> tuple[int, int, int]:
        """Return the file of a chunk (index into the table's files), its offset there and its size, in
        bytes."""
        file = bisect_right(self._first, number) - 1
        while self.table.files[file][1] == 0:  # an empty file has no chunk, and starts where the next does
            file -= 1
        offset = (number - self._first[file]) * self.table.chunk_bytes
        return file, offset, min(self.table.chunk_bytes, self.table.files[file][1] - offset)

    def matches(self, number: int, data: memoryview) -> bool:
        """Return whether `data` is chunk `number`, byte for byte."""
        at = number * DIGEST_BYTES
        expected = self.table.digests[at : at + DIGEST_BYTES]
        return data.nbytes == self.chunk(number)[2] and blake3(data).digest() == expected


class ChunkStore:
    """The chunks of a complete directory. Files are mapped when they are first read."""

    def __init__(self, directory: Path, table: ChunkTable) -> None:
        self.directory = directory
        self.layout = ChunkLayout(table)
        self._maps: list[mmap.mmap | bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    async def when_here(self, number: int) -> None:
        """Return once chunk `number` can be read. Raises `SnapshotError` when it never will be."""

    def data(self, number: int) -> memoryview:
        """Return the bytes of a chunk that is here, mapped, not copied. Raises `SnapshotError` once closed,
        or when the directory is gone."""
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
        """Serve no more chunks, and return whether nobody, a socket included, still reads a served chunk.
        Only then may the files be overwritten. They may be removed in either case."""
        with self._lock:
            self._closed = True
            maps, self._maps = [m for m in self._maps or () if isinstance(m, mmap.mmap)], None
        quiet = True
        for mapped in maps:
            try:
                mapped.close()
            except BufferError:  # a view of it lives; the mapping goes with the last one
                quiet = False
        return quiet


class PartialDownload(ChunkStore):
    """A directory under way to `final`, all of whose files have their full size and its room. Belongs to one
    event loop, but for `resume` and `put`, which any thread may call."""

    def __init__(self, final: Path, table: ChunkTable) -> None:
        digest = table.manifest_hash.removeprefix(HASH_PREFIX)[:16]
        super().__init__(final.with_name(f"{PARTIAL_PREFIX}{final.name}-{digest}"), table)
        self.final = final
        self._fds: list[int] = []
        self._here = bytearray(self.layout.n_chunks)
        self._arrivals: dict[int, asyncio.Future[None]] = {}  # Chunks that somebody waits for

    @property
    def missing(self) -> list[int]:
        """Numbers of the chunks that are not here."""
        return [number for number, here in enumerate(self._here) if not here]

    @property
    def progress(self) -> float:
        """Share of the chunks that are here, 0 to 1."""
        return sum(self._here) / len(self._here)

    def resume(self) -> None:
        """Create the files, or take over the files of an interrupted download. Raises `SnapshotError`."""
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
            shutil.rmtree(self.directory, ignore_errors=True)  # What it holds is what there is no room for
            raise SnapshotError(f"{self.directory} cannot be filled: {error}") from error

    def _mapped(self) -> list[mmap.mmap | bytes]:
        if not self._fds:
            return super()._mapped()
        # What is put later shows through these, and all of it has room.
        files = zip(self._fds, self.layout.table.files, strict=True)
        return [mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b"" for fd, (_, size) in files]

    def put(self, number: int, data: memoryview) -> bool:
        """Take chunk `number` if its hash is right. Raises `SnapshotError` when it cannot be written."""
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
        """Wake those who wait for chunk `number` that it was put."""
        if (arrival := self._arrivals.pop(number, None)) is not None:
            arrival.set_result(None)

    async def when_here(self, number: int) -> None:
        if not self._here[number]:
            loop = asyncio.get_running_loop()
            await asyncio.shield(self._arrivals.setdefault(number, loop.create_future()))

    def finish(self) -> None:
        """Give the directory its name. Raises `SnapshotError` unless it is the announced one."""
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
        """End an unfinished download. Chunks that were put stay for `resume`. No thread may be in `put`."""
        self._close_files()
        self.close()
        for arrival in self._arrivals.values():
            arrival.set_exception(SnapshotError(f"the download of {self.final.name} was ended"))
            arrival.exception()  # marks it as seen: who waited may have gone
        self._arrivals.clear()

    def _close_files(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)


def count_chunks(size_bytes: int, chunk_bytes: int) -> int:
    return -(-size_bytes // chunk_bytes)


def chunk_bytes_for(size_bytes: int) -> int:
    """Return a power of two that cuts `size_bytes` into `WANTED_CHUNKS` to twice as many, within the
    limits."""
    wanted = max(1, size_bytes // WANTED_CHUNKS)
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, 1 << (wanted.bit_length() - 1)))


def build_table(directory: Path, manifest_hash: str) -> ChunkTable:
    """Read and hash every file of a published directory, once. Lets go of the interpreter while it hashes.

    Raises `SnapshotError` when its manifest is another, or when it is gone."""
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
    """Return a file of `size` bytes mapped for reading. Raises `SnapshotError` if it has another size or is
    gone."""
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
    """Raises `SnapshotError` for anything that `build_table` cannot have made."""
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
