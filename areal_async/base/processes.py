"""Child processes: the common tools to start, watch and end them.

Promises:
- A child leads a session and a process group of its own, so Ctrl-C at the terminal does not reach it.
- When a child ends for any reason, its own attached children are killed.
- The kernel ends a child when the thread that started it dies (see `guard.py`).
- The exit status of a child stays available. Its process id is not reused while this module uses the id.

`Restarts` decides whether a dead process is restarted, and after which pause. It is a pure function of its
`RestartPolicy` and the deaths so far.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import psutil

from areal_async.base.retry import doubled_s
from areal_async.base.topology import ServicePlace

RUN_VARIABLE = "AREAL_ASYNC_RUN"
"""Environment variable with the run's id, which marks every process of the run."""
READY_LINE_LIMIT_BYTES = 4096
GUARD = Path(__file__).with_name("guard.py")
INCURABLE_STATUS = 1
"""Exit status that means: a restart would not help this service (see `service/main.py`)."""
MOST_FILES = 1 << 16  # most open files that a process allows itself
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
GONE_LIMIT_S = 10.0  # longest wait for a killed process, which a kernel call of a driver may block

OnOrphaned = Literal["terminate", "kill", "kill_all"]
"""Action on a child whose parent has died: SIGTERM, SIGKILL, or SIGKILL for it and all its descendants. With
`kill_all` the process of this child is the guard, which ends only after all of them have ended."""


class ChildProcess:
    """A started process.

    If `environment` is None, the child inherits ours. Standard output and error go to `output`: a file to
    append to, a descriptor, or None to discard them. `given` is written to its standard input, which is then
    closed. With a `ready_option` the child gets that option with a descriptor, to which the child writes one
    line of JSON when it is ready (see `ready_report`). Raises `OSError` if no process can be started. If the
    command does not exist, the child exits with status 127.
    """

    pid: int
    _popen: subprocess.Popen[bytes] | None = None  # None if another process started it
    _ready_fd: int | None = None
    _ready_line = b""
    _status: int | None = None
    _guard_kills = False

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
        self._guard_kills = on_orphaned == "kill_all"
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
            self._popen = popen = subprocess.Popen(
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
        self.pid = popen.pid
        if popen.stdin is not None:
            with (
                suppress(BrokenPipeError),
                popen.stdin as stdin,
            ):  # the child has exited; its output gives the reason
                stdin.write(given)

    @classmethod
    def adopted(cls, pid: int, ready_fd: int) -> Self:
        """Return a child that leads its session and that another process started. `ready_fd` is the pipe to
        which it reports that it is ready."""
        child = cls.__new__(cls)
        child.pid, child._ready_fd = pid, ready_fd
        return child

    def ready_report(self) -> dict[str, Any] | None:
        """Return the child's report once it is ready, or None. Never blocks."""
        if self._ready_fd is not None:
            with suppress(BlockingIOError):
                self._ready_line += os.read(self._ready_fd, READY_LINE_LIMIT_BYTES)
        line, newline, _ = self._ready_line.partition(b"\n")
        report: dict[str, Any] | None = json.loads(line) if newline else None
        return report

    def poll(self) -> int | None:
        """Return the exit status once the child has ended, or None. Negative values are signals, as in
        subprocess."""
        if self._status is None:
            # The group is killed before the child is reaped. Until then no other group can get its number.
            over = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if over is not None:
                self._kill_group()
                if self._popen is not None:
                    self._status = self._popen.wait()
                else:
                    self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    @property
    def alive(self) -> bool:
        return self.poll() is None

    def terminate(self) -> None:
        """Send SIGTERM to the child but not to its group. The child ends its own helpers in its own order."""
        if self._status is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child and its process group. With `kill_all`, the guard does this. A repeated call is
        harmless."""
        if self._status is None and self._guard_kills:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
                os.kill(self.pid, signal.SIGCONT)  # a stopped guard takes no other signal
        elif self._status is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def join(self) -> int:
        """Block until the child has ended, and return its exit status."""
        with suppress(ChildProcessError):  # another thread has reaped it
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return self._ended()

    async def wait(self) -> int:
        """Wait until the child has ended, and return its exit status."""
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
        """Terminate the child, kill its group after `grace_s` (0: at once), and return its exit status.

        Return None if the child still exists `GONE_LIMIT_S` after the kill.
        """
        if grace_s > 0:
            self.terminate()
            with suppress(TimeoutError):
                return await asyncio.wait_for(self.wait(), grace_s)
        self.kill()
        with suppress(TimeoutError):
            return await asyncio.wait_for(self.wait(), GONE_LIMIT_S)
        return None

    def close(self) -> None:
        """Close the descriptor for readiness. A repeated call is harmless."""
        fd, self._ready_fd = self._ready_fd, None
        if fd is not None:
            os.close(fd)


def raise_file_limit() -> None:
    """Raise the limit on open files of this process and its children to the allowed maximum.

    A supervisor needs about ten files for each service of its run, and a server needs one for each client.
    The initial limit is often 1024.
    """
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
    """Start a service of a run. Its readiness report contains its `metrics_port`."""
    return ChildProcess(
        # -P prevents that a user's folder with a service's name is imported instead.
        [sys.executable, "-P", "-m", place.module, *service_arguments(place, topology)],
        environment=environment,
        output=log_path,
        pass_fds=pass_fds,
        ready_option="--ready-fd",
    )


def service_arguments(place: ServicePlace, topology: Path) -> list[str]:
    """Return the command-line arguments of a service's module."""
    return ["--topology", str(topology), "--name", place.name]


def service_environment(run_id: str, threads: int) -> dict[str, str]:
    """Return the environment of a service: ours, the run's mark, the thread count, an allocator limit and
    how threads wait. A value that our environment already sets for the last two is kept.

    The allocator limit is the number of arenas of the C library's allocator. By default there are up to eight
    arenas per core, and memory freed in one arena is not reused by other threads. Threads of OpenMP that wait
    for each other must not spin: they would take the core from the thread that they wait for, or from another
    service.
    """
    ours = {
        RUN_VARIABLE: run_id,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {"MALLOC_ARENA_MAX": "2", "OMP_WAIT_POLICY": "passive"} | os.environ | ours


def kill_processes_of(run_id: str) -> list[int]:
    """Kill every process of this user that carries the run's id, and return the pids."""
    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real != os.getuid() or process.pid == os.getpid():
                continue  # root may read the environment of other users' processes
            if process.environ().get(RUN_VARIABLE) == run_id:
                process.kill()
                killed.append(process.pid)
    return killed


def start_of(pid: int) -> str:
    """Return a text that identifies the start of process `pid` and that no other process has.

    It consists of the id of the machine's boot and the clock ticks from the boot to the start of the process
    (proc_pid_stat(5)). Setting the clock does not change it. Raises `ProcessLookupError` if the process does
    not exist or is a zombie.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    state, *fields = stat.rpartition(") ")[2].split()  # from the third field on
    if state in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{BOOT_ID.read_text().strip()} {fields[18]}"


SHM_FULL = "most likely shared memory is full: `df -h -t tmpfs`"
"""Most common cause of a SIGBUS: the file system has no room for a page of a mapped file."""


def exit_text(status: int) -> str:
    """Return an exit status as a text: `ended with status 1`, `was killed by SIGKILL`."""
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
    """A limit on deaths of one process (`limit` within `window_s`), and the pauses after them."""

    limit: int
    window_s: float = 300.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    steady_s: float = 10.0
    """Seconds of service that end a crash loop. A process that dies after serving at least this long restarts
    at once."""


NO_RESTARTS = RestartPolicy(limit=0)


@dataclass
class Restarts:
    """The deaths of one process under a policy. All times are from one monotonic clock."""

    policy: RestartPolicy
    deaths_s: list[float] = field(default_factory=list)  # times of its deaths within the policy's window
    early: int = 0  # consecutive deaths before it had served for `policy.steady_s`

    def died(self, now_s: float, *, served_s: float | None = None, status: int | None = None) -> float | None:
        """Count a death and return the seconds before the restart, or None to give up.

        The process had served since `served_s` (None: it had never served) and ended with `status`.
        """
        self.deaths_s = [at_s for at_s in self.deaths_s if now_s - at_s < self.policy.window_s] + [now_s]
        steady = served_s is not None and now_s - served_s >= self.policy.steady_s
        self.early = 0 if steady else self.early + 1
        if status == INCURABLE_STATUS or len(self.deaths_s) > self.policy.limit:
            return None
        if not self.early:
            return 0.0
        return doubled_s(self.early, self.policy.first_pause_s, self.policy.longest_pause_s)
