"""A local folder and its copy in a store, which is kept up to date.

A changed file is in the store about `EVERY_S` later, as a whole. When `stop` returns, the store has all
changes. If the store does not answer, only the mirror waits for it. If two hosts mirror to one URL, the later
host becomes the owner and the earlier host stops writing. Files that change at the same time may reach the
store at different times.

These files are not mirrored:

- files with a meaning only on this host (locks, addresses of processes, sockets, links);
- unfinished files (`*.tmp`, hidden files);
- files for which `wanted(name)` is false."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.own_files import write_whole
from areal_async.storage.remote import Remote, StorageError, StorageMissing, tries_for

EVERY_S = 5.0
SHARE = 0.2  # Largest share of time for mirroring; a slow store gets fewer writes
MARK = "logs/mirror.json"  # Names the owner of a URL. The copy in the folder shows which of the two is newer.
ROUND_S = 10.0  # Seconds of retries before the next round if the store does not answer
FINISH_S = 600.0

log = get_logger("mirror")


class MirrorMark(msgspec.Struct, frozen=True):
    """Owner of a mirror: its random id and its host, the number of mirroring rounds so far, and whether it
    has ended."""

    owner: str
    host: str
    rounds: int = 0
    ended: bool = False


class MirrorLost(StorageError):
    """Another process now mirrors to the URL."""


def mark_there(url: str, remote: Remote | None = None) -> MirrorMark | None:
    """Return the mark at `url`, or None if no process has mirrored to it. Raises `StorageError`."""
    try:
        return msgspec.json.decode((remote or Remote(url)).read(MARK), type=MirrorMark)
    except StorageMissing:
        return None
    except msgspec.DecodeError as error:
        raise StorageError(
            f"{url}/{MARK} cannot be read: {error}. Remove it, or give another URL."
        ) from error


class Mirror:
    """A mirror of `folder` at `url`, from `start` to `stop`. It includes the files for which `wanted(name)`
    is true."""

    def __init__(self, folder: Path, url: str, *, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self.url = url
        self._folder = folder
        self._wanted = wanted
        self._remote = Remote(url, tries_for(url, ROUND_S))
        self._pushed: dict[str, tuple[int, int]] = {}
        """Size and modification time of each file when it was uploaded."""
        self._mark = MirrorMark(secrets.token_hex(8), socket.gethostname())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        """Become the owner of the URL, and start mirroring. Raises `StorageError`."""
        self._write_mark()
        self._thread.start()

    def stop(self, limit_s: float = FINISH_S) -> None:
        """Mirror everything and end. Raises `StorageError` if this takes too long."""
        self._stopping.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise StorageError(f"{self.url}: the store has not taken what was written within {limit_s:g} s.")
        self._remote = Remote(self.url, tries_for(self.url, limit_s))
        self.once()
        self._mark = msgspec.structs.replace(self._mark, ended=True)
        self._write_mark()

    def once(self) -> None:
        """Mirror the changes since the last call. Raises `MirrorLost` or `StorageError`."""
        there = mark_there(self.url, self._remote)
        if there is not None and there.owner != self._mark.owner:
            raise MirrorLost(
                f"{self.url} is written by {there.host} by now: the job was resumed there. Stop it here."
            )
        found = self._found()
        changed = [name for name, what in found.items() if self._pushed.get(name) != what]
        self._remote.each(lambda name: self._put(name, found[name]), changed)
        gone = self._pushed.keys() - found.keys()
        self._remote.remove(gone)
        for name in gone:
            del self._pushed[name]
        self._mark = msgspec.structs.replace(self._mark, rounds=self._mark.rounds + 1)
        self._write_mark()

    def _put(self, name: str, what: tuple[int, int]) -> None:
        try:
            self._remote.put(name, self._folder / name)
        except FileNotFoundError:
            return  # The file was removed in the meantime; the next round handles this
        self._pushed[name] = what

    def _run(self) -> None:
        took_s = 0.0
        while not self._stopping.wait(max(EVERY_S, took_s / SHARE)):
            begun_s = time.monotonic()
            try:
                self.once()
            except MirrorLost as error:
                log.error("the run's folder is mirrored no more", error=str(error))
                return
            except (StorageError, OSError) as error:
                log.warning("the run's folder is not mirrored; it is tried again", error=str(error))
            took_s = time.monotonic() - begun_s

    def _write_mark(self) -> None:
        content = msgspec.json.encode(self._mark)
        path = self._folder / MARK
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, content)
        self._remote.write(MARK, content)

    def _found(self) -> dict[str, tuple[int, int]]:
        """Return size and modification time of each mirrored file, by name."""
        found = {}
        for parent, folders, names in os.walk(self._folder):
            below = Path(parent).relative_to(self._folder)
            folders[:] = [name for name in folders if not _is_passing(name)]
            for name in names:
                path = (below / name).as_posix()
                if _is_passing(name) or path == MARK or not self._wanted(path):
                    continue
                try:
                    status = os.lstat(self._folder / path)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    found[path] = (status.st_size, status.st_mtime_ns)
        return found


def _is_passing(name: str) -> bool:
    return name.startswith(".") or name.endswith(".tmp")
