"""Files of a run that are on a cluster node and not in the run's folder.

These are the files of the buffer's own Redis and, after the death of the supervisor, the end of the event
logs.

Promises: a resume gets the files as long as their host can be reached, however the earlier run ended.
Otherwise the last revision that Redis confirmed is known, and the buffer reports the loss."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from areal_async.base.errors import RunError
from areal_async.base.log import get_logger
from areal_async.base.own_files import NotBeneath, append_beneath, is_own_folder, open_beneath, write_whole
from areal_async.base.processes import processes_of
from areal_async.launch.home_files import BUFFER
from areal_async.launch.ray.orders import FileNews

RECORD = "buffer-node.json"
CONFIRMED = "confirmed"  # File of the buffer with the newest revision that Redis has confirmed
PIECE_BYTES = 1 << 20  # Largest number of file bytes in one answer
KEPT_S = 14 * 24 * 3600.0
"""Seconds that a node keeps the files of a run that is not resumed."""
ORDERLY_S = 12.0  # Time for processes without a supervisor to exit by themselves; then they are killed
ENDING_S = 60.0  # Longest wait until they have exited, including the kill
LOOK_S = 0.05
FOLDER = re.compile(r"areal-(?P<uid>\d+)-(?P<run_id>[0-9a-f]+)-run")
Part = Literal["buffer", "events"]

log = get_logger("launcher")


class BufferNode(msgspec.Struct, frozen=True):
    """The node and folder of the buffer in the newest life of a run on a cluster."""

    node_id: str
    address: str
    folder: str
    """Folder of the run on that node."""
    confirmed: int = 0
    """Newest revision that Redis has confirmed, as far as known."""

    @classmethod
    def read(cls, run_dir: Path) -> BufferNode | None:
        """Return the record in the run's folder; None if the folder has no record."""
        with suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode((run_dir / RECORD).read_bytes(), type=cls)
        return None

    def write(self, run_dir: Path) -> None:
        write_whole(run_dir / RECORD, msgspec.json.encode(self))


class LeftFiles:
    """Files in a run's folder on this host, for a resume. The supervisor of the run was killed."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._lock_fd: int | None = None
        self._ended = False

    def read(self, part: Part, have: Mapping[str, int]) -> list[FileNews]:
        """Return pieces of this part's files that the reader does not have yet. The list is empty if the
        reader has all.

        Raises `RunError` if processes of that run do not exit."""
        ours = FOLDER.fullmatch(self._folder.name)
        if ours is None or int(ours["uid"]) != os.getuid() or not is_own_folder(self._folder):
            return []
        there = self._folder / part
        if not there.is_dir():
            return []
        self._wait_for_end(ours["run_id"])
        return list(pieces_of(self._folder, there.rglob("*"), have))

    def remove(self) -> None:
        """Remove the files of the buffer, after the reader has all of them."""
        shutil.rmtree(self._folder / BUFFER, ignore_errors=True)
        self.close()

    def close(self) -> None:
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is not None:
            os.close(lock_fd)

    def _wait_for_end(self, run_id: str) -> None:
        """Wait until all processes of that run have exited, and until no Redis holds its lock file."""
        begun_s = time.monotonic()
        while not self._ended:
            lasting = processes_of(run_id)
            self._ended = not lasting and self._take_lock()
            waited_s = time.monotonic() - begun_s
            if waited_s > ORDERLY_S:
                for process in lasting:
                    with suppress(psutil.Error):
                        process.kill()
            if waited_s > ENDING_S and not self._ended:
                raise RunError(
                    f"a process of this run's life before still uses its files in {self._folder}. Wait until "
                    "it has ended, and resume again"
                )
            if not self._ended:
                time.sleep(LOOK_S)

    def _take_lock(self) -> bool:
        there = self._folder / BUFFER
        if not there.is_dir():
            return True
        self._lock_fd = os.open(there / "redis.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        return True


def pieces_of(root: Path, paths: Iterable[Path], have: Mapping[str, int]) -> Iterator[FileNews]:
    """Yield bytes of these files below `root` that the reader does not have yet, at most `PIECE_BYTES`.

    Links are skipped."""
    room = PIECE_BYTES
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        offset = have.get(name, -1)  # An empty file is reported, too
        with suppress(OSError), os.fdopen(open_beneath(root, name), "rb") as file:
            if room > 0 and os.fstat(file.fileno()).st_size > offset:
                file.seek(max(0, offset))
                data = file.read(room)
                room -= len(data)
                yield FileNews(name, max(0, offset), data)


def fetch_buffer(run_dir: Path, pull: Callable[[dict[str, int]], list[FileNews]]) -> bool:
    """Copy the files to the run's folder, all or none. Return whether there were any.

    Raises OSError, and `NotBeneath` for a file that does not belong to the buffer."""
    fresh = run_dir / f".{BUFFER}"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        found = _append_pieces(fresh, "", BUFFER, {}, pull)
        for path in filter(Path.is_file, fresh.rglob("*")):  # the only other copy is removed next
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if found:
            shutil.rmtree(run_dir / BUFFER, ignore_errors=True)
            fresh.rename(run_dir / BUFFER)
        return found
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def append_rest(run_dir: Path, part: Part, pull: Callable[[dict[str, int]], list[FileNews]]) -> bool:
    """Append the missing end to the files of a part. Return whether bytes were missing. Raises as
    `fetch_buffer` does."""
    paths = [path for path in (run_dir / part).glob("*") if path.is_file()]
    have = {f"{part}/{path.name}": path.stat().st_size for path in paths}
    return _append_pieces(run_dir, f"{part}/", part, have, pull)


def _append_pieces(
    root: Path, prefix: str, part: str, have: dict[str, int], pull: Callable[[dict[str, int]], list[FileNews]]
) -> bool:
    """Append the pieces of a part to its files below `root` until no piece is missing.

    The names of the files begin with `prefix`. Returns whether there were any pieces."""
    found = False
    while pieces := pull(have):
        found = True
        for piece in pieces:
            folder, _, name = piece.name.partition("/")
            if folder != part:
                raise NotBeneath(f"a node sent {piece.name[:200]!r}, no file of {part}")
            root.mkdir(mode=0o700, exist_ok=True)
            append_beneath(root, prefix + name, piece.data)
            have[piece.name] = piece.offset + len(piece.data)
    return found


def lie_at_home(run_dir: Path) -> bool:
    """Return whether the run's folder has the files."""
    folder = run_dir / BUFFER
    return folder.is_dir() and any(not entry.name.startswith(CONFIRMED) for entry in folder.iterdir())


def forget_at_home(run_dir: Path) -> None:
    """Remove the files of an earlier life from the run's folder. The buffer continues elsewhere with a
    copy."""
    shutil.rmtree(run_dir / BUFFER, ignore_errors=True)


def expect_loss(run_dir: Path, node: BufferNode) -> None:
    """Make the next buffer report the loss of the revisions that the buffer on `node` had confirmed."""
    write_confirmed(run_dir, node.confirmed)
    log.error(
        "the files of the buffer cannot be reached, and the run goes on from its newest checkpoint",
        address=node.address,
        folder=node.folder,
        confirmed_writes=node.confirmed,
    )


def write_confirmed(run_dir: Path, revision: int) -> None:
    """Record for the next buffer that Redis has confirmed this revision."""
    (run_dir / BUFFER).mkdir(mode=0o700, exist_ok=True)
    write_whole(run_dir / BUFFER / CONFIRMED, revision.to_bytes(8, "little", signed=True))


def confirmed_in(folder: Path) -> int:
    """Return the newest revision that is confirmed according to the buffer's files in `folder`."""
    with suppress(OSError):
        return int.from_bytes((folder / CONFIRMED).read_bytes()[:8], "little", signed=True)
    return 0


def recover_here(run_dir: Path) -> None:
    """Prepare to resume a run on this machine that was on a cluster, without the cluster. Raises
    `RunError`."""
    node = BufferNode.read(run_dir)
    if node is None:
        return
    if not lie_at_home(run_dir):
        left = LeftFiles(node.folder)
        if fetch_buffer(run_dir, partial(left.read, "buffer")):
            left.remove()
        else:
            expect_loss(run_dir, node)
    (run_dir / RECORD).unlink()


def is_forgotten(folder: Path) -> bool:
    """Return whether the buffer's files in a run's folder on a node are missing or older than `KEPT_S`."""
    newest_s = max((path.stat().st_mtime for path in (folder / BUFFER).rglob("*")), default=0.0)
    return time.time() - newest_s > KEPT_S
