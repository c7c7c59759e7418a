"""Storage of the routes of stored episodes (the experts chosen for each token). Routes are always in files
beside the buffer, whatever their size and wherever Redis runs.

Promises: Redis contains no bytes of routes. The routes of a stored episode exist until the episode's bytes
are freed, and `GRACE_S` longer, because a reply may still need them.

No record refers to the files, so neither the ledger nor Redis has any data about routes. A file's name
contains the group and the sample of its episode, and its size. Files that a crash leaves are removed when the
store is opened. If the routes of an episode are lost, for example after the front moved to another host, the
episode is trained without routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

PREFIX = "routes-"
"""Prefix of the names of these files, to distinguish them from episode files in the same folder."""
GRACE_S = 3.0

Place = tuple[str, int]
"""(group id, sample)"""


class RoutesFile(NamedTuple):
    """The file `name` with the routes of an episode."""

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


class RouteFiles:
    """Files with routes of one job in `folder`. Belongs to one event loop."""

    def __init__(self, folder: Path, grace_s: float = GRACE_S) -> None:
        self._folder = folder
        self._freed = LateRemoval(folder, grace_s)
        self._held: dict[str, dict[int, RoutesFile]] = {}

    async def open(self, groups: Collection[str]) -> None:
        """Read the list of files, and remove files of groups that are not in `groups`. May be called
        again."""
        self._freed.stop()
        self._held = await asyncio.to_thread(self._found, frozenset(groups))

    async def write(
        self, group_id: str, samples: Sequence[int], given: Sequence[memoryview]
    ) -> dict[int, RoutesFile]:
        """Write the routes of these samples into files. The caller must pass the files to `settled` once it
        is decided which samples are stored. If the disk is full or fails, raises OSError and leaves no
        file."""
        files = {
            sample: self._named(group_id, sample, len(routes))
            for sample, routes in zip(samples, given, strict=True)
        }
        await asyncio.to_thread(self._write, [*files.values()], given)
        return files

    def settled(self, group_id: str, files: Mapping[int, RoutesFile], *, stored: Collection[int]) -> None:
        """Keep the routes of the `stored` samples, and remove the others."""
        gone = [file.name for sample, file in files.items() if sample not in stored]
        for sample in files.keys() & set(stored):
            held = self._held.setdefault(group_id, {})
            before, held[sample] = held.get(sample), files[sample]
            if before is not None and before != files[sample]:
                gone.append(before.name)
        self._freed.add(gone)

    def free(self, freed: Mapping[str, Sequence[int] | None]) -> None:
        """Remove the routes of these groups' samples, whose bytes are freed. None means all samples."""
        for group_id, samples in freed.items():
            held = self._held.get(group_id, {})
            gone = [held.pop(sample, None) for sample in (list(held) if samples is None else samples)]
            if not held:
                self._held.pop(group_id, None)
            self._freed.add([file.name for file in gone if file is not None])

    async def read(self, wanted: Sequence[Place]) -> list[memoryview | None]:
        """Return the routes of these episodes, read from their files. None means that an episode has no
        routes."""
        files = [self._held.get(group_id, {}).get(sample) for group_id, sample in wanted]
        return await asyncio.to_thread(lambda: [file and self._bytes(file) for file in files])

    def close(self) -> None:
        """Remove all freed files now, because no client asks for them any more."""
        for name in self._freed.stop():
            self._freed.remove(name)

    def _named(self, group_id: str, sample: int, size: int) -> RoutesFile:
        # No name is used twice, because a freed file may still be waiting for removal.
        token = secrets.token_hex(4)
        return RoutesFile(f"{PREFIX}{quote(group_id, safe='')},{sample},{size},{token}", size)

    # --- in a thread ---

    def _write(self, named: Sequence[RoutesFile], given: Sequence[memoryview]) -> None:
        try:
            for file, routes in zip(named, given, strict=True):
                (self._folder / file.name).write_bytes(routes)
        except BaseException:
            for file in named:
                (self._folder / file.name).unlink(missing_ok=True)
            raise

    def _found(self, groups: frozenset[str]) -> dict[str, dict[int, RoutesFile]]:
        self._folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, dict[int, RoutesFile]] = {}
        written = sorted(
            (entry.stat().st_mtime_ns, entry.name)
            for entry in os.scandir(self._folder)
            if entry.name.startswith(PREFIX)
        )
        for _, name in written:
            parts = name.removeprefix(PREFIX).split(",")
            if len(parts) != 4:  # a file of another release
                self._freed.remove(name)
                continue
            group, sample, size, _ = parts
            samples = found.setdefault(unquote(group), {})
            older = samples.get(int(sample))
            samples[int(sample)] = RoutesFile(name, int(size))
            if older is not None:
                self._freed.remove(older.name)
        for group_id in found.keys() - groups:
            for file in found.pop(group_id).values():
                self._freed.remove(file.name)
        return found

    def _bytes(self, file: RoutesFile) -> memoryview | None:
        try:
            found = (self._folder / file.name).read_bytes()
        except OSError:
            return None
        return memoryview(found) if len(found) == file.size_bytes else None
