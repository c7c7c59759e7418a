"""Commands and services of tests as forks of a process that has done the imports.

A clean start of a job spends some ten CPU-seconds on imports. Here a fork server, one for each test process,
imports torch, transformers and the product once; it has one thread and computes nothing. `ForkedCommand`
forks `areal-async` from it. Such a command forks a helper before it starts a thread, and the fork server of
its run (`areal_async/launch/forks.py`) is a fork of that helper instead of a process of its own:

    test process ── fork server ── areal-async run ── helper ── fork server of the run
                                        └── services

All else is as in a clean start. What is not started by the local launcher starts cleanly."""

from __future__ import annotations

import fcntl
import functools
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, reduction
from typing import IO, Any, NoReturn

from areal_async.launch import forks
from areal_async.launch.local_launcher import LocalLauncher
from areal_async.service.fork_server import READY, ROOM, die_with, serve, show_as, take_environment

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
ROOM_BYTES = 16 << 10
"""Room in the fork server's memory for the environment of a fork, as other processes see it."""

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
    take_environment(environment)
    show_as([sys.executable, "-m", CLI, *arguments])
    _reopen_streams()
    _fork_services()
    sys.argv = ["areal-async", *arguments]
    runpy.run_module(CLI, run_name="__main__", alter_sys=True)


def _fork_services() -> None:
    """Let the fork servers of this process be forks of a helper that is forked here and now."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the fork server has {threads} threads: a module that it imports starts one")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = os.getpid()
    if os.fork() == 0:
        ours.close()
        os.setsid()
        die_with(command, signal.SIGKILL)
        _fork_servers(theirs, command)
    theirs.close()
    forks.launch = functools.partial(_launched, ours)


def _launched(helper: socket.socket, channels: Sequence[socket.socket], *_: object) -> None:
    """Have `helper` fork the servers that listen to `channels`, instead of starting a process."""
    for channel in channels:
        socket.send_fds(helper, [b"serve"], [channel.fileno()])
        helper.recv(1)


def _fork_servers(helper: socket.socket, supervisor: int) -> NoReturn:
    """Fork a server for each received socket, until the supervisor ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    this = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(helper, 16, 1)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            try:
                helper.close()
                die_with(this, signal.SIGKILL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(socket.socket(fileno=fds[0]), supervisor)
            finally:
                os._exit(1)
        with socket.socket(fileno=fds[0]) as channel:
            channel.send(READY)
        helper.send(b".")


@contextmanager
def forked_services() -> Iterator[None]:
    """Let the local launchers of this process fork their services meanwhile, from a process that has imported
    what stand-ins of services need: no torch."""
    if os.environ.get(CLEAN_VARIABLE):
        yield
        return
    real_launch, real_init = forks.launch, LocalLauncher.__init__
    forks.launch = functools.partial(_launched, _light_helper())
    server = forks.ForkServer((), (), {})

    def init(self: LocalLauncher, *args: Any, forks: Any = None, **options: Any) -> None:
        real_init(self, *args, forks=forks or server, **options)

    LocalLauncher.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.close()
        forks.launch, LocalLauncher.__init__ = real_launch, real_init  # type: ignore[method-assign]


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


def serve_process(helper: int, process: int) -> None:
    """Fork services for this process from now on."""
    for module in LIGHT:
        importlib.import_module(module)
    _fork_servers(socket.socket(fileno=helper), process)


def _reopen_streams() -> None:
    """Write to the descriptors 1 and 2 at once, as Python does with PYTHONUNBUFFERED."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
