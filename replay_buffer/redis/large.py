"""Large episodes: where their bytes lie, outside the hash of their group.

An episode of at least `KEY_BYTES` lies in keys of its own, in chunks of at most `CHUNK_BYTES`: Redis takes
such a value over as it came, where an argument of a script is copied three times. With the job's own Redis
on this host an episode of at least `FILE_BYTES` lies in a file beside it (`shelf.py`). The hash `…:large`
says where: it is written by the same script call as the ledger, so an episode is acknowledged with both or
with neither.

What a crash leaves half done is found when the store is opened: keys are named in the set `…:staged`
before they are written and taken off it by the write that refers to them; files are those in the folder
that nothing refers to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from replay_buffer.ledger.index import WriteSet
from replay_buffer.redis.connection import Argument
from replay_buffer.redis.keys import Bytes, Commands, Keys, commands_of

KEY_BYTES = 32 << 10
"""From this size on Redis reads an argument into the very buffer that it then keeps as the value."""
CHUNK_BYTES = 1 << 20
FILE_BYTES = 1 << 20
EPISODES = "episodes"
"""Folder of the files, beside those of the job's own Redis."""

EpisodeKey = tuple[str, int]
"""(group id, sample)."""


class BlobRef(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of one episode lie."""

    name: str
    """Of the file, or what the keys' names begin with. One message's large episodes share it."""
    size_bytes: int
    at: int
    """Offset in the file, or number of the first key."""
    chunks: int = 0
    """Keys; 0: it is a file."""


read_ref = msgspec.msgpack.Decoder(BlobRef).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class PreparedWrite:
    """One write set made ready for Redis: `ahead` are commands to send right before the script's."""

    commands: Commands
    ahead: list[tuple[Argument, ...]] = field(default_factory=list)
    files_freed: list[str] = field(default_factory=list)
    """To remove once the write is confirmed."""


class Large:
    """What lies where, as of the last write submitted."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._refs: dict[str, dict[int, BlobRef]] = {}
        self._front_epoch = 0
        self._parcels = 0

    def load(self, table: Mapping[bytes, bytes], front_epoch: int) -> None:
        """What Redis holds, read by the front of this epoch."""
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
        """Whether an episode of that group lies in that file."""
        return any(ref.name == name and not ref.chunks for ref in self._refs.get(group_id, {}).values())

    def in_files(self) -> Iterator[tuple[EpisodeKey, BlobRef]]:
        for group_id, samples in self._refs.items():
            for sample, ref in samples.items():
                if not ref.chunks:
                    yield (group_id, sample), ref

    def key_names(self, ref: BlobRef) -> list[str]:
        """Of an episode that lies in keys, in order."""
        return [self._keys.chunk(ref.name, ref.at + i) for i in range(ref.chunks)]

    def prepare(self, writes: WriteSet, attachments: Sequence[Bytes | BlobRef]) -> PreparedWrite:
        """Make `writes` into commands, with what is large in places of its own, and take note of it."""
        parcel = PreparedWrite(Commands(self._keys))
        freed = self._free(writes)
        staged, ahead, kept = self._place(writes, attachments)
        commands = parcel.commands
        parcel.ahead = ahead
        for name in [name for ref in kept.values() for name in self.key_names(ref)]:
            commands.add("EXISTS", name)
        for (group_id, sample), ref in freed:
            commands.add("HDEL", self._keys.large, (f"{group_id}.{sample}",))
            for name in self.key_names(ref):
                commands.add("UNLINK", name)
        commands_of(self._keys, writes, attachments, kept, into=commands)
        for (group_id, sample), ref in kept.items():
            commands.add("HSET", self._keys.large, (f"{group_id}.{sample}", _encode(ref)))
        if staged:
            commands.add("SREM", self._keys.staged, (staged,))
        parcel.files_freed = self._unused([ref.name for _, ref in freed if not ref.chunks], writes.freed)
        return parcel

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
        """Those files that no episode is in any more. A file holds episodes of one group."""
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
    """The keys that a member of the set of staged parcels stands for."""
    stem, _, chunks = staged.rpartition(":")
    return [keys.chunk(stem, i) for i in range(int(chunks))]
