"""Transfer of files and folders between this host and a store, completely or not at all.

A target of `fetch` is always complete and verified, even if several processes fetch it at the same time or
one of them is killed. It is verified by the sizes, by the MD5 hash if the store's tag is one, and by the
hashes in the marker of `push`. `fetch` refuses a folder that `push` has not finished (`HalfWritten`), so no
reader gets an incomplete folder. At most `PARALLEL` requests of `PART_BYTES` are in memory.

A pushed folder contains a marker, the file `.areal-async.json`. It is written twice: first as begun, and last
with the size and hash of each file. A folder without a marker comes from another writer and is accepted
unchanged."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from blake3 import blake3

from areal_async.base.events import failpoint
from areal_async.base.own_files import NotBeneath, delete_path, map_path, open_beneath, sync, take_lock
from areal_async.base.retry import Tries
from areal_async.storage.remote import (
    PART_BYTES,
    HalfWritten,
    Remote,
    StorageAway,
    StorageError,
    StorageMissing,
    StoredFile,
)

MARKER = ".areal-async.json"
LOCK_S = 6 * 3600.0  # Longest wait for another process of this host that fetches the same target
LOOK_S = 0.1
ROUNDS = 3  # Number of attempts if a folder changes while it is fetched
MD5 = re.compile(r"[0-9a-f]{32}")


class PushedFile(msgspec.Struct, frozen=True):
    size_bytes: int
    blake3: str


class PushMarker(msgspec.Struct, frozen=True):
    complete: bool
    files: dict[str, PushedFile] = {}


class FetchRecord(msgspec.Struct, frozen=True):
    """Record of a fetch, written beside the target. A later fetch uses it to detect changes in the store."""

    url: str
    files: dict[str, StoredFile]


def fetch(
    url: str,
    target: Path,
    tries: Tries | None = None,
    *,
    leave_out: Callable[[str], bool] = lambda name: False,
    begun: Callable[[int], None] = lambda size_bytes: None,
    check: Callable[[Path], None] = lambda fresh: None,
) -> None:
    """Fetch the file or folder at `url` to `target`, unless `target` already has the same content.

    Files for which `leave_out(name)` is true are omitted. If anything must be downloaded, `begun` is called
    with the number of bytes. `check` may raise an error to refuse the download before the files are moved to
    `target`. Raises `StorageMissing`, `HalfWritten`, `StorageAway` or `StorageError`, and OSError if writing
    here fails."""
    remote = Remote(url, tries)
    target.parent.mkdir(parents=True, exist_ok=True)
    record = target.with_name(f".{target.name}.fetched")
    with _alone(target):
        for left in target.parent.glob(f".{target.name}.*.tmp"):  # Files of a killed process
            delete_path(left)
        for _ in range(ROUNDS):
            files = remote.listing()
            marker = _marker_of(remote, files)
            wanted = {name: file for name, file in files.items() if name != MARKER and not leave_out(name)}
            if not wanted:
                raise StorageMissing(f"{url}: there is nothing there. Correct the URL, or put it there.")
            if _is_there(target, record, FetchRecord(url, wanted)):
                return
            fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
            begun(sum(file.size_bytes for file in wanted.values()))
            try:
                _download(remote, wanted, fresh)
                again = remote.listing()
                if any(again.get(name) != file for name, file in wanted.items()):
                    continue  # Another process is writing
                _compare(url, fresh, wanted, marker)
                check(fresh)
                record.unlink(missing_ok=True)
                delete_path(target)
                fresh.rename(target)
                record.write_bytes(msgspec.json.encode(FetchRecord(url, wanted)))
                return
            finally:
                delete_path(fresh)
    raise StorageError(f"{url} changes while it is read. Wait until whoever writes there has finished.")


def push(folder: Path, url: str, tries: Tries | None = None) -> None:
    """Write the files of `folder` to `url`, and delete other files there. Readers are refused until it is
    complete. Raises `StorageAway` or `StorageError`."""
    remote = Remote(url, tries)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    remote.write(MARKER, msgspec.json.encode(PushMarker(complete=False)))
    hashes = {}

    def put(name: str) -> None:
        hashes[name] = PushedFile(remote.put(name, names[name]), _blake3(names[name]))

    remote.each(put, names)
    remote.remove(remote.listing().keys() - names.keys() - {MARKER})
    failpoint("storage.mid_push")
    remote.write(MARKER, msgspec.json.encode(PushMarker(complete=True, files=dict(sorted(hashes.items())))))


def _marker_of(remote: Remote, files: Mapping[str, StoredFile]) -> PushMarker | None:
    """Return the marker of a complete folder that `push` wrote, or None for other folders. Raises
    `HalfWritten`."""
    if MARKER not in files:
        return None
    try:
        marker = msgspec.json.decode(remote.read(MARKER), type=PushMarker)
    except msgspec.DecodeError:
        marker = PushMarker(complete=False)
    sizes = {name: file.size_bytes for name, file in files.items() if name != MARKER}
    if not marker.complete or sizes != {name: file.size_bytes for name, file in marker.files.items()}:
        raise HalfWritten(
            f"{remote.url} is half-written: whoever writes it has not finished, or died. Wait, or have it "
            "written again."
        )
    return marker


def _is_there(target: Path, record: Path, wanted: FetchRecord) -> bool:
    """Return whether `target` has the wanted content, according to the record of its fetch."""
    try:
        if msgspec.json.decode(record.read_bytes(), type=FetchRecord) != wanted:
            return False
        return all((target / name).stat().st_size == file.size_bytes for name, file in wanted.files.items())
    except (OSError, msgspec.DecodeError):
        return False


def _download(remote: Remote, files: Mapping[str, StoredFile], fresh: Path) -> None:
    """Download the files into `fresh`. If the only name is "", `fresh` is the file itself."""
    if "" not in files:
        fresh.mkdir(exist_ok=True)
    for name, stored in files.items():
        try:
            folder, inner = (fresh, name) if name else (fresh.parent, fresh.name)
            fd = open_beneath(folder, inner, os.O_WRONLY | os.O_CREAT)
        except NotBeneath as error:
            raise StorageError(f"{remote.url} holds a file that no folder here can hold: {error}") from error
        os.truncate(fd, stored.size_bytes)
        os.close(fd)
    remote.each(lambda part: _download_part(remote, fresh, *part), _parts(files))
    for name in files:
        sync(fresh / name if name else fresh)


def _parts(files: Mapping[str, StoredFile]) -> Iterator[tuple[str, int, int]]:
    for name, file in files.items():
        for begin in range(0, file.size_bytes, PART_BYTES):
            yield name, begin, min(begin + PART_BYTES, file.size_bytes)


def _download_part(remote: Remote, fresh: Path, name: str, begin: int, end: int) -> None:
    data = remote.read(name, begin, end)
    with (fresh / name).open("r+b") as file:
        file.seek(begin)
        file.write(data)


def _compare(url: str, fresh: Path, files: Mapping[str, StoredFile], marker: PushMarker | None) -> None:
    """Raise `StorageError` if a download differs from the hashes of the store or of its writer."""
    for name, file in files.items():
        path = fresh / name
        if marker is not None:
            good = _blake3(path) == marker.files[name].blake3
        else:
            hashed = hashlib.md5(map_path(path), usedforsecurity=False) if MD5.fullmatch(file.tag) else None
            good = hashed is None or hashed.hexdigest() == file.tag
        if not good:
            raise StorageError(
                f"{url}: {name or 'the file'} has not come as it was written: its hash is another. Write it "
                "there again."
            )


def _blake3(path: Path) -> str:
    return blake3(map_path(path), max_threads=blake3.AUTO).hexdigest()


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Prevent other processes of this host from fetching `target` while the block runs. The kernel releases
    the lock if this process dies."""
    lock = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline_s = time.monotonic() + LOCK_S
        while not take_lock(lock):
            if time.monotonic() > deadline_s:
                raise StorageAway(
                    f"{target} is being fetched by another process, for {LOCK_S:g} s by now. End it."
                )
            time.sleep(LOOK_S)
        yield
    finally:
        os.close(lock)
