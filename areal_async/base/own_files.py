"""Access to existing files and folders that may not be ours: no file of another user is trusted, and no call
blocks.

An existing path may be anything: a link to another place, a pipe that never answers, a folder that somebody
else created under our name. All code that reads, deletes or runs files at such paths uses this module. A path
on the command line is the user's own choice, and only has to be a regular file.

A name from another process, host or store is joined to a folder of ours only by `parts_of` and opened only by
`open_beneath`. It never leads out of the folder, and no link below the folder is followed.
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

from areal_async.base.errors import ArealError

MAX_BYTES = 64 << 20
PRIVATE_UMASK = 0o077  # The umask of every process of a run: nobody else may read what it writes


class NotOurs(ArealError):
    """A file or folder that another user owns or may change."""

    restart_helps = False


def open_regular(path: Path) -> int:
    """Return a descriptor to read the regular file at `path`; links are followed. Raises OSError, also for a
    file that is not regular, since opening a pipe would wait for its writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is no regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """Return the content of the regular file at `path`, or where its links lead. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_own(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file of ours. Raises OSError where it cannot be read, `NotOurs` where it is a
    link, belongs to another user, or others may write to it; larger ones are refused as `NotOurs` too."""
    with os.fdopen(open_own(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise NotOurs(f"{path} has more than {max_bytes} bytes, which no file of this kind has")
    return content


def open_own(path: Path) -> int:
    """Return a descriptor to read a file of ours. Raises OSError and `NotOurs` as `read_own` does."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        check_own(fd, path)
    except NotOurs:
        os.close(fd)
        raise
    return fd


def check_own(fd: int, path: Path) -> None:
    """Raise `NotOurs` unless the open file is a regular one of this user's that nobody else may write to."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs(f"{path} is no regular file, so this project did not make it")
    if found.st_uid != os.geteuid():
        raise NotOurs(f"{path} belongs to {user_name(found.st_uid)}, not to {user_name(os.geteuid())}")
    if found.st_mode & 0o022:
        raise NotOurs(f"others may write to {path}: `chmod go-w` it if you trust what it says")


class NotBeneath(ArealError, ValueError):
    """A name from outside that is no plain relative path."""

    restart_helps = False


def parts_of(name: str) -> list[str]:
    """Return the parts of a relative path that somebody else gave. Raises `NotBeneath` for any other text."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise NotBeneath(f"{name[:200]!r} is no relative path without `.`, `..` and empty parts")
    return parts


@contextmanager
def _parent_beneath(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that holds `name`, and the last part of the name."""
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
    """Open the regular file `name` below the folder `root`; with `O_CREAT` make it and its folders, for this
    user alone. Raises `NotBeneath`, and OSError, also where a part of the name is a link or no folder."""
    with _parent_beneath(root, name, make=bool(flags & os.O_CREAT)) as (folder, last):
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(last, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is no regular file", name)
    return fd


def append_beneath(root: Path, name: str, data: bytes) -> None:
    """Append all of `data` or nothing to the file `name` below `root`. Raises the errors of `open_beneath`,
    and OSError if the disk has no room."""
    fd = open_beneath(root, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with os.fdopen(fd, "ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        if (written := file.write(data)) != len(data):
            file.truncate(before)
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written to {root / name}")


def write_whole(path: Path, content: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
    """Replace the file `path`, so that readers see the old content or all of the new. A `durable` file is on
    the disk when this returns. Raises OSError; nothing is left behind then."""
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
    """Give the open file this size, with room for every byte. Raises OSError if there is no room; otherwise a
    write into a mapping of a sparse file could end the process by SIGBUS."""
    os.ftruncate(fd, size_bytes)
    if size_bytes:
        os.posix_fallocate(fd, 0, size_bytes)


def map_open(
    fd: int, at: int = 0, size_bytes: int | None = None, *, populate: bool = False
) -> mmap.mmap | bytes:
    """Return the contents of an open regular file from byte `at`, a multiple of the page size, on. They are
    mapped, or read if the file has holes: on a full file system in memory, even reading a hole through a
    mapping would end the process by SIGBUS. Raises OSError, and ValueError for a part beyond the end."""
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
    """`map_open` of the regular file at `path`. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        return map_open(file.fileno())


def rename_beneath(root: Path, name: str, new: str) -> None:
    """Give the file `name` below `root` the name `new` in the same folder. Raises as `open_beneath` does."""
    with _parent_beneath(root, name) as (folder, last):
        os.replace(last, new, src_dir_fd=folder, dst_dir_fd=folder)


def remove_beneath(root: Path, name: str) -> None:
    """Remove the file, link or folder `name` below `root`, if it exists. Raises as `open_beneath` does."""
    with suppress(FileNotFoundError), _parent_beneath(root, name) as (folder, last):
        if stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(last, ignore_errors=True, dir_fd=folder)
        else:
            os.unlink(last, dir_fd=folder)


_FLOCK = struct.Struct("hhqqi0q")  # Linux' `struct flock` with 64-bit offsets


def _whole_file() -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def take_lock(fd: int) -> bool:
    """Lock the open file for as long as it, or a copy of its descriptor, is open; return False where another
    open file has the lock. `fd` must be writable."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file())
    except BlockingIOError:
        return False
    return True


def is_locked(fd: int) -> bool:
    """Return whether another open file has the lock. Takes no lock itself, even for a moment, so that whoever
    wants the lock meanwhile gets it."""
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _whole_file()))[0] != fcntl.F_UNLCK)


def is_own_folder(path: Path) -> bool:
    """Return whether `path` is a folder of this user's, and no link to one, to which nobody else may
    write."""
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
    """Raise `NotOurs` where the existing `folder` belongs to another user."""
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        raise NotOurs(
            f"{folder} belongs to {user_name(owner)}, and nothing in it is trusted, run or deleted for "
            f"{user_name(os.geteuid())}. Work as {user_name(owner)}, or give the job another `run_dir`."
        )


def close_folder(folder: Path) -> None:
    """Make an existing `folder` of ours inaccessible to others. Raises `NotOurs` if the folder is not
    ours."""
    check_owner(folder)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)


_umasks: list[int] = []  # The earlier umask, then one for each other thread that is in `private_files`
_umask_lock = threading.Lock()


@contextmanager
def private_files() -> Iterator[None]:
    """Make the files that this process creates meanwhile, on any thread, readable by its user alone."""
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
