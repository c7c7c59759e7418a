"""Child processes: the common code with which every part starts, watches and ends its processes.

Promises: a child leads a session and a process group of its own, so that a Ctrl-C at the terminal does not
reach it; its descendants, unless detached, are killed when it ends in any way; the kernel ends it when the
thread that started it dies (see `guard.py`); its exit status is reported once, and its process id is not
reused while this module uses it.

`Restarts` decides, as a pure function of its `RestartPolicy` and the deaths so far, whether and after which
pause a dead process is restarted.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from areal_async.base.retry import doubled_s
from areal_async.base.topology import ServicePlace

RUN_VARIABLE = "AREAL_ASYNC_RUN"
"""Environment variable that marks every process of a run, however it was started, with the run's id."""
READY_LINE_LIMIT_BYTES = 4096
GUARD = Path(__file__).with_name("guard.py")
INCURABLE_STATUS = 1
"""Exit status by which a service says that starting it again would not help (see `runtime/service.py`)."""
MOST_FILES = 1 << 16  # What a process takes at most of the files that it may have open
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
GONE_LIMIT_S = 10.0  # The longest wait for a killed process: a kernel call of a driver may hold it

OnOrphaned = Literal["terminate", "kill", "kill_group"]
"""Action on a child whose parent died: SIGTERM, SIGKILL, or SIGKILL for its whole process group."""


class ChildProcess:
    """A started process.

    `environment` None means ours. `output` is the file to which standard output and error are appended, or
    the descriptor that takes them; None discards them. `given` is written to its standard input, which is
    then closed. With a `ready_option` the child is given that option with a descriptor, to which it writes
    one line of JSON when it is ready (see `ready_report`). Raises OSError when no process can be started; a
    command that does not exist ends with status 127.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: Path | int | None = None,
        given: bytes = b"",
        pass_fds: Sequence[int] = (),
        ready_option: str = "",
        on_orphaned: OnOrphaned = "terminate",
        umask: int = -1,
    ) -> None:
        self._ready_fd: int | None = None
        self._ready_line = b""
        self._status: int | None = None
        ours: list[int] = []
        passed = list(pass_fds)
        guarded = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), on_orphaned, *command]
        try:
            if isinstance(output, Path):
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                output = os.open(output, flags, 0o666)
                ours.append(output)
            if ready_option:
                self._ready_fd, write_fd = os.pipe()
                os.set_blocking(self._ready_fd, False)
                ours.append(write_fd)
                passed.append(write_fd)
                guarded += [ready_option, str(write_fd)]
            stream = subprocess.DEVNULL if output is None else output
            self._popen = subprocess.Popen(
                guarded,
                stdin=subprocess.PIPE if given else subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=passed,
                start_new_session=True,
                env=None if environment is None else dict(environment),
                umask=umask,
            )
        except BaseException:
            self.close()
            raise
        finally:
            for fd in ours:
                os.close(fd)
        self.pid = self._popen.pid
        if self._popen.stdin is not None:
            with suppress(BrokenPipeError), self._popen.stdin as stdin:  # it has ended: its output says why
                stdin.write(given)

    def ready_report(self) -> dict[str, Any] | None:
        """Return the report of the child once it is ready; None until then. Never blocks."""
        if self._ready_fd is not None:
            with suppress(BlockingIOError):
                self._ready_line += os.read(self._ready_fd, READY_LINE_LIMIT_BYTES)
        line, newline, _ = self._ready_line.partition(b"\n")
        report: dict[str, Any] | None = json.loads(line) if newline else None
        return report

    def poll(self) -> int | None:
        """Return the exit status once the child has ended: as of subprocess, negative for a signal."""
        if self._status is None:
            # Its group is killed before it is reaped: until then no other group can have its number.
            over = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if over is not None:
                self.kill()
                self._status = self._popen.wait()
        return self._status

    @property
    def alive(self) -> bool:
        return self.poll() is None

    def terminate(self) -> None:
        """Ask the child, not its group, to end: it ends its own helpers in its own order."""
        if self._status is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child and everything in its process group. Safe to repeat."""
        if self._status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def join(self) -> int:
        """Block until the child has ended, and return its exit status."""
        with suppress(ChildProcessError):  # reaped by another thread
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return self._ended()

    async def wait(self) -> int:
        """Wait for the child's end, and return its exit status."""
        if (status := self.poll()) is not None:
            return status
        ended, loop, fd = asyncio.Event(), asyncio.get_running_loop(), os.pidfd_open(self.pid)
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return self._ended()

    def _ended(self) -> int:
        status = self.poll()
        assert status is not None
        return status

    async def stop(self, grace_s: float = 0.0) -> int | None:
        """Ask the child to end, kill its group after `grace_s` (0: at once), and return its exit status.
        Return None if it still exists `GONE_LIMIT_S` after the kill."""
        if grace_s > 0:
            self.terminate()
            with suppress(TimeoutError):
                return await asyncio.wait_for(self.wait(), grace_s)
        self.kill()
        with suppress(TimeoutError):
            return await asyncio.wait_for(self.wait(), GONE_LIMIT_S)
        return None

    def close(self) -> None:
        """Close the descriptor for readiness. Safe to repeat."""
        fd, self._ready_fd = self._ready_fd, None
        if fd is not None:
            os.close(fd)


def raise_file_limit() -> None:
    """Raise the limit of open files of this process and its children to the hard limit. The default is often
    1024, but a head needs about ten files for each service of its run, and a front one for each client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def start_service(
    place: ServicePlace,
    topology: Path,
    log_path: Path,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
) -> ChildProcess:
    """Start a service of a run; its readiness report names its `metrics_port`."""
    return ChildProcess(
        # -P: a folder of the user's that is called like a service must not stand in for it.
        [sys.executable, "-P", "-m", place.module, *service_arguments(place, topology)],
        environment=environment,
        output=log_path,
        pass_fds=pass_fds,
        ready_option="--ready-fd",
    )


def service_arguments(place: ServicePlace, topology: Path) -> list[str]:
    """Return the command-line arguments of the module of a service."""
    return ["--topology", str(topology), "--name", place.name]


def service_environment(run_id: str, threads: int) -> dict[str, str]:
    """Return the environment of a service: ours, the run's mark, the number of native threads and, unless
    already set, the number of arenas of the C library's allocator. The default is up to eight arenas per
    core, and no thread reuses memory that was freed in another arena."""
    ours = {
        RUN_VARIABLE: run_id,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {"MALLOC_ARENA_MAX": "2"} | os.environ | ours


def kill_processes_of(run_id: str) -> list[int]:
    """Kill every process of this user that carries the run's id, wherever it has gone; return their pids."""
    killed = []
    for process in _marked(run_id.__eq__):
        with suppress(psutil.Error):
            process.kill()
            killed.append(process.pid)
    return killed


def processes_of(run_id: str) -> list[psutil.Process]:
    """Return the processes of this user that carry the run's id, alone or with a name."""
    return list(_marked(lambda mark: mark.partition(".")[0] == run_id))


def _marked(wanted: Callable[[str], bool]) -> Iterator[psutil.Process]:
    """Yield the other processes of this user whose mark is wanted."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real != os.getuid():
                continue  # root may read everybody's environment
            if process.pid != os.getpid() and wanted(process.environ().get(RUN_VARIABLE, "")):
                yield process


def start_of(pid: int) -> str:
    """Return the start of process `pid` as a text that no other process ever has: the boot, and the clock
    ticks from it to the start (proc_pid_stat(5)). Changing the clock does not affect it. Raises
    `ProcessLookupError` if there is no such process, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    state, *fields = stat.rpartition(") ")[2].split()  # from the third on
    if state in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{BOOT_ID.read_text().strip()} {fields[18]}"


SHM_FULL = "most likely shared memory is full: `df -h -t tmpfs`"
"""Cause of nearly every SIGBUS: a page of a mapped file for which there is no room."""


def exit_text(status: int) -> str:
    """Return an exit status in words: `ended with status 1`, `was killed by SIGKILL`."""
    if status == 128 + signal.SIGTERM:
        return "ended in order because something outside the run sent it a signal"
    if status == os.EX_TEMPFAIL:
        return f"ended with status {status} (an error that may pass)"
    if status >= 0:
        return f"ended with status {status}"
    try:
        likely = f" ({SHM_FULL})" if -status == signal.SIGBUS else ""
        return f"was killed by {signal.Signals(-status).name}{likely}"
    except ValueError:
        return f"was killed by signal {-status}"


@dataclass(frozen=True)
class RestartPolicy:
    """Deaths of one process that are survived (`limit` within `window_s`), and the pauses after them."""

    limit: int
    window_s: float = 300.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    steady_s: float = 10.0
    """A process that served so long before it died was well: it is not dying in a loop, and starts again at
    once."""


NO_RESTARTS = RestartPolicy(limit=0)


@dataclass
class Restarts:
    """The deaths of one process under a policy. Times are of one monotonic clock."""

    policy: RestartPolicy
    deaths_s: list[float] = field(default_factory=list)  # When it died, within the policy's window
    early: int = 0  # Deaths in a row that came before it had served for `policy.steady_s`

    def died(self, now_s: float, *, served_s: float | None = None, status: int | None = None) -> float | None:
        """Count a death of the process, which served since `served_s` (None: it did not) and ended with
        `status`. Returns the seconds to wait before it is started again; None: give up."""
        self.deaths_s = [at_s for at_s in self.deaths_s if now_s - at_s < self.policy.window_s] + [now_s]
        steady = served_s is not None and now_s - served_s >= self.policy.steady_s
        self.early = 0 if steady else self.early + 1
        if status == INCURABLE_STATUS or len(self.deaths_s) > self.policy.limit:
            return None
        if not self.early:
            return 0.0
        return doubled_s(self.early, self.policy.first_pause_s, self.policy.longest_pause_s)
