"""Records of verified snapshots on one host. Only the first process that opens a snapshot hashes it.

That process writes a record, a file in a folder to which only this user can write. The record is named after
the hash of the manifest and has device, inode, size and the times of the last change of the tensor file.
Another process trusts the record while all these values still match.
`docs/decisions/weights.md#one-verification-per-host` has the reasons.

Promises:
- A record is written only after every hash matched and the files did not change during verification.
- One process verifies, and other processes wait for it, with a deadline. If it dies, its lock ends and
  another process continues. After the deadline each process verifies for itself.
- A record or folder that another user could have written is ignored.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from areal_async.base.own_files import NotOurs, is_own_folder, read_own, write_whole
from areal_async.weights.channels.host_cache import lock_file
from areal_async.weights.manifest import HASH_PREFIX

KEPT = 16  # records of versions that may still be opened, and a few more
LOCK_SUFFIX = ".lock"
LOOK_S = 0.02  # seconds between checks for the record of another process

T = TypeVar("T")


def identity_of(found: os.stat_result) -> str:
    """Return the identity of a file in the file system.

    Writing to a file, renaming or replacing it changes the identity. Only a write through a mapping may not
    change it.
    """
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


class HostRecords:
    """The records in `folder`, which the first record creates. Any thread may use them."""

    def __init__(self, folder: Path, *, wait_s: float = 300.0) -> None:
        """Open the records. `wait_s` is the longest wait for another process that verifies."""
        self._folder = folder
        self._wait_s = wait_s

    def once(
        self, manifest_hash: str, identity: str, verify: Callable[[], T], look: Callable[[], str]
    ) -> T | None:
        """Return the result of `verify`, or None if a process of this host has already verified this file.

        A record counts only for the same manifest. `look` returns the identity of the file after
        verification. Raises the errors of `verify`.
        """
        if not self._usable():
            return verify()
        path = self._folder / manifest_hash.removeprefix(HASH_PREFIX)
        deadline_s = time.monotonic() + self._wait_s
        while not _trusted(path, identity):
            lock = lock_file(path.with_suffix(LOCK_SUFFIX), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is None and time.monotonic() <= deadline_s:
                time.sleep(LOOK_S)
                continue
            try:
                if _trusted(path, identity):
                    return None
                found = verify()
                if lock is not None and look() == identity:
                    self._leave(path, identity)
                return found
            finally:
                if lock is not None:
                    os.close(lock)
        return None

    def _usable(self) -> bool:
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return is_own_folder(self._folder)
        return False

    def _leave(self, path: Path, identity: str) -> None:
        """Write a record. Errors are ignored, because without a record the next process only verifies
        again."""
        with suppress(OSError):
            write_whole(path, identity.encode())
            records = (each for each in self._folder.iterdir() if not each.suffix)
            found = sorted(records, key=lambda each: each.stat().st_mtime_ns)
            for old in found[:-KEPT]:
                old.unlink(missing_ok=True)
                old.with_suffix(LOCK_SUFFIX).unlink(missing_ok=True)


def _trusted(path: Path, identity: str) -> bool:
    with suppress(OSError, NotOurs):
        return read_own(path) == identity.encode()
    return False
