"""The newest revision of the ledger that Redis has confirmed, where it survives the front.

A front that takes over from a dead one, and finds a Redis that came back without the end of its log, can tell
only by this that acknowledged writes are gone. The eight bytes are mapped memory: they outlive the process,
not the machine, and cost no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

FILE = "confirmed"
_REVISION = struct.Struct("<q")


class ConfirmedRevision:
    """The mark in the file at `path`, which is made when it is not there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _REVISION.size)
            self._memory = mmap.mmap(fd, _REVISION.size)
        finally:
            os.close(fd)

    def read(self) -> int:
        """0 where nothing was confirmed yet."""
        return int(_REVISION.unpack_from(self._memory)[0])

    def write(self, revision: int) -> None:
        _REVISION.pack_into(self._memory, 0, revision)

    def close(self) -> None:
        self._memory.close()
