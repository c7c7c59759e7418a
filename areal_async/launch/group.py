"""The supervisor's side of the trainer's ranks: where they meet, whether they live, what they say of a death.

Promises: each start of a group has a socket of its own, bound before the first rank runs, and one rank alone
has none; a rank that gives no pulse for `hang_s` is found, and one that the machine was too busy to run, or
whose supervisor was held up itself, is not: time counts only while the supervisor looks.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_async.launch.plan import rank_name
from areal_async.runtime.context import ServicePlace
from areal_async.runtime.group import LISTENING_VARIABLE, MEETING_VARIABLE, PULSE_VARIABLE, SILENT, Note

HOST = "127.0.0.1"
VMSTAT = Path("/proc/vmstat")
LONGEST_LOOK_S = 1.0  # Between two looks no more than this counts as silence
MEMORY_KILL_S = 30.0
"""A rank that is killed so soon after the kernel has killed something for want of memory is taken for it."""


@dataclass
class _Line:
    """The pipe from a rank."""

    read_fd: int
    silent_s: float = 0.0
    rest: bytes = b""

    def read(self) -> list[Note]:
        """What was said since the last look; hearing anything ends the silence."""
        heard = b""
        with suppress(BlockingIOError):
            heard = os.read(self.read_fd, 1 << 16)
        if heard:
            self.silent_s = 0.0
        *lines, self.rest = (self.rest + heard).split(b"\n")
        notes = []
        for line in filter(None, lines):
            with suppress(msgspec.DecodeError):  # code of the user's may write where it should not
                notes.append(msgspec.json.decode(line, type=Note))
        return notes


class RankGroup:
    """`starting` hands out what a rank is given, `look` finds who hangs, `cause_of` says how one died."""

    def __init__(self, ranks: int, hang_s: float) -> None:
        self._ranks = ranks
        self._hang_s = hang_s
        self._lines: dict[str, _Line] = {}
        self._causes: dict[str, str] = {}
        self._address = ""
        self._looked_s: float | None = None
        self._memory_kills = memory_kills()
        self._memory_killed_s: float | None = None  # When the kernel was last seen to kill for memory

    @contextmanager
    def starting(self, place: ServicePlace) -> Iterator[tuple[dict[str, str], dict[str, int]]]:
        """The variables that the process of this rank is to be started with, and the descriptors, each by the
        variable that names it; none for one that is no rank. Rank 0 is started first."""
        given: dict[str, int] = {}
        if place.role != "trainer":
            yield {}, given
            return
        self.forget(place.name)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lines[place.name] = _Line(read_fd)
        given[PULSE_VARIABLE] = write_fd
        variables = {}
        if self._ranks > 1:
            if place.index == 0:
                listening = socket.create_server((HOST, 0), backlog=max(128, self._ranks))
                self._address = f"{HOST}:{listening.getsockname()[1]}"
                given[LISTENING_VARIABLE] = listening.detach()
            variables[MEETING_VARIABLE] = self._address
        try:
            yield variables, given
        finally:
            for fd in given.values():
                os.close(fd)

    def look(self, now_s: float) -> list[str]:
        """The names of ranks that hang, or that others wait for in vain."""
        passed_s = 0.0 if self._looked_s is None else min(LONGEST_LOOK_S, now_s - self._looked_s)
        self._looked_s = now_s
        self._watch_memory(now_s)
        hanging = []
        for name, line in self._lines.items():
            line.silent_s += passed_s
            for note in line.read():
                for said_of in [rank_name(rank) for rank in note.ranks] or [name]:
                    self._causes.setdefault(said_of, note.cause)
                    if note.ranks:
                        hanging.append(said_of)
            if line.silent_s > self._hang_s:
                self._causes.setdefault(name, f"{SILENT} for {self._hang_s:g} s and was killed")
                hanging.append(name)
        return [name for name in dict.fromkeys(hanging) if name in self._lines]

    def cause_of(self, name: str, status: int, now_s: float) -> str:
        """How the rank `name` died, which ended with `status`; empty where the status says it all."""
        if name not in self._lines:
            return ""
        self.look(now_s)
        recent = self._memory_killed_s is not None and now_s - self._memory_killed_s < MEMORY_KILL_S
        if status == -signal.SIGKILL and recent:
            self._causes.setdefault(name, "was killed by SIGKILL when the machine was out of memory")
        return self._causes.get(name, "")

    def forget(self, name: str) -> None:
        """A rank has ended, or is started again. Safe to repeat."""
        self._causes.pop(name, None)
        if (line := self._lines.pop(name, None)) is not None:
            os.close(line.read_fd)

    def close(self) -> None:
        for name in list(self._lines):
            self.forget(name)

    def _watch_memory(self, now_s: float) -> None:
        before, self._memory_kills = self._memory_kills, memory_kills()
        if self._memory_kills > before:
            self._memory_killed_s = now_s


def memory_kills(vmstat: Path = VMSTAT) -> int:
    """How many processes of this machine the kernel has killed for want of memory; 0 where it is silent."""
    with suppress(OSError):
        for line in vmstat.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.partition(" ")[2])
    return 0
