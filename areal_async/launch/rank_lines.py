"""The supervisor's side of the *line*, a pipe from each service. A service sends regular pulses on its line,
which show that it lives. Ranks of a trainer also send notes on deaths.

Promises: a service of any role that sends no pulse for its `hang_s` is found, whatever its activity. Silence
does not count in three cases: the machine was too busy to run the service, the supervisor itself was
suspended, or the host is unreachable. Therefore the clock of a silence runs only while the supervisor reads
the lines. It starts at the first pulse; `supervisor.ready_s` limits the time before that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from areal_async.base.topology import ServicePlace
from areal_async.launch.launcher import Child
from areal_async.launch.plan import rank_name
from areal_async.service.rank_group import SILENT, Note

LONGEST_LOOK_S = 1.0  # Longest silence that counts between two looks


@dataclass
class _Line:
    """The line between a service and the process that started it."""

    place: ServicePlace
    child: Child
    silent_s: float | None = None
    """Seconds since the last pulse; None before the first pulse."""
    rest: bytes = b""

    def read(self) -> list[Note]:
        """Return the notes since the last call. Any data ends the silence."""
        if heard := self.child.heard():
            self.silent_s = 0.0
        *lines, self.rest = (self.rest + heard).split(b"\n")
        notes = []
        for line in filter(None, lines):
            with suppress(msgspec.DecodeError):  # user code may write to the pipe by mistake
                notes.append(msgspec.json.decode(line, type=Note))
        return notes


class Lines:
    """The lines of all services. `look` finds services that hang, and `cause_of` returns the reason for a
    death."""

    def __init__(self, hang_s: Callable[[ServicePlace], float]) -> None:
        self._hang_s = hang_s
        self._lines: dict[str, _Line] = {}
        self._causes: dict[str, str] = {}
        self._looked_s: float | None = None

    def started(self, place: ServicePlace, child: Child) -> None:
        """Listen to a new process from now on."""
        self.forget(place.name)
        self._lines[place.name] = _Line(place, child)

    def look(self, now_s: float) -> list[str]:
        """Return the names of services that hang, and of ranks that other ranks reported as missing."""
        passed_s = 0.0 if self._looked_s is None else min(LONGEST_LOOK_S, now_s - self._looked_s)
        self._looked_s = now_s
        hanging = []
        for name, line in self._lines.items():
            if line.silent_s is not None and line.child.is_heard():
                line.silent_s += passed_s
            for note in line.read():
                for said_of in [rank_name(rank, line.place.policy) for rank in note.ranks] or [name]:
                    self._causes.setdefault(said_of, note.cause)
                    if note.ranks:
                        hanging.append(said_of)
            if line.silent_s is not None and line.silent_s > (hang_s := self._hang_s(line.place)):
                self._causes.setdefault(name, f"{SILENT} for {hang_s:g} s and was killed")
                hanging.append(name)
        return [name for name in dict.fromkeys(hanging) if name in self._lines]

    def cause_of(self, name: str, now_s: float) -> str:
        """Return why the service `name` died; empty if only its exit status is known."""
        if name not in self._lines:
            return ""
        self.look(now_s)
        return self._causes.get(name, "")

    def forget(self, name: str) -> None:
        """Stop listening to a service. May be called again."""
        self._causes.pop(name, None)
        self._lines.pop(name, None)
