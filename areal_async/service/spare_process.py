"""A spare process: it does the slow imports in advance and then waits to become a service of the run.

Most of the start time of a trainer or a rollout worker is the import of torch and transformers. A spare is a
new program and not a fork, so it inherits no threads. It imports the modules of its arguments and then waits
on a socket. The spare computes nothing, so no native thread runs before the service has set the number of
threads. The socket receives one `Calling` together with descriptors. The message names the module to run, its
arguments and its environment. From then on, the process is that service and has its name in `ps`.

Promises: before it is called, a spare uses nothing of the run. A spare ends when the supervisor ends. If it
cannot become the service, it exits with a status that lets the supervisor restart the service.

    python -P -m areal_async.service.spare_process SOCKET_FD ROOM MODULE… --ready-fd N

ROOM is an argument of blanks, which reserves space in the command line for the name of the service."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

MODULE = "areal_async.service.spare_process"
ROOM_BYTES = 1024  # Space for the command line of the service
READY = b"ready"
CALL_LIMIT_BYTES = 1 << 16
ARG_START, ARG_END = 48, 49  # Fields of /proc/self/stat, from 1: addresses of the command line in memory


class Calling(msgspec.Struct, frozen=True):
    """The service that a spare must become."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    """Environment variables to set."""
    descriptors: list[str] = []
    """Environment variables that get the numbers of the received descriptors, in order. The variables begin
    with the second descriptor, because the first one receives the process's output."""


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
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        ready = sys.argv[sys.argv.index("--ready-fd") :]
        with loading():
            for name in sys.argv[3 : -len(ready)]:
                importlib.import_module(name)
        channel.send(READY)
        data, fds, _, _ = socket.recv_fds(channel, CALL_LIMIT_BYTES, 16)
        if not data:
            os._exit(0)  # the supervisor does not need this spare any more
        calling = msgspec.json.decode(data, type=Calling)
        channel.close()
        output, *others = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        given = {name: str(fd) for name, fd in zip(calling.descriptors, others, strict=True)}
        for fd in others:
            os.set_inheritable(fd, False)
        os.environ.update(calling.environment | given)
        arguments = [*calling.arguments, *ready]
        sys.argv = [calling.module, *arguments]
        show_as([sys.executable, "-P", "-m", calling.module, *arguments])
    except BaseException as error:
        print(f"a spare process ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(os.EX_TEMPFAIL)
    runpy.run_module(calling.module, run_name="__main__", alter_sys=True)


def show_as(command: list[str]) -> None:
    """Set the process's command line. Text beyond the reserved space is cut off."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()  # from the third field on
    begin, end = (int(fields[number - 3]) for number in (ARG_START, ARG_END))
    text = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
