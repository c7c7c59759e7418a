"""Files beside the buffer for large episodes: one per message, written once, removed whole.

Promises: a file is complete, and with tier `always` flushed to disk, before its name is given out; with
`everysec` it is flushed within `FLUSH_S`. No episode is copied in Python: files are written from the frames
they came in, and read as maps. A name is never used twice.

A file that nothing refers to is removed when the folder is next opened. With `everysec` what is freed stays
for `GRACE_S`: a Redis that lost its last second may refer to it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from areal_async.runtime.log import get_logger
from replay_buffer.redis.keys import Bytes
from replay_buffer.redis.large import FILE_BYTES, BlobRef, EpisodeKey

FLUSH_S = 0.5
GRACE_S = 3.0
MOST_VECTORS = 256
"""Per write; the kernel takes at most 1024."""
ALIGN_BYTES = 4096
"""Each episode begins on a page, so that it can be mapped alone."""

log = get_logger("buffer")


class BlobFiles:
    """The files in `folder`. `write`, then `settled`; `read`, `remove`; `open` before all, and again after a
    loss of Redis."""

    def __init__(self, folder: Path, durability: str) -> None:
        self._folder = folder
        self._durability = durability
        self._token = secrets.token_hex(4)
        self._count = 0
        self._under_way: set[str] = set()
        """Files that the ledger may not refer to yet: not to be taken for left over."""
        self._unflushed: set[str] = set()
        self._flusher: asyncio.Task[None] | None = None
        self._removing: dict[str, asyncio.TimerHandle | None] = {}

    async def open(self, refs: Iterable[tuple[EpisodeKey, BlobRef]]) -> list[EpisodeKey]:
        """Remove what is left over; return the episodes of `refs` whose bytes are not there (any more)."""
        by_name: dict[str, list[tuple[EpisodeKey, BlobRef]]] = {}
        for place, ref in refs:
            by_name.setdefault(ref.name, []).append((place, ref))
        for name in [name for name in self._removing if name in by_name]:
            handle = self._removing.pop(name)
            if handle is not None:
                handle.cancel()
        return await asyncio.to_thread(self._sort_out, by_name)

    async def write(self, blobs: Sequence[Bytes | BlobRef]) -> tuple[list[Bytes | BlobRef], str]:
        """Put those of at least `FILE_BYTES` into one file; returns the list with refs in their place, and
        the file's name ("" for none), which must be given to `settled` once it is decided what becomes of it.

        Raises OSError, having left nothing: the disk is full, or fails."""
        numbers = [
            i for i, blob in enumerate(blobs) if not isinstance(blob, BlobRef) and len(blob) >= FILE_BYTES
        ]
        placed = list(blobs)
        if not numbers:
            return placed, ""
        self._count += 1
        name = f"{self._token}-{self._count:x}"
        at, vectors = 0, list[Bytes]()
        for i in numbers:
            blob = blobs[i]
            assert not isinstance(blob, BlobRef)
            placed[i] = BlobRef(name, len(blob), at)
            padding = -len(blob) % ALIGN_BYTES
            vectors += (blob, bytes(padding))
            at += len(blob) + padding
        self._under_way.add(name)
        try:
            await asyncio.to_thread(self._write, name, vectors)
        except BaseException:
            self._under_way.discard(name)
            raise
        return placed, name

    def settled(self, name: str, *, used: bool) -> None:
        """The ledger refers to the file now, or never will."""
        self._under_way.discard(name)
        if not used:
            self.remove([name], at_once=True)
        elif self._durability == "everysec":
            self._unflushed.add(name)
            if self._flusher is None:
                self._flusher = asyncio.create_task(self._flush(), name="buffer-flush")

    async def read(self, refs: Sequence[BlobRef]) -> list[memoryview | None]:
        """The episodes' bytes, as maps of their files; None for one that is gone."""
        return await asyncio.to_thread(lambda: [self._map(ref) for ref in refs])

    def remove(self, names: Sequence[str], *, at_once: bool = False) -> None:
        """Nothing refers to these files any more, as Redis has confirmed."""
        loop = asyncio.get_running_loop()
        self._unflushed.difference_update(names)
        for name in names:
            if at_once or self._durability != "everysec":
                self._removing[name] = None
                loop.run_in_executor(None, self._unlink, name)
            else:
                self._removing[name] = loop.call_later(GRACE_S, self._remove_late, name)

    async def close(self) -> None:
        """Flush what is left to flush; what is left to remove waits for the next `open`."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.wait([self._flusher])
            self._flusher = None
        for handle in self._removing.values():
            if handle is not None:
                handle.cancel()
        self._removing.clear()
        await asyncio.to_thread(self._flush_files, list(self._unflushed))

    # --- in the loop ---

    def _remove_late(self, name: str) -> None:
        asyncio.get_running_loop().run_in_executor(None, self._unlink, name)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            names = list(self._unflushed)
            failed = await asyncio.to_thread(self._flush_files, names)
            self._unflushed.difference_update(set(names).difference(failed))

    # --- in a thread ---

    def _write(self, name: str, vectors: list[Bytes]) -> None:
        path = self._folder / name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(fd, vectors)
            if self._durability == "always":
                os.fdatasync(fd)
                self._flush_folder()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _map(self, ref: BlobRef) -> memoryview | None:
        try:
            fd = os.open(self._folder / ref.name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return memoryview(mmap.mmap(fd, ref.size_bytes, flags, mmap.PROT_READ, offset=ref.at))
        finally:
            os.close(fd)

    def _flush_files(self, names: Sequence[str]) -> list[str]:
        """Returns those that could not be flushed."""
        failed = []
        for name in names:
            try:
                fd = os.open(self._folder / name, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                os.fdatasync(fd)
            except OSError as error:
                log.error("a file of episodes could not be flushed", file=name, error=str(error))
                failed.append(name)
            finally:
                os.close(fd)
        if names:
            self._flush_folder()
        return failed

    def _flush_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / name)
        self._removing.pop(name, None)

    def _sort_out(self, by_name: dict[str, list[tuple[EpisodeKey, BlobRef]]]) -> list[EpisodeKey]:
        self._folder.mkdir(parents=True, exist_ok=True)
        sizes = {}
        for entry in os.scandir(self._folder):
            if entry.name in by_name:
                sizes[entry.name] = entry.stat().st_size
            elif entry.name not in self._under_way:  # looked at now: a message may come meanwhile
                os.unlink(entry.path)
        return [
            place
            for name, refs in by_name.items()
            for place, ref in refs
            if sizes.get(name, 0) < ref.at + ref.size_bytes
        ]


def _write_all(fd: int, vectors: list[Bytes]) -> None:
    rest = [memoryview(vector) for vector in vectors if len(vector)]
    while rest:
        written = os.writev(fd, rest[:MOST_VECTORS])
        done = 0
        while done < len(rest) and written >= len(rest[done]):
            written -= len(rest[done])
            done += 1
        rest = rest[done:]
        if written:
            rest[0] = rest[0][written:]
