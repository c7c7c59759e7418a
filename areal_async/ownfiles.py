"""Files and folders that are found, not made: nothing of another user's is trusted, nothing is waited for.

A path that was found may be anything: a link to elsewhere, a pipe that never answers, a folder that somebody
else put there under the name of ours. What is read, deleted or run from such a path goes through here. What
the user names on the command line is the user's own choice, and only has to be a regular file.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_async.errors import ArealError

MAX_BYTES = 64 << 20
PRIVATE_UMASK = 0o077  # The umask of every process of a run: nobody else may read what it writes


class NotOurs(ArealError):
    """A file or folder that another user owns or may change."""

    restart_helps = False


def open_regular(path: Path) -> int:
    """A descriptor to read the regular file at `path`, or where its links lead. Raises OSError, also for what
    is no regular file: opening a pipe would wait for its writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is no regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """The content of the regular file at `path`, or where its links lead. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_own(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file of ours. Raises OSError where it cannot be read, `NotOurs` where it is a link,
    belongs to another user, or others may write to it; larger ones are refused as `NotOurs` too."""
    with os.fdopen(open_own(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise NotOurs(f"{path} has more than {max_bytes} bytes, which no file of this kind has")
    return content


def open_own(path: Path) -> int:
    """A descriptor to read a file of ours. Raises OSError and `NotOurs` as `read_own` does."""
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
    """Whether `path` is a folder of this user's, and no link to one, to which nobody else may write."""
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
    """Make an existing `folder` of ours one that nobody else may enter. Raises `NotOurs` where it is not."""
    check_owner(folder)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)


@contextmanager
def private_files() -> Iterator[None]:
    """What this process writes meanwhile is for this user alone."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
