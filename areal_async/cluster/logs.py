"""The logs of a job, as files that its processes write and somebody else reads from afar.

The folder is the job's own: what lies in it may be a link that its code has put there, to a file that whoever
reads logs is not to see. So only regular files in the folder itself are read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from areal_async.base.own_files import is_own_folder
from areal_async.cluster.processes import JobFolder

OF_THE_RUN = "run"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def log_path(folder: JobFolder, job: str, name: str) -> Path | None:
    """Where the log called `name` of a job lies, or would lie; None for what is no such name."""
    if name == OF_THE_RUN:
        return folder.output
    logs = folder.run_folder(job) / "logs"
    return logs / f"{name}.log" if NAME.fullmatch(name) else None


def log_sizes(folder: JobFolder, job: str) -> Iterator[tuple[str, int]]:
    """Name and size in bytes of each log that is there."""
    paths = [folder.output]
    with suppress(OSError):
        paths += sorted((folder.run_folder(job) / "logs").glob("*.log"))
    for path in paths:
        name = OF_THE_RUN if path == folder.output else path.stem
        if NAME.fullmatch(name) and (fd := _open(path)) is not None:
            yield name, os.fstat(fd).st_size
            os.close(fd)


def read_log(path: Path, offset: int, most_bytes: int) -> tuple[bytes, int]:
    """What a log holds from byte `offset` on, and where to go on. A log that is shorter has begun anew."""
    fd = _open(path)
    if fd is None:
        return b"", 0
    try:
        if os.fstat(fd).st_size < offset:
            offset = 0
        found = os.pread(fd, most_bytes, offset)
        return found, offset + len(found)
    finally:
        os.close(fd)


def _open(path: Path) -> int | None:
    """A descriptor of the file, if it is a regular one in a folder of ours, and no link."""
    if not is_own_folder(path.parent):
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(fd)
        return None
    return fd
