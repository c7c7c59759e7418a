"""Programs for a sandbox, their limits, and the outcomes of their runs."""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_async.base.errors import ArealError

Level = Literal["isolated", "none"]
"""`isolated` means namespaces, a filter of system calls, limited memory. `none` means a child process with
limits and its own folder, which is no protection."""
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
    "compile",
    "ended",
    "clock",
]
LINK_FD = 3  # The descriptor at which each of a pair finds the link to the other


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps on one run. All of them hold for the program and everything it starts, unless said otherwise."""

    wall_s: float = 10.0
    """Time of the run without the time that it waited for a processor; with compiling, if
    `Program.within_s`."""
    cpu_s: float = 4.0
    clock_s: float = 3600.0
    """Time of compiling and the run by the clock, whatever else the machine did: a limit of whoever waits for
    the result. A run that this ends (`clock`) says nothing about the program."""
    memory_mb: int = 512
    """Memory of all processes together, whoever maps it; and address space of each, if `address_space`."""
    address_space: bool = True
    """Runtimes that reserve far more than they use (Node.js) cannot work under such a limit."""
    processes: int = 16  # Threads count
    files_mb: int = 32  # Size of all files in memory together (isolated), and of each file
    files: int = 512  # Number of files and folders (isolated)
    open_files: int = 64  # Descriptors of each process
    output_kb: int = 256  # Size of standard output; of standard error so much is kept, the end


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Either `source` in a `language` of `languages.LANGUAGES`, or a `command` of one's own."""

    source: str = ""
    language: str = "python"
    environment: str = ""
    """Interpreter or virtual environment of a Python program, with its packages. Empty means the standard
    library, and the installed packages of `languages.OFFERED`."""
    command: tuple[str, ...] = ()
    """Absolute path of a program in a system folder, and its arguments. Instead of `source`."""
    files: dict[str, bytes] = {}  # Relative path → content, laid into the folder that it runs in
    stdin: bytes = b""
    limits: RunLimits = RunLimits()
    within_s: float | None = None
    """Time for compiling and running together, counted as `wall_s`; none: each has its own limit alone."""
    collect: tuple[str, ...] = ()  # Relative paths of files to bring back


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run. Nothing the program does makes it an exception of ours."""

    kind: EndKind
    """`ok`: exit status 0. `exit`: another one. `signal`: killed by one. `compile`: it did not compile. Else
    the limit that ended it (`files`: a file above the size limit), or `ended`: the program of a pair whose
    tests had ended. All but `clock` and `ended` are the program's own doing."""
    status: int = 0  # Exit status, or the signal's number for `signal`
    stdout: bytes = b""
    stderr: bytes = b""
    """Output, cut at its limit: of `stdout` the beginning is kept, of `stderr` the end."""
    wall_ms: float = 0.0
    waited_ms: float = 0.0
    """Time in which the program could have run and the machine did something else, as far as the kernel says
    so and no other thread of the program ran meanwhile."""
    spent_ms: float = 0.0
    """Time charged to the program, compiling included and waiting excluded, but at least its CPU time."""
    cpu_ms: float = 0.0
    peak_mb: float = 0.0
    """Most memory of all processes together, with files in memory. Where it is held by looking (`memory sum`,
    or no isolation), 0 for a run shorter than the first look."""
    level: Level = "none"
    guards: tuple[str, ...] = ()
    """Its confinement: namespaces (`user`, `pid`, `mount`, `net`, `ipc`, `uts`, `cgroup`),
    a user of its own (`uid`), `seccomp`, how memory is held (`memory group` or `memory sum`), `bubblewrap`,
    `remote`."""
    artifacts: dict[str, bytes] = {}  # Content of those files to bring back that were there

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    def describe(self) -> str:
        """Return how it ended, with the last line of its errors."""
        how = self.kind if self.kind not in ("exit", "signal") else f"{self.kind} {self.status}"
        said = self.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"{how}: {said[-1][-300:]}" if said else how


class SandboxError(ArealError):
    """There is no sandbox, or none of the level asked for: the verdict is an error of kind `sandbox`, never
    0."""

    verdict_kind = "sandbox"


class Overloaded(SandboxError):
    """The deadline of whoever waits came before the program had used up its own limits: the verdict is an
    error of kind `overloaded`, never 0."""

    verdict_kind = "overloaded"


class CannotIsolate(SandboxError):
    """This machine, or the machine of a sandbox server, cannot isolate programs. `why` is the reason and
    `fix` the setting to change."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(f"{why}. {fix}.")
        self.why, self.fix = why, fix


class CompilerMissing(ArealError):
    """The compiler or runtime of a language is not installed: an error of kind `compile`, never 0."""

    verdict_kind = "compile"
