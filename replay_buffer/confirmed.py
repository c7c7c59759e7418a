"""The newest revision of the ledger that Redis has confirmed, where it survives the front.

A front that takes over from a dead one, and finds a Redis that came back without the end of its log, can tell
only by this that acknowledged writes are gone. The eight bytes are in the kernel when `write` returns: they
outlive the process, not the machine. They are written and not mapped, for a map that a killed process leaves
behind is not on every file system what the next one reads.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

FILE = "confirmed"
_REVISION = struct.Struct("<q")


class ConfirmedRevision:
    """The mark in the file at `path`, which is made when it is not there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> int:
        """0 where nothing was confirmed yet."""
        held = os.pread(self._fd, _REVISION.size, 0)
        return int(_REVISION.unpack(held)[0]) if held else 0

    def write(self, revision: int) -> None:
        os.pwrite(self._fd, _REVISION.pack(revision), 0)

    def close(self) -> None:
        os.close(self._fd)
