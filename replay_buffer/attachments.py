"""Storage of attachments: bytes that belong to an episode or its group and never pass through Redis. They are
always in files beside the buffer, whatever their size and wherever Redis runs.

| kind | belongs to | name |
|---|---|---|
| `routes` | an episode | its sample; the experts that were chosen for each token |
| `media` | a group | digest of the bytes; images of the task and of tools |

Promises: Redis contains no bytes of an attachment. Routes exist until their episode's bytes are freed, and
media until all bytes of their group are. Files stay `GRACE_S` longer, because a reply may still need them. A
file is complete before it gets its name. Media are also flushed to disk, unless `durable` is false.

No record refers to the files, so neither the ledger nor Redis has any data about them. A file's name contains
its kind, its group, its name and its size. When the store is opened, files of unknown groups and incomplete
files are removed. A file that a crash left in a group that still exists is found again by the repeated put,
or goes with the group. If the routes of an episode are lost, for example after the front moved to another
host, the episode is trained without routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

from areal_async.base.own_files import sync
from areal_async.data.images import digest_of

Kind = Literal["routes", "media"]
Key = tuple[Kind, str]
"""(kind, name)"""
ROUTES, MEDIA = PREFIXES = ("routes-", "media-")
"""Prefixes of the names of these files, to distinguish them from episode files in the same folder."""
PART = ".part"
GRACE_S = 3.0


def routes_key(sample: int) -> Key:
    return "routes", str(sample)


def media_key(digest: str) -> Key:
    return "media", digest


class AttachmentFile(NamedTuple):
    """The file `name` with an attachment."""

    name: str
    size_bytes: int


class LateRemoval:
    """Removal of freed files in `folder`, each after `grace_s`. Belongs to one event loop."""

    def __init__(self, folder: Path, grace_s: float) -> None:
        self._folder = folder
        self._grace_s = grace_s
        self._waiting: dict[str, asyncio.TimerHandle] = {}

    def add(self, names: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        for name in names:
            late = partial(loop.run_in_executor, None, self.remove, name)
            self._waiting[name] = loop.call_later(self._grace_s, late)

    def stop(self) -> list[str]:
        """Remove no more files. Return the names of the files that are left."""
        waiting, self._waiting = self._waiting, {}
        for handle in waiting.values():
            handle.cancel()
        return [*waiting]

    def remove(self, name: str) -> None:
        """Remove a file now."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / name)
        self._waiting.pop(name, None)


class AttachmentFiles:
    """Files with attachments of one job in `folder`. Belongs to one event loop."""

    def __init__(self, folder: Path, grace_s: float = GRACE_S, *, durable: bool = True) -> None:
        self.media_bytes = 0
        """Bytes of all media. The ledger counts the bytes of routes with their episodes."""
        self._folder = folder
        self._durable = durable
        self._freed = LateRemoval(folder, grace_s)
        self._held: dict[str, dict[Key, AttachmentFile]] = {}
        self._under_way: set[str] = set()

    async def open(self, groups: Collection[str]) -> None:
        """Read the list of files, and remove files of groups that are not in `groups`. May be called
        again."""
        self._freed.stop()
        self._held = await asyncio.to_thread(self._found, frozenset(groups))
        files = [(key, file) for held in self._held.values() for key, file in held.items()]
        self.media_bytes = sum(file.size_bytes for (kind, _), file in files if kind == "media")

    async def write(
        self, group_id: str, given: Mapping[Key, bytes | memoryview]
    ) -> dict[Key, AttachmentFile]:
        """Write attachments of a group into files. The caller must pass the files to `settled` once it is
        decided which of them are kept. If the disk is full or fails, raises OSError and leaves no file."""
        files = {key: _named(group_id, key, len(data)) for key, data in given.items()}
        names = [file.name for file in files.values()]
        self._under_way.update(names)
        try:
            await asyncio.to_thread(self._write, files, given)
        finally:
            self._under_way.difference_update(names)
        return files

    def settled(self, group_id: str, files: Mapping[Key, AttachmentFile], *, kept: Collection[Key]) -> None:
        """Keep the files `kept`, and remove the others."""
        held = self._held.setdefault(group_id, {})
        gone = []
        for key, file in files.items():
            before = held.get(key)
            if key in kept:
                self._hold(held, key, file)
                gone += [before.name] if before is not None and before != file else []
            else:
                gone.append(file.name)
                if before == file:
                    self._hold(held, key, None)
        if not held:
            del self._held[group_id]
        self._freed.add(gone)

    def release(self, freed: Mapping[str, Sequence[int] | None]) -> list[str]:
        """Forget the attachments of these groups' samples, whose bytes are to be freed, and return the files
        for `remove`. None means the whole group, with its media."""
        names = []
        for group_id, samples in freed.items():
            held = self._held.get(group_id, {})
            for key in [*held] if samples is None else [routes_key(sample) for sample in samples]:
                if key in held:
                    names.append(held[key].name)
                    self._hold(held, key, None)
            if not held:
                self._held.pop(group_id, None)
        return names

    def remove(self, names: Sequence[str]) -> None:
        """Remove released files after Redis has confirmed that their bytes are freed."""
        self._freed.add(names)

    def size_of(self, group_id: str, key: Key) -> int | None:
        """Return the size of an attachment in bytes, or None if the group does not have it."""
        file = self._held.get(group_id, {}).get(key)
        return None if file is None else file.size_bytes

    def has_media(self, group_id: str) -> bool:
        return any(kind == "media" for kind, _ in self._held.get(group_id, ()))

    async def read(self, wanted: Sequence[tuple[str, Key]]) -> list[memoryview | None]:
        """Return attachments by (group id, key), read from their files. None means that there is none, or
        that its file is gone or altered. Such a file is forgotten."""
        files = [self._held.get(group_id, {}).get(key) for group_id, key in wanted]
        named = [(key, file) for (_, key), file in zip(wanted, files, strict=True)]
        found = await asyncio.to_thread(lambda: [file and self._bytes(key, file) for key, file in named])
        for (group_id, key), file, data in zip(wanted, files, found, strict=True):
            if file is not None and data is None:
                self.settled(group_id, {key: file}, kept=())
        return found

    def close(self) -> None:
        """Remove all freed files now, because no client asks for them any more."""
        for name in self._freed.stop():
            self._freed.remove(name)

    def _hold(self, held: dict[Key, AttachmentFile], key: Key, file: AttachmentFile | None) -> None:
        before = held.pop(key, None)
        if file is not None:
            held[key] = file
        if key[0] == "media":
            self.media_bytes += (file.size_bytes if file else 0) - (before.size_bytes if before else 0)

    # --- in a thread ---

    def _write(self, files: Mapping[Key, AttachmentFile], given: Mapping[Key, bytes | memoryview]) -> None:
        paths = {key: self._folder / file.name for key, file in files.items()}
        flushed = [key for key in files if self._durable and key[0] == "media"]
        try:
            for key, path in paths.items():
                part = path.with_name(path.name + PART)
                part.write_bytes(given[key])
                if key in flushed:
                    sync(part)
                part.rename(path)
            if flushed:
                sync(self._folder)
        except BaseException:
            for path in paths.values():
                path.with_name(path.name + PART).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            raise

    def _found(self, groups: frozenset[str]) -> dict[str, dict[Key, AttachmentFile]]:
        self._folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, dict[Key, AttachmentFile]] = {}
        entries = [entry for entry in os.scandir(self._folder) if entry.name.startswith(PREFIXES)]
        for _, name, size in sorted((e.stat().st_mtime_ns, e.name, e.stat().st_size) for e in entries):
            if name.removesuffix(PART) in self._under_way:
                continue
            kind, _, rest = name.partition("-")
            parts = rest.split(",")
            if len(parts) != 4 or parts[2] != str(size) or unquote(parts[0]) not in groups:
                # Of a group that has ended, of another release, or incomplete
                self._freed.remove(name)
                continue
            held = found.setdefault(unquote(parts[0]), {})
            key: Key = ("media" if kind == "media" else "routes", unquote(parts[1]))
            older, held[key] = held.get(key), AttachmentFile(name, size)
            if older is not None:
                self._freed.remove(older.name)
        return found

    def _bytes(self, key: Key, file: AttachmentFile) -> memoryview | None:
        try:
            found = (self._folder / file.name).read_bytes()
        except OSError:
            return None
        kind, name = key
        same = len(found) == file.size_bytes and (kind == "routes" or digest_of(found) == name)
        return memoryview(found) if same else None


def read_media(folder: Path, group_id: str) -> dict[str, bytes]:
    """Return the media of a group by digest, from their files in `folder`, which another process may
    write."""
    found = {}
    for path in folder.glob(f"{MEDIA}{quote(group_id, safe='')},*"):
        with contextlib.suppress(FileNotFoundError):
            data, digest = path.read_bytes(), unquote(path.name.split(",")[1])
            if digest_of(data) == digest:  # otherwise the file is not complete yet
                found[digest] = data
    return found


def _named(group_id: str, key: Key, size: int) -> AttachmentFile:
    # No name is used twice, because a freed file may still be waiting for removal.
    kind, name = key
    token = secrets.token_hex(4)
    return AttachmentFile(f"{kind}-{quote(group_id, safe='')},{quote(name, safe='')},{size},{token}", size)
