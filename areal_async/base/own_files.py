"""Safe access to files and folders that this process did not create. No file of another user is trusted, and
no access to a file waits for another process.

A path that was found may be anything: a link to another place, a pipe without a writer, or another user's
folder with a name that this project uses. All code that reads, deletes or runs such a path uses this module.
A path from the command line is the user's own choice, and must only be a regular file.

A name from another process, host or store is joined to a folder of this user only by `parts_of` and
`open_beneath`. They refuse a name that leads out of the folder, and follow no link below the folder.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import pwd
import secrets
import shutil
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_async.base.errors import ArealError

MAX_BYTES = 64 << 20
T = TypeVar("T")
PRIVATE_UMASK = 0o077  # umask of every process of a run: no other user may read its files


class NotOurs(ArealError):
    """A file or folder that another user owns or may change."""

    restart_helps = False


def open_regular(path: Path) -> int:
    """Return a descriptor to read the regular file at `path`, following links.

    Raises `OSError`, also for a file that is not regular, because opening a pipe would wait for its writer.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is no regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """Return the content of the regular file at `path`, following links. Raises `OSError`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_own(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file of ours.

    Raises `OSError` if it cannot be read. Raises `NotOurs` if it is a link, belongs to another user, others
    may write to it, or it is larger than `max_bytes`.
    """
    with os.fdopen(open_own(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise NotOurs(f"{path} has more than {max_bytes} bytes, which no file of this kind has")
    return content


def read_record(path: Path, kind: type[T], *, max_bytes: int = MAX_BYTES) -> T | None:
    """Return the JSON value in a file of this user. None if there is no such file or value, or if the file
    is not trusted."""
    with suppress(OSError, NotOurs, msgspec.DecodeError):
        return msgspec.json.decode(read_own(path, max_bytes=max_bytes), type=kind)
    return None


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file of ours. Raises OSError and `NotOurs` as `read_own` does."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY, 0o600)
    try:
        check_own(fd, path)
    except NotOurs:
        os.close(fd)
        raise
    return fd


def check_own(fd: int, path: Path) -> None:
    """Raise `NotOurs` unless the open file is regular, belongs to this user and no other user may write to
    it."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs(f"{path} is no regular file, so this project did not make it")
    if found.st_uid != os.geteuid():
        raise NotOurs(f"{path} belongs to {user_name(found.st_uid)}, not to {user_name(os.geteuid())}")
    if found.st_mode & 0o022:
        raise NotOurs(f"others may write to {path}: `chmod go-w` it if you trust what it says")


class NotBeneath(ArealError, ValueError):
    """A name from outside this process that is not a plain relative path."""

    restart_helps = False


def parts_of(name: str) -> list[str]:
    """Return the parts of a relative path from outside. Raises `NotBeneath` for any other text."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise NotBeneath(f"{name[:200]!r} is no relative path without `.`, `..` and empty parts")
    return parts


@contextmanager
def _parent_beneath(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that contains `name`, and the last part of the name."""
    *folders, last = parts_of(name)
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=fd)
            inner = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd, last
    finally:
        os.close(fd)


def open_beneath(root: Path, name: str, flags: int = os.O_RDONLY) -> int:
    """Open the regular file `name` below the folder `root`.

    `O_CREAT` creates the file and its folders, for this user alone. Raises `NotBeneath`. Raises `OSError`,
    also if a part of the name is a link or not a folder.
    """
    with _parent_beneath(root, name, make=bool(flags & os.O_CREAT)) as (folder, last):
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(last, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is no regular file", name)
    return fd


def append_beneath(root: Path, name: str, data: bytes) -> None:
    """Append all of `data` or nothing to the file `name` below `root`.

    Raises the errors of `open_beneath`, and `OSError` if the disk is full.
    """
    fd = open_beneath(root, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(fd, "ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        if (written := file.write(data)) != len(data):
            file.truncate(before)
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written to {root / name}")


def write_whole(path: Path, content: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
    """Replace the file `path` atomically. Readers see the complete old or new content.

    A `durable` file is on disk when this function returns. Raises `OSError`. An error leaves no file behind.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content)
        if durable:
            sync(fresh)
        fresh.replace(path)
        if durable:
            sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(fd: int, size_bytes: int) -> None:
    """Give the open file this size, with room for every byte. Raises `OSError` if there is no room.

    If there were no room, a later write into a mapping of the file would end the process by SIGBUS.
    """
    os.ftruncate(fd, size_bytes)
    if size_bytes:
        os.posix_fallocate(fd, 0, size_bytes)


def map_open(
    fd: int, at: int = 0, size_bytes: int | None = None, *, populate: bool = False
) -> mmap.mmap | bytes:
    """Return the content of an open regular file, starting at byte `at`, which must be a multiple of the page
    size.

    The content is mapped. A file with holes is read into memory instead: if the file is on a full in-memory
    file system, even reading a hole through a mapping would end the process by SIGBUS. Raises `OSError`, and
    `ValueError` for a range beyond the end.
    """
    left = os.fstat(fd).st_size - at
    size = left if size_bytes is None else size_bytes
    if size > left:
        raise ValueError(f"the file has {left} bytes from byte {at} on, and {size} are to be mapped")
    if not size:
        return b""
    if os.lseek(fd, at, os.SEEK_HOLE) >= at + size:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(fd, size, flags, mmap.PROT_READ, offset=at)
    content, done = mmap.mmap(-1, size), 0
    with memoryview(content) as view:
        while done < size and (n := os.preadv(fd, [view[done : done + MAX_BYTES]], at + done)):
            done += n
    return content


def map_path(path: Path) -> mmap.mmap | bytes:
    """Map the regular file at `path` as `map_open` does. Raises `OSError`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return map_open(file.fileno())


def rename_beneath(root: Path, name: str, new: str) -> None:
    """Rename the file `name` below `root` to `new` in the same folder. Raises the errors of
    `open_beneath`."""
    with _parent_beneath(root, name) as (folder, last):
        os.replace(last, new, src_dir_fd=folder, dst_dir_fd=folder)


def remove_beneath(root: Path, name: str) -> None:
    """Remove the file, link or folder `name` below `root`, if it exists. Raises the errors of
    `open_beneath`."""
    with suppress(FileNotFoundError), _parent_beneath(root, name) as (folder, last):
        if stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(last, ignore_errors=True, dir_fd=folder)
        else:
            os.unlink(last, dir_fd=folder)


def delete_path(path: Path) -> None:
    """Delete a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_FLOCK = struct.Struct("hhqqi0q")  # `struct flock` of Linux with 64-bit offsets


def _whole_file(kind: int = fcntl.F_WRLCK) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def take_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock the open file. The lock lasts until the descriptor and all its copies are closed, or until
    `release_lock`. Several open files can have a `shared` lock at the same time.

    Return False if the lock of another open file prevents this lock. `fd` must be readable and writable.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
    except BlockingIOError:
        return False
    return True


def release_lock(fd: int) -> None:
    """Unlock the open file, also for all copies of the descriptor."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_UNLCK))


def lock_file(path: Path) -> int | None:
    """Open or create a file of this user, lock it, and return the descriptor. Return None if another open
    file has the lock.

    Raises OSError, and `NotOurs` if others may change the file.
    """
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
    if take_lock(fd):
        return fd
    os.close(fd)
    return None


def is_locked(fd: int) -> bool:
    """Return whether another open file has the lock.

    This function never takes the lock, so it cannot disturb a process that wants to take it.
    """
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole_file()))[0] != fcntl.F_UNLCK)


def is_own_folder(path: Path) -> bool:
    """Return whether `path` is a folder of this user (not a link) to which no other user may write."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not stat.S_IMODE(found.st_mode) & 0o022
    )


def check_owner(folder: Path) -> None:
    """Raise `NotOurs` if the existing `folder` belongs to another user."""
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        raise NotOurs(
            f"{folder} belongs to {user_name(owner)}, and nothing in it is trusted, run or deleted for "
            f"{user_name(os.geteuid())}. Work as {user_name(owner)}, or give the job another `run_dir`."
        )


def close_folder(folder: Path) -> None:
    """Remove other users' access to an existing `folder` of ours. Raises `NotOurs` if it is not ours."""
    check_owner(folder)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)


_umasks: list[int] = []  # the earlier umask, then one entry for each other thread in `private_files`
_umask_lock = threading.Lock()


@contextmanager
def private_files() -> Iterator[None]:
    """Make all files that this process creates during the block private to its user. This affects all
    threads."""
    with _umask_lock:
        _umasks.append(os.umask(PRIVATE_UMASK))
    try:
        yield
    finally:
        with _umask_lock:
            before = _umasks.pop()
            if not _umasks:
                os.umask(before)


def user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def tail_of(path: Path, size_bytes: int) -> str:
    """Return the last bytes of a file as text; empty if the file does not exist."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size_bytes))
        return file.read(size_bytes).decode(errors="replace").strip()
    return ""
