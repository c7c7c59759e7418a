"""A process that has finished its imports and waits to become a service of the run.

The start of a trainer or a rollout worker is mostly the import of torch and transformers. A spare is started
by command, not forked, so it inherits no threads. It imports the given modules, computes nothing (so that no
native thread starts before the service sets their number), and then waits on a socket for one `Calling`,
which has the module to run, its arguments, its environment and descriptors. From then on it is that service,
in `ps` too.

Promises: until it is called it has no resources of the run; it ends with the supervisor; if it cannot become
the service, its exit status lets the supervisor start the service again.

    python -P -m areal_async.service.spare_process SOCKET_FD ROOM MODULE… --ready-fd N

ROOM is blank: the place in the command line that the name of the service is written to.
"""

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
ROOM_BYTES = 1024  # For the command line of the service
READY = b"ready"
CALL_LIMIT_BYTES = 1 << 16
ARG_START, ARG_END = 48, 49  # Fields of /proc/self/stat, from 1: where the command line lies in memory


class Calling(msgspec.Struct, frozen=True):
    """The service that a spare is to become."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    """Variables to set."""
    descriptors: list[str] = []
    """Variables that name descriptors. The first descriptor sent with this message takes the output; the
    others belong to these variables, in order."""


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection during imports that stay, and freeze the loaded objects. Collection took a
    fifth of the time in which torch and transformers are imported."""
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
            os._exit(0)  # the supervisor has no use for it any more
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
    """Set the process's command line to this text, cut off if it does not fit."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()  # from the third on
    begin, end = (int(fields[number - 3]) for number in (ARG_START, ARG_END))
    text = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
