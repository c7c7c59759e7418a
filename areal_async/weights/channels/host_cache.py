"""The snapshots of one host, shared by its processes: complete directories `e<epoch>-v<version>`.

Promises:
- The first process that claims a snapshot makes it. Other processes wait for it, with a deadline. A claim
  ends with its process, and another process continues from the existing data.
- The newest `KEPT` snapshots and all held snapshots are kept. A hold ends with its process. The next `sweep`
  removes all other snapshots, and unfinished data.

Claims and holds are `flock`s on hidden files beside the directories. All methods except `obtain` are quick.
One thread at a time may call them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from areal_async.base.errors import SnapshotError
from areal_async.base.versions import POLICY_NAME, VersionTag
from areal_async.weights.channels.chunks import PARTIAL_PREFIX
from areal_async.weights.manifest import MANIFEST_FILE, hash_of

KEPT = 2
CLAIM_PREFIX = ".claim-"
HOLD_PREFIX = ".hold-"
LOOK_S = 0.02  # seconds between checks for a snapshot that another process makes
_NAME = re.compile(rf"({POLICY_NAME}-e\d+-v\d+)(\.delta)?")


class HostCache:
    """The snapshots of this host, in folder `root`. The first snapshot creates the folder."""

    def __init__(self, root: Path, *, wait_s: float = 600.0) -> None:
        """Create the cache. `wait_s` is the longest wait for another process of this host that makes a
        snapshot."""
        self.root = root
        self._wait_s = wait_s
        self._holds: dict[str, int] = {}

    def path(self, name: str) -> Path:
        return self.root / name

    async def obtain(self, name: str, manifest_hash: str, make: Callable[[], Awaitable[object]]) -> Path:
        """Return the directory `name` with this manifest, and hold it from now on.

        If the directory does not exist, `make` creates it. Raises `SnapshotError` and all errors of `make`.
        """
        self.hold(name)
        deadline_s = time.monotonic() + self._wait_s
        try:
            while (path := self.find(name, manifest_hash)) is None:
                if (claim := self.claim(name)) is not None:
                    try:
                        if self.find(name, manifest_hash) is None:
                            await make()
                    finally:
                        os.close(claim)
                    await asyncio.to_thread(self.sweep)
                    if self.find(name, manifest_hash) is None:
                        raise SnapshotError(f"what came for {name} has another manifest than was announced")
                elif time.monotonic() > deadline_s:
                    raise SnapshotError(
                        f"another process of this host has not fetched {name} for {self._wait_s:g} s"
                    )
                else:
                    await asyncio.sleep(LOOK_S)
            return path
        except BaseException:
            self.free(name)
            raise

    def find(self, name: str, manifest_hash: str) -> Path | None:
        """Return the directory if it exists with this manifest. A directory with another manifest is
        removed."""
        path = self.path(name)
        try:
            if hash_of((path / MANIFEST_FILE).read_bytes()) == manifest_hash:
                return path
        except FileNotFoundError:
            return None
        self.discard(name)
        return None

    def hold(self, name: str) -> None:
        """Keep the directory, once it exists, until `free` or until this process ends."""
        if name not in self._holds:
            self.root.mkdir(parents=True, exist_ok=True)
            fd = flock_file(self.root / f"{HOLD_PREFIX}{name}", fcntl.LOCK_SH)
            assert fd is not None
            self._holds[name] = fd

    def free(self, name: str) -> None:
        if name in self._holds:
            os.close(self._holds.pop(name))

    def served(self, name: str, *, failed: bool = False) -> None:
        """Free all snapshots older than `name`, because this process now serves `name`. If `failed`, free
        only `name`."""
        for held in self.held:
            if held == name if failed else held != name and _tag_of(held) <= _tag_of(name):
                self.free(held)

    @property
    def held(self) -> list[str]:
        """Return the names of the snapshots that this process holds."""
        return [*self._holds]

    def claim(self, name: str) -> int | None:
        """Return the claim to make `name`, valid until `os.close`, or None while another process has the
        claim."""
        self.root.mkdir(parents=True, exist_ok=True)
        return flock_file(self.root / f"{CLAIM_PREFIX}{name}", fcntl.LOCK_EX | fcntl.LOCK_NB)

    def discard(self, name: str) -> None:
        """Remove a wrong directory, so that the next try does not find it."""
        doomed = self.root / f"{PARTIAL_PREFIX}{name}-discarded"
        try:
            os.rename(self.path(name), doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove all snapshots that no process needs."""
        names = [path.name for path in self.root.iterdir() if _NAME.fullmatch(path.name)]
        kept = sorted({_tag_of(name) for name in names})[-KEPT:]
        for name in names:
            if _tag_of(name) not in kept:
                self._remove(name)
        for path in self.root.glob(f"{PARTIAL_PREFIX}*"):
            name = path.name.removeprefix(PARTIAL_PREFIX).rpartition("-")[0]
            if (claim := self.claim(name)) is not None:  # otherwise another process is filling it
                shutil.rmtree(path, ignore_errors=True)
                _end(self.root / f"{CLAIM_PREFIX}{name}", claim)

    def close(self) -> None:
        for name in self.held:
            self.free(name)

    def _remove(self, name: str) -> None:
        hold = self.root / f"{HOLD_PREFIX}{name}"
        if (held := flock_file(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
            return
        if (claim := self.claim(name)) is not None:
            self.discard(name)
            _end(self.root / f"{CLAIM_PREFIX}{name}", claim)
        _end(hold, held)


def _tag_of(name: str) -> VersionTag:
    match = _NAME.fullmatch(name)
    assert match is not None
    return VersionTag.parse(match[1])


def flock_file(path: Path, how: int) -> int | None:
    """Return a descriptor with the `flock` on the file that is now at `path`, or None if the lock is
    taken."""
    while True:
        with ExitStack() as stack:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, how)
            except BlockingIOError:
                return None
            # If the file was removed between open and lock, the lock has no effect.
            with suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == os.stat(path).st_ino:
                    stack.pop_all()
                    return fd


def _end(path: Path, fd: int) -> None:
    """Remove a lock's file, and only then release the lock. In this order, each process that waited for the
    lock notices that the file was removed, and opens the path again."""
    path.unlink(missing_ok=True)
    os.close(fd)
