"""Programs for a sandbox, their limits, and the outcomes of their runs."""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_async.base.errors import ArealError

Level = Literal["isolated", "none"]
"""Level of a program's isolation.

`isolated`: namespaces, a filter of system calls and a memory limit. `none`: a child process with limits and
its own folder, without protection.
"""
EndKind = Literal[
    "ok",
    "exit",
    "signal",
    "timeout",
    "cpu",
    "memory",
    "processes",
    "output",
    "files",
    "ended",
    "clock",
]


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one run. They apply to the program and all its children, unless stated otherwise."""

    wall_s: float = 10.0
    """Limit for the duration of the run in seconds, without the time that the program waited for a
    processor."""
    cpu_s: float = 4.0
    clock_s: float = 3600.0
    """Seconds of all runs by the clock, including the time that the program waited for the machine.

    This limit protects the caller. A run that it ends (`clock`) proves nothing about the program.
    """
    memory_mb: int = 512
    """Memory of all processes together. It also limits the address space of each."""
    processes: int = 16  # threads count
    files_mb: int = 32  # size of all files in memory together (isolated), and of each file
    files: int = 512  # Number of files and folders (isolated)
    open_files: int = 64  # descriptors of each process
    output_kb: int = 256  # size of standard output, and kept size of the end of standard error


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a Python program (`source`), or a `command`."""

    source: str = ""
    environment: str = ""
    """Interpreter or virtual environment that runs the program. Programs can import the packages of that
    environment.

    Empty means the standard library, and those packages in `interpreter.OFFERED` that are installed.
    """
    bare: bool = False
    """Whether the interpreter imports nothing from the folder of the run, and runs no startup code of
    packages."""
    command: tuple[str, ...] = ()
    """Absolute path of a program in a system folder and its arguments, instead of `source`."""
    files: dict[str, bytes] = {}  # content by relative path, written to the folder of the run
    stdin: bytes = b""
    limits: RunLimits = RunLimits()
    within_s: float | None = None
    """Seconds of all runs of the program together, counted like `wall_s`. None: each run has only its own
    limit."""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run. Whatever a program does, its run returns an outcome and raises no exception."""

    kind: EndKind
    """Cause of the end.

    `ok` is exit status 0, `exit` is another status, and `signal` is a kill by a signal. `ended` means that
    the tests of a pair had ended, so their program was ended too. The other kinds name the limit that ended
    the run (`files`: a file above the size limit). All kinds except `clock` and `ended` are caused by the
    program.
    """
    status: int = 0  # exit status, or the signal's number for `signal`
    stdout: bytes = b""
    stderr: bytes = b""
    """Output, cut at its limit. The beginning of `stdout` and the end of `stderr` are kept."""
    wall_ms: float = 0.0
    waited_ms: float = 0.0
    """Time in which the program was ready to run while the machine did other work.

    Only waits that the kernel reports are counted, and only while no other thread of the program could run.
    """
    spent_ms: float = 0.0
    """Time charged to the program. It excludes waits and is at least the CPU time."""
    cpu_ms: float = 0.0
    peak_mb: float = 0.0
    """Largest memory of all processes together, including files in memory.

    With the guard `memory sum` or without isolation, memory is only polled, and the value is 0 if the run
    ends before the first poll.
    """
    level: Level = "none"

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    def describe(self) -> str:
        """Return the cause of the end, with the last line of standard error."""
        how = self.kind if self.kind not in ("exit", "signal") else f"{self.kind} {self.status}"
        said = self.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"{how}: {said[-1][-300:]}" if said else how


class SandboxError(ArealError):
    """There is no sandbox of the requested level. The verdict is then an error of the kind `sandbox`, never a
    score of 0."""

    verdict_kind = "sandbox"


class Overloaded(SandboxError):
    """The deadline of the caller passed before the program reached its own limits.

    The verdict is then an error of the kind `overloaded`, never a score of 0.
    """

    verdict_kind = "overloaded"


class CannotIsolate(SandboxError):
    """This machine cannot isolate programs. `why` is the reason, and `fix` says what to change."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(f"{why}. {fix}.")
        self.why, self.fix = why, fix


class PythonMissing(SandboxError):
    """There is no Python that can run the program, or the named environment is not an environment of
    Python."""
