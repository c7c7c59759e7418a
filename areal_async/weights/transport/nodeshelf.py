"""The snapshots of one host, shared by the processes on it: complete directories `e<epoch>-v<version>`.

Promises:
- One process fetches a snapshot, whoever claims it first; the others find it. A claim ends with its process.
- Kept are the newest `KEPT` and whatever a process holds (a hold, too, ends with its process). The rest, and
  what fetches have left unfinished, goes at the next `sweep`.

Claims and holds are `flock`s on hidden files beside the directories. All methods are quick, and may be called
from any one thread at a time.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

from areal_async.rpc.messages import VersionTag
from areal_async.weights.manifest import MANIFEST_FILE, hash_of
from areal_async.weights.transport.holding import GROWING_PREFIX, MARKS_PREFIX

KEPT = 2
CLAIM_PREFIX = ".claim-"
HOLD_PREFIX = ".hold-"
_NAME = re.compile(r"e(\d+)-v(\d+)(\.delta)?")


class NodeShelf:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._holds: dict[str, int] = {}

    def path(self, name: str) -> Path:
        return self.root / name

    def find(self, name: str, manifest_hash: str) -> Path | None:
        """The directory, when it is there with this manifest. One of another manifest is removed."""
        path = self.path(name)
        try:
            if hash_of((path / MANIFEST_FILE).read_bytes()) == manifest_hash:
                return path
        except FileNotFoundError:
            return None
        self.discard(name)
        return None

    def hold(self, name: str) -> None:
        """Keep it, once it is there, until `free`, or until this process ends."""
        if name not in self._holds:
            fd = _lock(self.root / f"{HOLD_PREFIX}{name}", fcntl.LOCK_SH)
            assert fd is not None
            self._holds[name] = fd

    def free(self, name: str) -> None:
        if name in self._holds:
            os.close(self._holds.pop(name))

    @property
    def held(self) -> list[str]:
        """What this process holds."""
        return [*self._holds]

    def claim(self, name: str) -> int | None:
        """The right to make `name`, until `os.close`; None while another process has it."""
        return _lock(self.root / f"{CLAIM_PREFIX}{name}", fcntl.LOCK_EX | fcntl.LOCK_NB)

    def discard(self, name: str) -> None:
        """Remove a directory that is not what it should be."""
        doomed = self.root / f"{GROWING_PREFIX}{name}-discarded"
        try:
            os.rename(self.path(name), doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what nobody needs."""
        tags: dict[VersionTag, list[str]] = {}
        for path in self.root.iterdir():
            if match := _NAME.fullmatch(path.name):
                tags.setdefault(VersionTag(int(match[1]), int(match[2])), []).append(path.name)
        for tag in sorted(tags)[:-KEPT]:
            for name in tags[tag]:
                self._remove(name)
        for path in [*self.root.glob(f"{GROWING_PREFIX}*"), *self.root.glob(f"{MARKS_PREFIX}*")]:
            name = path.name.removeprefix(GROWING_PREFIX).removeprefix(MARKS_PREFIX).rpartition("-")[0]
            claim = self.claim(name)
            if claim is None:
                continue  # somebody is filling it
            try:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            finally:
                _end(self.root / f"{CLAIM_PREFIX}{name}", claim)

    def close(self) -> None:
        for name in self.held:
            self.free(name)

    def _remove(self, name: str) -> None:
        hold = self.root / f"{HOLD_PREFIX}{name}"
        held = _lock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if held is None:
            return
        claim = self.claim(name)
        if claim is not None:
            self.discard(name)
            _end(self.root / f"{CLAIM_PREFIX}{name}", claim)
        _end(hold, held)


def _lock(path: Path, how: int) -> int | None:
    """A descriptor with the lock on the file that is at `path` now; None when another has it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass  # removed between our open and our lock: the lock is on nothing
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _end(path: Path, fd: int) -> None:
    """Remove a lock's file and let go of the lock, in this order: whoever waits for it looks again."""
    path.unlink(missing_ok=True)
    os.close(fd)
