"""A disk without room: said clearly, and nothing that was there before is touched."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trainer_service.errors import DiskFull

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def room_for(what: str, folder: Path) -> Iterator[None]:
    """Raise `DiskFull` where writing `what` under `folder` fails for lack of room."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not is_full(error):
            raise
        raise DiskFull(
            f"the disk of {folder} has no room for {what} ({error}; {_free(folder)}). What was there before "
            "is whole. Free room, or lower checkpoint.keep, and go on with `areal-async resume`"
        ) from error


def is_full(error: BaseException) -> bool:
    """Whether an error is one of room: of the disk, a quota or a limit on file sizes."""
    if isinstance(error, OSError):
        return error.errno in FULL
    found = _OS_ERROR.search(str(error))  # safetensors has no other way to say it
    return found is not None and int(found[1]) in FULL


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free} bytes free"
    except OSError:
        return "its free room is not known"
