"""The chunks that this process can hand out: of a directory that is complete, or of one that is growing.

A growing directory lies under a hidden name beside its final one, with a file that says which chunks are
verified. Promises:
- A chunk is marked only after its bytes, whose hash matched, are in the file.
- `resume` believes no mark: it hashes every marked chunk again, and keeps what matches.
- The directory gets its name by one rename, when every chunk is there and the manifest is the announced one.

Not for several threads at once.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path
from typing import Protocol

from areal_async.errors import SnapshotError
from areal_async.weights.manifest import hash_of
from areal_async.weights.transport import table as tables
from areal_async.weights.transport.table import ChunkTable, Layout, key_of, map_file

GROWING_PREFIX = ".growing-"
MARKS_PREFIX = ".marks-"


class Handed(Protocol):
    """What a socket says about bytes that it took without copying them (`zmq.MessageTracker`)."""

    @property
    def done(self) -> bool: ...


class Holding:
    """A complete directory. The files are mapped, so they outlive their removal; they must not be overwritten
    while `quiet` is false."""

    def __init__(self, directory: Path, table: ChunkTable) -> None:
        self.directory = directory
        self.layout = Layout(table)
        self.key = key_of(table.manifest_hash)
        self.waiting: dict[int, list[bytes]] = {}
        """Chunks that are not here yet -> the fetchers that want them."""
        self._views: list[memoryview] | None = None
        self._handed: deque[Handed] = deque()

    def has(self, index: int) -> bool:
        return index < self.layout.n_chunks

    def data(self, index: int) -> memoryview:
        """The bytes of a chunk that is here, without a copy."""
        if self._views is None:
            files = self.layout.table.files
            self._views = [map_file(self.directory / name, size) for name, size in files]
        chunk = self.layout.chunk(index)
        return self._views[chunk.file][chunk.offset : chunk.offset + chunk.size]

    def handed(self, tracker: Handed) -> None:
        """Bytes of this directory went to a socket that may not have sent them yet."""
        while self._handed and self._handed[0].done:
            self._handed.popleft()
        self._handed.append(tracker)

    @property
    def quiet(self) -> bool:
        """Whether no socket reads these files any more."""
        return all(tracker.done for tracker in self._handed)


class Growing(Holding):
    """A directory under way to `final`, all of whose files are there in full size, with holes."""

    def __init__(self, final: Path, table: ChunkTable) -> None:
        staging, self._marks_path = staging_of(final, table)
        super().__init__(staging, table)
        self.final = final
        self._fds: list[int] = []
        self._marks_fd = -1
        self._here = bytearray(self.layout.n_chunks)

    def resume(self) -> list[int]:
        """Make the files, or take over those of an interrupted fetch; the chunks that are here already."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            named = {name for name, _ in self.layout.table.files}
            for name in os.listdir(self.directory):
                if name not in named:
                    (self.directory / name).unlink()
            for name, size in self.layout.table.files:
                fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._fds.append(fd)
                os.ftruncate(fd, size)
            self._marks_fd = os.open(self._marks_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            marks = os.pread(self._marks_fd, self.layout.n_chunks, 0)
            os.ftruncate(self._marks_fd, self.layout.n_chunks)
            for index, mark in enumerate(marks):
                if mark and self.layout.matches(index, self.data(index)):
                    self._here[index] = 1
            os.pwrite(self._marks_fd, self._here, 0)
        except OSError as error:
            self.close()
            raise SnapshotError(f"{self.directory} cannot be filled: {error}") from error
        return self.here

    @property
    def here(self) -> list[int]:
        return [index for index, mark in enumerate(self._here) if mark]

    def has(self, index: int) -> bool:
        return index < len(self._here) and bool(self._here[index])

    def put(self, index: int, data: memoryview) -> bool:
        """Take chunk `index` if its hash is right. Raises `SnapshotError` when it cannot be written."""
        if not self.layout.matches(index, data):
            return False
        chunk = self.layout.chunk(index)
        try:
            at = chunk.offset
            while data.nbytes:
                n = os.pwrite(self._fds[chunk.file], data, at)
                data, at = data[n:], at + n
            self._here[index] = 1
            os.pwrite(self._marks_fd, b"\1", index)
        except OSError as error:
            raise SnapshotError(f"{self.directory} cannot be filled: {error}") from error
        return True

    def finish(self) -> None:
        """Give the directory its name. Raises `SnapshotError` unless it is the announced one."""
        manifest = self.layout.table.files[-1][0]
        try:
            sealed = (self.directory / manifest).read_bytes()
            if not all(self._here) or hash_of(sealed) != self.layout.table.manifest_hash:
                self.discard()
                raise SnapshotError(f"what was fetched for {self.final.name} has another manifest")
            os.rename(self.directory, self.final)
            self.directory = self.final
            self._marks_path.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotError(f"{self.final} cannot be made: {error}") from error
        finally:
            self.close()

    def discard(self) -> None:
        """Forget everything: the chunks that matched do not make up what was announced."""
        self.close()
        self._marks_path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Close the files; what is in them stays for `resume`."""
        fds, self._fds = [*self._fds, self._marks_fd], []
        self._marks_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def staging_of(final: Path, table: ChunkTable) -> tuple[Path, Path]:
    """Where `final` grows, and the file of its marks: other bytes, or another cut, have other names."""
    digest = hash_of(tables.encode(table)).rpartition(":")[2][:16]
    name = f"{final.name}-{digest}"
    return final.parent / f"{GROWING_PREFIX}{name}", final.parent / f"{MARKS_PREFIX}{name}"
