"""The fork server: a process that has imported what the services of a run share. Services are its forks.

Most of the time of a start is the import of torch and transformers. The server imports them once, and its
forks share the memory of the imported modules. Before that it forks a second server, the *light* one, for
services without torch. These start earlier and take less memory.

A fork copies locks but not the threads that hold them. Therefore a server has one thread, and it computes
nothing, because a computation starts the threads of native libraries. It checks this before each fork, and
ends if it has a second thread.

The supervisor sends descriptors over a socket that only both have. Among them is a file with the `Order`. The
server does not read that file, so that its memory, which later forks inherit, never has a service's secrets.
A fork becomes a child of the supervisor, because the process between them ends at once and the supervisor
adopts its orphans meanwhile. The fork sends its process id over the socket of its birth. It runs the service
once the supervisor has answered.

Promises:
- A fork has the environment, the command line, the descriptors, the session, the working folder and the
  number of threads of a fresh process. It shares no state of random generators with other forks.
- A fork ends at once, before it uses anything of the run, if the supervisor does not answer.
- The servers end when the supervisor ends. Services do not depend on them after their start.

    python -P -m areal_async.service.fork_server SUPERVISOR_PID FD LIGHT_FD ROOM

The standard input has the `Modules`. ROOM is an argument of blanks, which reserves space for the command
lines of services. The variable `ROOM` does the same for their environments."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

MODULE = "areal_async.service.fork_server"
ROOM = "AREAL_ASYNC_ROOM"
ROOM_BYTES = 4096  # Space for a command line, and for variables that only services have
READY, GO = b"ready", b"go"
FORK = b"fork"
MOST_FDS = 32
PR_SET_PDEATHSIG = 1


class Modules(msgspec.Struct, frozen=True):
    """Modules to import, in order: those of the light server, then those of the server."""

    light: Sequence[str]
    heavy: Sequence[str]


class Order(msgspec.Struct, frozen=True):
    """The service that a fork must become."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    """The whole environment. If it is too long to be shown to other processes, they see its beginning."""
    descriptors: list[str]
    """Environment variables that get the numbers of the last received descriptors, in order."""


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection during imports, and freeze the loaded objects afterwards.

    Without this, collection takes a fifth of the import time of torch and transformers."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main() -> None:
    """Serve the supervisor that the arguments name."""
    supervisor, fd, light_fd, _ = sys.argv[1:]
    modules = msgspec.json.decode(sys.stdin.buffer.read(), type=Modules)
    channel, light = (socket.socket(fileno=int(each)) for each in (fd, light_fd))
    server = os.getpid()
    with loading():
        _import(modules.light)
        is_light = os.fork() == 0
        if not is_light:
            _import(modules.heavy)
    if is_light:
        die_with(server, signal.SIGKILL)
        channel = light
    else:
        light.close()
    serve(channel, int(supervisor))


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def serve(channel: socket.socket, supervisor: int) -> NoReturn:
    """Fork services until the supervisor closes its end."""
    channel.send(READY)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, len(FORK), MOST_FDS)
        if not message:
            os._exit(0)
        _fork(channel, supervisor, fds)


def _fork(channel: socket.socket, supervisor: int, fds: Sequence[int]) -> None:
    """Fork a service that is the supervisor's child. End the server if it has more than one thread."""
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        channel.send(f"it has {threads} threads, because a module that it imports starts one".encode())
        os._exit(1)
    if (middle := os.fork()) == 0:
        middle = os.getpid()
        if os.fork() != 0:
            os._exit(0)
        channel.close()
        _serve_as(fds, middle, supervisor)
    os.waitpid(middle, 0)
    for fd in fds:
        os.close(fd)


# --- in the fork -----------------------------------------------------------------------------------------


def _serve_as(fds: Sequence[int], middle: int, supervisor: int) -> NoReturn:
    """Be the service. The descriptors are those of the birth, the order, the output and the readiness, then
    those that the order names."""
    status = 1
    try:
        birth, order_fd, output, ready, *given = fds
        for number in (1, 2):
            os.dup2(output, number)
        os.setsid()
        while os.getppid() == middle:  # until it has ended, which it does at once
            time.sleep(0.0001)
        die_with(supervisor, signal.SIGTERM)
        _introduced(socket.socket(fileno=birth))
        with open(order_fd, "rb") as file:
            order = msgspec.json.decode(file.read(), type=Order)
        numbers = zip(order.descriptors, map(str, given), strict=True)
        keep_descriptors([ready, *given])
        arguments = [*order.arguments, "--ready-fd", str(ready)]
        take_environment(order.environment | dict(numbers))
        show_as([sys.executable, "-P", "-m", order.module, *arguments])
        _have_own_state()
        sys.argv = [order.module, *arguments]
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _introduced(birth: socket.socket) -> None:
    """Tell the supervisor the process id, and wait for its answer. Exits without an answer, or if libraries
    have initialised CUDA in the server, which does not work in a fork."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        os._exit(1)
    with birth:
        birth.send(str(os.getpid()).encode())
        if birth.recv(len(GO)) != GO:
            os._exit(1)


def die_with(parent: int, number: int) -> None:
    """Have the kernel send this signal when the parent ends. Exits if the parent is another process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def keep_descriptors(kept: Sequence[int]) -> None:
    """Close all descriptors except 0, 1, 2 and `kept`. Commands of this process do not inherit `kept`. The
    standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for fd in kept:
        os.set_inheritable(fd, False)
    bounds = sorted({0, 1, 2, *kept})
    for low, high in zip(bounds, [*bounds[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def take_environment(environment: Mapping[str, str]) -> None:
    """Have this environment, also for processes that read it in /proc: they find the run's processes by it.
    Add the folders of its PYTHONPATH to the path of imports."""
    os.environ.clear()
    os.environ.update(environment)
    begin, end = MEMORY[1]
    text = b""
    for name, value in environment.items():
        word = os.fsencode(f"{name}={value}") + b"\0"
        if name != ROOM and len(text) + len(word) < end - begin:
            text += word
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]


def show_as(command: Sequence[str]) -> None:
    """Set the command line that other processes see. Text beyond the reserved space is cut off.

    The memory does not end with a zero byte, so the kernel shows the text up to the first zero byte, as it
    does after setproctitle(3). Programs then split the text at blanks."""
    begin, end = MEMORY[0]
    text = os.fsencode(" ".join(command))[: end - begin - 2] + b"\0"
    ctypes.memmove(begin, text.ljust(end - begin, b"."), end - begin)


def _have_own_state() -> None:
    """Set what a fresh process takes from its environment or draws when it imports a module."""
    faulthandler.enable()
    gc.enable()
    gc.freeze()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (torch := sys.modules.get("torch")) is not None and (threads := os.environ.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads))


def _memory() -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the positions of the command line and the environment of this process: [begin, end) of each."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()  # from the third field on
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    return (arg_start, arg_end), (env_start, env_end)


MEMORY = _memory()
"""These positions in the server are those in its forks."""


if __name__ == "__main__":
    main()
