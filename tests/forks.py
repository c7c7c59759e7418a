"""Commands and services of tests as forks of a process that has done the imports.

A clean start of a job spends some twenty CPU-seconds on imports. Here a fork server, one for each test
process, imports torch, transformers and the product once; it has one thread and computes nothing.
`ForkedCommand` forks `areal-async` from it. Such a command forks a helper before it starts a thread, and that
helper forks the services of the job, first starts and restarts alike:

    test process ── fork server ── areal-async run ── helper
                                        └── services

A service is a child of the supervisor, as it is in a clean start: its parent has died, so the kernel hands it
to the supervisor, which is marked as a subreaper. Its command line, environment, process group, descriptors
and the signal that it gets when the supervisor dies are those of a clean start as well. Jobs with spare
processes, and all that is not started by the local launcher, start cleanly."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import IO, Any

CLI = "areal_async.cli.main"
CLEAN_VARIABLE = "AREAL_ASYNC_TEST_CLEAN_STARTS"
"""Set it to start every process cleanly."""
RANK_SCRIPTS = ("rank", "hosts", "files", "group", "names", "sequence")
PRELOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "areal_async.cli.jobs",
    "areal_async.runner.run_job",
    "areal_async.launch.inline",
    "replay_buffer.server",
    "reward_service.router",
    "reward_service.server",
    "rollout_service.service",
    "rollout_service.engines.local.engine",
    "trainer_service.main",
    "trainer_service.backends.fsdp.backend",
    "tests.forks",
    *(
        f"tests.unit.trainer.{name}_process"
        for name in ("rank", "hosts", "files", "group", "names", "sequence")
    ),
)
LIGHT = ("areal_async.service.main", "areal_async.service.record", "areal_async.rpc.server")
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ROOM = "AREAL_ASYNC_TEST_ROOM"
ROOM_BYTES = 16 << 10
"""Room in the fork server's memory for the environment of a fork, as other processes see it."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORDER_BYTES = 1 << 18

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(PRELOADED))


class PassedFd:
    """A descriptor on its way to a fork, where it is a number."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _detached, (reduction.DupFd(self._fd),)


def _detached(passed: Any) -> int:
    fd: int = passed.detach()
    return fd


def start_fork_server() -> None:
    """Start the fork server of this process, unless it runs. What it imports computes with one thread."""
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(ONE_THREAD, "1") | {ROOM: " " * ROOM_BYTES, "MALLOC_ARENA_MAX": "2"})
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class ForkedCommand:
    """`areal-async` with these arguments, in a session of its own. It has what tests use of `Popen`. Its
    output goes to the descriptor `output`; None: to the pipe `stdout`. If `output` is a terminal, it is the
    terminal of the session and the input as well."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> None:
        start_fork_server()
        self.stdout: IO[bytes] | None = None
        read_fd, write_fd = os.pipe() if output is None else (-1, os.dup(output))
        try:
            self._process = FORKS.Process(
                target=_run_command,
                args=(list(arguments), dict(environment), PassedFd(write_fd), os.getcwd()),
            )
            self._process.start()
        finally:
            os.close(write_fd)
        if output is None:
            self.stdout = os.fdopen(read_fd, "rb", buffering=0)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("areal-async", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_command(
    arguments: Sequence[object], output: int | None = None, **environment: str
) -> subprocess.Popen[bytes] | ForkedCommand:
    """Start `areal-async` with these arguments and with `environment` beside ours. What it prints goes to the
    descriptor `output`; None: to the pipe `stdout` of the result."""
    words, variables = [str(argument) for argument in arguments], os.environ | environment
    if variables.get(CLEAN_VARIABLE):
        return subprocess.Popen(
            [sys.executable, "-m", CLI, *words],
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
        )
    return ForkedCommand(words, variables, output)


# --- in the fork of the command --------------------------------------------------------------------------


def _run_command(arguments: list[str], environment: dict[str, str], output: int, folder: str) -> None:
    os.setsid()
    if os.isatty(output):
        os.dup2(output, 0)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(folder)
    _take_environment(environment)
    _show_as([sys.executable, "-m", CLI, *arguments])
    _reopen_streams()
    _fork_services()
    sys.argv = ["areal-async", *arguments]
    runpy.run_module(CLI, run_name="__main__", alter_sys=True)


def _fork_services() -> None:
    """Let the local launcher of this process fork its services, from a helper that is forked here and now."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the fork server has {threads} threads: a module that it imports starts one")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = os.getpid()
    _libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.fork() == 0:
        ours.close()
        _die_with(command, signal.SIGKILL)
        _serve_orders(theirs, command)
    theirs.close()

    _start_by(ours)


def _start_by(helper: socket.socket, *, beside_spares: bool = False) -> type[Any]:
    """Let the local launcher of this process have its services forked by `helper`; return what it used to
    start them with. With `beside_spares` also those of a job with spare processes, if no spare is ready."""
    from areal_async.launch import local_launcher as here
    from areal_async.launch.spares import Spares

    class ForkedStarts(Spares):
        """Forks each service."""

        def take(self, place, topology, output, environment, descriptors):  # type: ignore[no-untyped-def]
            spare = super().take(place, topology, output, environment, descriptors)
            if spare is not None or (self.after_s is not None and not beside_spares):
                return spare
            return _ForkedService(helper, place, topology, output, environment, descriptors)

    before, here.Spares = here.Spares, ForkedStarts  # type: ignore[misc]
    return before


@contextmanager
def forked_services() -> Iterator[None]:
    """Let the local launcher of this process fork its services meanwhile, from a process that has imported
    what stand-ins of services need: no torch."""
    from areal_async.launch import local_launcher as here

    if os.environ.get(CLEAN_VARIABLE):
        yield
        return
    helper = _light_helper()
    _libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = _start_by(helper, beside_spares=True)
    try:
        yield
    finally:
        here.Spares = before  # type: ignore[misc]
        _libc().prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _light_helper() -> socket.socket:
    """The end of a helper that serves this process until it exits."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"from tests.forks import serve_process; serve_process({theirs.fileno()}, {os.getpid()})"
    subprocess.Popen(
        [sys.executable, "-c", f"{code}  # {' ' * ROOM_BYTES}"],
        pass_fds=[theirs.fileno()],
        env=os.environ | dict.fromkeys(ONE_THREAD, "1") | {ROOM: " " * ROOM_BYTES},
    )
    theirs.close()
    return ours


def serve_process(orders: int, process: int) -> None:
    """Fork services for this process from now on."""
    for module in LIGHT:
        importlib.import_module(module)
    _serve_orders(socket.socket(fileno=orders), process)


class _ForkedService:
    """A forked service: what the launcher uses of `ChildProcess`."""

    def __init__(
        self,
        helper: socket.socket,
        place: Any,
        topology: Path,
        output: Path,
        environment: Mapping[str, str],
        descriptors: Mapping[str, int],
    ) -> None:
        from areal_async.base.processes import service_arguments

        self._status: int | None = None
        self._line = b""
        self._ready_fd, ready = os.pipe()
        os.set_blocking(self._ready_fd, False)
        log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        order = {
            "module": place.module,
            "arguments": service_arguments(place, topology),
            "environment": dict(environment),
            "descriptors": list(descriptors),
        }
        try:
            socket.send_fds(helper, [json.dumps(order).encode()], [log, ready, *descriptors.values()])
            self.pid = int(helper.recv(32))
        finally:
            os.close(log)
            os.close(ready)

    def ready_report(self) -> dict[str, Any] | None:
        with suppress(BlockingIOError):
            self._line += os.read(self._ready_fd, 4096)
        line, newline, _ = self._line.partition(b"\n")
        return json.loads(line) if newline else None

    def poll(self) -> int | None:
        if self._status is None:
            over = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if over is not None:
                self.kill()
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    @property
    def alive(self) -> bool:
        return self.poll() is None

    def terminate(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        fd, self._ready_fd = self._ready_fd, -1
        if fd >= 0:
            os.close(fd)


# --- in the helper of the command, and in the forks of services ------------------------------------------


def _serve_orders(orders: socket.socket, command: int) -> None:
    """Fork a service for each order, until the command has closed its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, fds, _, _ = socket.recv_fds(orders, ORDER_BYTES, 16)
        if not data:
            os._exit(0)
        read_fd, write_fd = os.pipe()
        if (middle := os.fork()) == 0:
            # Its parent ends at once, so that the kernel makes it a child of the command.
            if (service := os.fork()) == 0:
                try:
                    _become_service(json.loads(data), fds, command)
                finally:
                    os._exit(1)
            os.write(write_fd, str(service).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        orders.send(os.read(read_fd, 32))
        for fd in (read_fd, write_fd, *fds):
            os.close(fd)


def _become_service(order: Mapping[str, Any], fds: Sequence[int], command: int) -> None:
    while os.getppid() != command:
        if os.getppid() == 1:
            os._exit(1)
        time.sleep(0.0002)
    os.setsid()
    _die_with(command, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output, ready, *given = fds
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null, output, output)):
        os.dup2(fd, number)
    kept = sorted({0, 1, 2, ready, *given})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
    _take_environment(order["environment"] | dict(zip(order["descriptors"], map(str, given), strict=True)))
    arguments = [*order["arguments"], "--ready-fd", str(ready)]
    _show_as([sys.executable, "-P", "-m", order["module"], *arguments])
    _reopen_streams()
    faulthandler.enable()
    gc.freeze()
    sys.argv = [order["module"], *arguments]
    folders = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _die_with(parent: int, number: int) -> None:
    _libc().prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _reopen_streams() -> None:
    """Write to the descriptors 1 and 2 at once, as Python does with PYTHONUNBUFFERED."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115


def _take_environment(environment: Mapping[str, str]) -> None:
    """Have this environment, for ourselves and for who reads /proc: a run's processes are known by it."""
    os.environ.clear()
    os.environ.update(environment)
    begin, end = MEMORY[1]
    text = b""
    for name, value in environment.items():
        word = f"{name}={value}\0".encode()
        if name != ROOM and len(text) + len(word) < end - begin:
            text += word
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _show_as(command: Sequence[str]) -> None:
    """Let the command line that other processes see be this one. Its memory does not end with a zero byte, so
    the kernel shows the text up to the first one, as it does after setproctitle(3), and readers split it at
    spaces."""
    begin, end = MEMORY[0]
    text = " ".join(command).encode()[: end - begin - 2] + b"\0"
    ctypes.memmove(begin, text.ljust(end - begin, b"."), end - begin)


def _memory() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the command line and the environment of this process lie: [begin, end) of each."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()  # from the third on
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    return (arg_start, arg_end), (env_start, env_end)


MEMORY = _memory()
"""The ranges of the fork server, which its forks inherit."""
