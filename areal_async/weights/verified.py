"""Records of verified snapshots on one host: a snapshot is hashed by the first process that opens it, and by
no other.

That one leaves a record, a file in a folder that only this user can enter: the hash of the manifest, and of
each tensor file device, inode, size, and the times of its last change. Another process trusts it for files of
which all of that is still so. `docs/decisions/weights.md#one-verification-per-host` has the reasons.

Promises:
- A record is left only after every hash matched, for files that were not changed meanwhile.
- One process verifies; the others wait for it, with a deadline. If it dies, another goes on, since its lock
  ends with it; past the deadline each verifies for itself.
- A record or folder that another user could have written is not believed.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_async.base.own_files import write_whole
from areal_async.weights.channels.host_cache import lock_file
from areal_async.weights.manifest import HASH_PREFIX

KEPT = 16  # Records: of versions that may still be opened, and a few more
LOCK_SUFFIX = ".lock"
LOOK_S = 0.02  # Seconds between two looks whether another process has verified it

T = TypeVar("T")


class FileIdentity(msgspec.Struct, frozen=True):
    """A file as the system knows it. Whoever writes into it, gives it another name or puts another in its
    place changes one of these; only a mapping that is written to does not."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(found: os.stat_result) -> FileIdentity:
        return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _Record(msgspec.Struct, frozen=True):
    manifest_hash: str
    files: list[FileIdentity]


class HostRecords:
    """The records in `folder`, which is made with the first of them. Any thread may use them."""

    def __init__(self, folder: Path, *, wait_s: float = 300.0) -> None:
        """`wait_s` is the longest wait for another process that verifies."""
        self._folder = folder
        self._wait_s = wait_s

    def once(
        self,
        manifest_hash: str,
        files: Sequence[FileIdentity],
        verify: Callable[[], T],
        look: Callable[[], Sequence[FileIdentity]],
    ) -> T | None:
        """Return the result of `verify`, or None if a process of this host has already verified these files
        for this manifest. `look` returns the state of the files after verification. Raises the errors of
        `verify`."""
        record = _Record(manifest_hash, [*files])
        if not self._usable():
            return verify()
        path = self._folder / manifest_hash.removeprefix(HASH_PREFIX)
        deadline_s = time.monotonic() + self._wait_s
        while True:
            if self._read(path) == record:
                return None
            lock = lock_file(path.with_suffix(LOCK_SUFFIX), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None or time.monotonic() > deadline_s:
                break
            time.sleep(LOOK_S)
        try:
            if self._read(path) == record:
                return None
            found = verify()
            if lock is not None and [*look()] == record.files:
                self._leave(path, record)
            return found
        finally:
            if lock is not None:
                os.close(lock)

    def _usable(self) -> bool:
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _private(os.lstat(self._folder), stat.S_ISDIR)
        return False

    def _read(self, path: Path) -> _Record | None:
        with suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            if _private(os.fstat(file.fileno()), stat.S_ISREG):
                return msgspec.json.decode(file.read(), type=_Record)
        return None

    def _leave(self, path: Path, record: _Record) -> None:
        """Store the record. If this fails, the next process verifies again, so an error is no reason to
        refuse the snapshot."""
        with suppress(OSError):
            write_whole(path, msgspec.json.encode(record))
            records = (each for each in self._folder.iterdir() if not each.suffix)
            found = sorted(records, key=lambda each: each.stat().st_mtime_ns)
            for old in found[:-KEPT]:
                old.unlink(missing_ok=True)
                old.with_suffix(LOCK_SUFFIX).unlink(missing_ok=True)


def _private(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Return whether it is ours, and nobody else can write to it or look into it."""
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
