"""Connections between the supervisor and its services: the line to each service, and the meeting point of
ranks.

Each service writes a pulse to a pipe every `PULSE_S`, from its own thread; a stopped process writes none.
Ranks of the trainer use the same pipe to report a death (`Note`), their own or another rank's. The supervisor
binds the socket on which the ranks meet and hands it to rank 0, so that no other program can take its port
meanwhile.

Only the standard library and msgspec: a rank starts its pulse before it loads torch.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

PULSE_S = 1.0
PULSE_VARIABLE = "AREAL_ASYNC_PULSE_FD"
MEETING_VARIABLE = "AREAL_ASYNC_MEETING"
LISTENING_VARIABLE = "AREAL_ASYNC_MEETING_FD"
OUT_OF_MEMORY = "ran out of memory"
SILENT = "gave no sign of life"
LATE = "did not come to a collective"
LATE_START = "did not come to the meeting"
"""These words begin a cause of death for which a report has advice."""
NOTE_LIMIT = 300  # Characters of a note's text: with its frame it fits into one write to a pipe


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """A note of a rank about a death, its own or another's."""

    cause: str
    """Cause of the death, in words that follow its name."""
    ranks: tuple[int, ...] = ()
    """Ranks that the note is about; none for the sender itself."""


@dataclass(frozen=True)
class Meeting:
    """The address of the TCP store at which the ranks of one trainer meet; rank 0 serves it."""

    host: str
    port: int
    listening_fd: int | None = None
    """The descriptor of the listening socket, on rank 0."""

    @classmethod
    def from_environment(cls) -> Meeting | None:
        """Return the meeting given by the supervisor; None for a rank that is alone."""
        host, _, port = os.environ.get(MEETING_VARIABLE, "").rpartition(":")
        if not host:
            return None
        listening = os.environ.get(LISTENING_VARIABLE)
        return cls(host, int(port), int(listening) if listening else None)


_pulse_fd: int | None = None


def start_pulse() -> None:
    """Give pulses from now on, if the supervisor listens for them. A second call does nothing."""
    global _pulse_fd
    if _pulse_fd is not None or (fd := os.environ.pop(PULSE_VARIABLE, None)) is None:
        return  # children of this process have no such descriptor
    _pulse_fd = int(fd)
    os.set_inheritable(_pulse_fd, False)
    threading.Thread(target=_beat, args=(_pulse_fd,), name="pulse", daemon=True).start()


def _beat(fd: int) -> None:
    with suppress(BrokenPipeError):  # the supervisor is gone
        while True:
            _write(fd, b"\n")
            time.sleep(PULSE_S)


def tell(note: Note) -> None:
    """Send a note to the supervisor, if it listens."""
    if _pulse_fd is not None:
        cut = Note(" ".join(note.cause.split())[:NOTE_LIMIT], note.ranks)
        with suppress(BrokenPipeError):
            _write(_pulse_fd, msgspec.json.encode(cut) + b"\n")


def _write(fd: int, line: bytes) -> None:
    with suppress(BlockingIOError):  # nobody has read for a day: the supervisor has stopped
        os.write(fd, line)
