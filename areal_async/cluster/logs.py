"""Reading the logs of a job. The job's processes write them.

The folder belongs to the job, so the job's code may have put a link there. The link may point to a file that
a reader of logs must not see. Therefore only regular files directly in the folder are read."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from areal_async.base.own_files import NotOurs, is_own_folder, open_own

OF_THE_RUN = "run"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def logs_in(run_folder: Path) -> dict[str, Path]:
    """Return the paths of the logs of a run's processes, by name. No log is opened."""
    with suppress(OSError):
        paths = sorted((run_folder / "logs").glob("*.log"))
        return {path.stem: path for path in paths if NAME.fullmatch(path.stem)}
    return {}


def read_log(path: Path, offset: int, most_bytes: int) -> tuple[bytes, int]:
    """Return the content of a log from byte `offset`, and the offset of the next read.

    A log that is shorter than `offset` was restarted and is read from its beginning."""
    if (fd := _open(path)) is None:
        return b"", 0
    with os.fdopen(fd, "rb"):
        if os.fstat(fd).st_size < offset:
            offset = 0
        found = os.pread(fd, most_bytes, offset)
        return found, offset + len(found)


def _open(path: Path) -> int | None:
    """Return a descriptor of a regular file if this user owns the file and its folder. Returns None
    otherwise."""
    with suppress(OSError, NotOurs):
        if is_own_folder(path.parent):
            fd = open_own(path)
            if os.fstat(fd).st_nlink == 1:
                return fd
            os.close(fd)
    return None
