"""Storage of large episodes outside the hash of their group (docs/decisions/0006).

The hash `…:large` has the place of each large episode. The script call that writes the ledger also writes
this hash. Therefore the record of an episode and its place either both exist or are both missing. Partial
writes of a crash are removed when the store is opened. Keys are added to the set `…:staged` before they are
written, and the ledger write that refers to them removes them from the set. When the store is opened, keys in
the set are therefore leftovers of a crash. Files that no record refers to are removed too.

A file is complete before its name is published. It is also flushed to disk, except with `durability: memory`.
Files of freed episodes stay for `GRACE_S`, because with `durability: everysec` a Redis that has lost its last
second may refer to them again. A name is never used twice.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from areal_async.base.own_files import map_open, sync
from replay_buffer.attachments import PREFIXES, LateRemoval
from replay_buffer.ledger.index import WriteSet
from replay_buffer.redis.connection import Argument
from replay_buffer.redis.writer import Bytes, Commands, Keys

KEY_BYTES = 32 << 10
"""Smallest size of an argument that Redis does not copy: it reads the argument directly into the buffer of
the value."""
CHUNK_BYTES = 1 << 20
FILE_BYTES = 1 << 20
EPISODES = "episodes"  # Folder of the files, beside the files of the job's own Redis

EpisodeKey = tuple[str, int]
"""(group id, sample)"""


class BlobRef(msgspec.Struct, frozen=True, array_like=True):
    """Place of the bytes of one episode."""

    name: str  # File name, or prefix of the keys' names. All large episodes of one message share it
    size_bytes: int
    at: int  # Offset in the file, or number of the first key
    chunks: int = 0  # Number of keys; 0 for a file


read_ref = msgspec.msgpack.Decoder(BlobRef).decode
_encode = msgspec.msgpack.Encoder().encode


class PreparedWrite(NamedTuple):
    """A write set in the form of Redis commands. `ahead` has commands to send right before the script."""

    commands: Commands
    ahead: list[tuple[Argument, ...]]
    files_freed: list[str]  # Files to remove after the write is confirmed


class Large:
    """Places of all large episodes, as of the last submitted write."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._refs: dict[str, dict[int, BlobRef]] = {}
        self._front_epoch = 0
        self._parcels = 0

    def load(self, table: Mapping[bytes, bytes], front_epoch: int) -> None:
        """Load the table from Redis. `front_epoch` is the epoch of the front that reads it."""
        self._refs = {}
        self._front_epoch = front_epoch
        self._parcels = 0
        for name, value in table.items():
            group_id, _, sample = name.decode().rpartition(".")
            self._refs.setdefault(group_id, {})[int(sample)] = read_ref(value)

    def ref(self, group_id: str, sample: int) -> BlobRef | None:
        samples = self._refs.get(group_id)
        return None if samples is None else samples.get(sample)

    def uses(self, group_id: str, name: str) -> bool:
        """Return whether an episode of this group is in this file."""
        return any(ref.name == name and not ref.chunks for ref in self._refs.get(group_id, {}).values())

    def in_files(self) -> Iterator[tuple[EpisodeKey, BlobRef]]:
        for group_id, samples in self._refs.items():
            for sample, ref in samples.items():
                if not ref.chunks:
                    yield (group_id, sample), ref

    def key_names(self, ref: BlobRef) -> list[str]:
        """Return the keys of an episode that is stored in keys, in order."""
        return [self._keys.chunk(ref.name, ref.at + i) for i in range(ref.chunks)]

    def prepare(self, writes: WriteSet, attachments: Sequence[Bytes | BlobRef]) -> PreparedWrite:
        """Return the commands for `writes`, with places for large episodes, and update the table."""
        freed = self._free(writes)
        staged, ahead, kept = self._place(writes, attachments)
        commands = Commands(self._keys)
        for name in [name for ref in kept.values() for name in self.key_names(ref)]:
            commands.add("EXISTS", name)
        for (group_id, sample), ref in freed:
            commands.add("HDEL", self._keys.large, (f"{group_id}.{sample}",))
            for name in self.key_names(ref):
                commands.add("UNLINK", name)
        commands.add_writes(writes, attachments, kept)
        for (group_id, sample), ref in kept.items():
            commands.add("HSET", self._keys.large, (f"{group_id}.{sample}", _encode(ref)))
        if staged:
            commands.add("SREM", self._keys.staged, (staged,))
        unused = self._unused([ref.name for _, ref in freed if not ref.chunks], writes.freed)
        return PreparedWrite(commands, ahead, unused)

    def _free(self, writes: WriteSet) -> list[tuple[EpisodeKey, BlobRef]]:
        gone: list[tuple[EpisodeKey, BlobRef]] = []
        for group_id, samples in writes.freed.items():
            held = self._refs.get(group_id)
            if held is None:
                continue
            for sample in list(held) if samples is None else samples:
                if (ref := held.pop(sample, None)) is not None:
                    gone.append(((group_id, sample), ref))
            if not held:
                del self._refs[group_id]
        return gone

    def _unused(self, names: list[str], groups: Mapping[str, object]) -> list[str]:
        """Return those of the files `names` that contain no more episodes. A file has episodes of one group
        only."""
        used = {ref.name for group_id in groups for ref in self._refs.get(group_id, {}).values()}
        return [name for name in dict.fromkeys(names) if name not in used]

    def _place(
        self, writes: WriteSet, attachments: Sequence[Bytes | BlobRef]
    ) -> tuple[str, list[tuple[Argument, ...]], dict[EpisodeKey, BlobRef]]:
        kept: dict[EpisodeKey, BlobRef] = {}
        ahead: list[tuple[Argument, ...]] = []
        stem, chunks = f"{self._front_epoch}.{self._parcels}", 0
        for group_id, samples in writes.blobs.items():
            for sample, number in samples.items():
                blob = attachments[number]
                if isinstance(blob, BlobRef):
                    ref = blob
                elif len(blob) < KEY_BYTES:
                    continue
                else:
                    view = memoryview(blob)
                    pieces = [view[i : i + CHUNK_BYTES] for i in range(0, len(view), CHUNK_BYTES)]
                    ref = BlobRef(stem, len(view), chunks, len(pieces))
                    ahead += [
                        ("SET", self._keys.chunk(stem, chunks + i), piece) for i, piece in enumerate(pieces)
                    ]
                    chunks += len(pieces)
                kept[group_id, sample] = ref
                self._refs.setdefault(group_id, {})[sample] = ref
        if not chunks:
            return "", ahead, kept
        self._parcels += 1
        staged = f"{stem}:{chunks}"
        return staged, [("SADD", self._keys.staged, staged), *ahead], kept


def staged_keys(keys: Keys, staged: str) -> list[str]:
    """Return the keys that a member of the set `staged` stands for."""
    stem, _, chunks = staged.rpartition(":")
    return [keys.chunk(stem, i) for i in range(int(chunks))]


# --- files beside the buffer ---


GRACE_S = 3.0
ALIGN_BYTES = 4096  # Each episode begins on a page, so that it can be mapped alone


class BlobFiles:
    """Files with episodes in `folder`. Call `open` first, and again after a loss of Redis. Call `settled`
    after each `write`."""

    def __init__(self, folder: Path, durability: str, grace_s: float = GRACE_S) -> None:
        self._folder = folder
        self._durability = durability
        self._token = secrets.token_hex(4)
        self._count = 0
        self._under_way: set[str] = set()
        """Files that the ledger may not refer to yet. They are not removed as leftovers."""
        self._freed = LateRemoval(folder, grace_s)

    async def open(self, refs: Iterable[tuple[EpisodeKey, BlobRef]]) -> list[EpisodeKey]:
        """Remove leftovers. Return the episodes of `refs` whose bytes are missing."""
        by_name: dict[str, list[tuple[EpisodeKey, BlobRef]]] = {}
        for place, ref in refs:
            by_name.setdefault(ref.name, []).append((place, ref))
        self._freed.stop()
        return await asyncio.to_thread(self._sort_out, by_name)

    async def write(self, blobs: Sequence[Bytes | BlobRef]) -> tuple[list[Bytes | BlobRef], str]:
        """Write blobs of at least `FILE_BYTES` into one file. Return the list with refs in their place, and
        the file's name ("" for none). Pass the name to `settled` once the put is decided.

        If the disk is full or fails, raises OSError and leaves no file."""
        numbers = [
            i for i, blob in enumerate(blobs) if not isinstance(blob, BlobRef) and len(blob) >= FILE_BYTES
        ]
        placed = list(blobs)
        if not numbers:
            return placed, ""
        self._count += 1
        name = f"{self._token}-{self._count:x}"
        at, parts = 0, list[Bytes]()
        for i in numbers:
            blob = blobs[i]
            assert not isinstance(blob, BlobRef)
            placed[i] = BlobRef(name, len(blob), at)
            padding = -len(blob) % ALIGN_BYTES
            parts += (blob, bytes(padding))
            at += len(blob) + padding
        self._under_way.add(name)
        try:
            await asyncio.to_thread(self._write, name, parts)
        except BaseException:
            self._under_way.discard(name)
            raise
        return placed, name

    def settled(self, name: str, *, used: bool) -> None:
        """Record that the ledger refers to the file now (`used`), or never will."""
        self._under_way.discard(name)
        if not used:
            asyncio.get_running_loop().run_in_executor(None, self._freed.remove, name)

    async def read(self, refs: Sequence[BlobRef]) -> list[memoryview | None]:
        """Return the episodes' bytes as memory maps of their files. An entry is None if the episode is
        missing."""
        return await asyncio.to_thread(lambda: [self._map(ref) for ref in refs])

    def remove(self, names: Sequence[str]) -> None:
        """Remove files after Redis has confirmed that no record refers to them."""
        self._freed.add(names)

    def close(self) -> None:
        """Stop removing files. The next `open` removes the rest."""
        self._freed.stop()

    # --- in a thread ---

    def _write(self, name: str, parts: list[Bytes]) -> None:
        path = self._folder / name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.writelines(parts)
                if self._durability != "memory":
                    file.flush()
                    os.fdatasync(fd)
                    sync(self._folder)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _map(self, ref: BlobRef) -> memoryview | None:
        try:
            fd = os.open(self._folder / ref.name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return memoryview(map_open(fd, ref.at, ref.size_bytes, populate=True))
        finally:
            os.close(fd)

    def _sort_out(self, by_name: dict[str, list[tuple[EpisodeKey, BlobRef]]]) -> list[EpisodeKey]:
        self._folder.mkdir(parents=True, exist_ok=True)
        sizes = {}
        for entry in os.scandir(self._folder):
            if entry.name in by_name:
                sizes[entry.name] = entry.stat().st_size
            # `_under_way` is read now, because a message may have arrived meanwhile.
            elif not entry.name.startswith(PREFIXES) and entry.name not in self._under_way:
                os.unlink(entry.path)
        return [
            place
            for name, refs in by_name.items()
            for place, ref in refs
            if sizes.get(name, 0) < ref.at + ref.size_bytes
        ]
