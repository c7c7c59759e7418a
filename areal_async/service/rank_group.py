"""The line (a pipe) from each service to the supervisor, and the address at which the trainer's ranks meet.

Each service sends a pulse over a pipe every `PULSE_S`, from a separate thread. A stopped process sends none.
Over the same pipe, a rank of the trainer reports what it knows about its own death or the death of another
rank (`Note`). The supervisor binds the socket on which the ranks meet and passes it to rank 0, so that no
other program can take the port before rank 0 listens.

This module imports only the standard library and msgspec, because a rank starts its pulse before it loads
torch."""

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
"""First words of causes of death. The failure report recognises them and adds advice."""
NOTE_LIMIT = 300  # Most characters of a note, so that the whole line fits into one write to a pipe


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """A note of a rank about its own death or the death of another rank."""

    cause: str
    """Cause of the death: a phrase that follows the name of the process."""
    ranks: tuple[int, ...] = ()
    """Ranks that the note is about. Empty if the note is about the sender."""


@dataclass(frozen=True)
class Meeting:
    """The address of the TCP store at which the ranks of one trainer meet. Rank 0 serves it."""

    host: str
    port: int
    listening_fd: int | None = None
    """Descriptor of the listening socket, on rank 0 only."""

    @classmethod
    def from_environment(cls) -> Meeting | None:
        """Return the meeting that the supervisor passed to this process in its environment; None for a single
        rank."""
        host, _, port = os.environ.get(MEETING_VARIABLE, "").rpartition(":")
        if not host:
            return None
        listening = os.environ.get(LISTENING_VARIABLE)
        return cls(host, int(port), int(listening) if listening else None)


_pulse_fd: int | None = None


def start_pulse() -> None:
    """Send pulses from now on, if the supervisor listens for them. A second call does nothing."""
    global _pulse_fd
    if _pulse_fd is not None or (fd := os.environ.pop(PULSE_VARIABLE, None)) is None:
        return  # child processes of this process have no such descriptor
    _pulse_fd = int(fd)
    os.set_inheritable(_pulse_fd, False)
    threading.Thread(target=_beat, args=(_pulse_fd,), name="pulse", daemon=True).start()


def _beat(fd: int) -> None:
    with suppress(BrokenPipeError):  # the supervisor has exited
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
    with suppress(BlockingIOError):  # the pipe is full because the supervisor has stopped reading
        os.write(fd, line)
