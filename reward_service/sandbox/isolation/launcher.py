"""The process that starts jails. It handles one request at a time: it starts a jail, watches it and answers.

`Sandbox` starts the launcher with an empty environment. The launcher is in the memory group of its jails,
because a process begins in its parent's group at no cost, while moving it to another group later takes 20 ms.
The launcher ends when its client ends, and the launcher's jail ends at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, BinaryIO

from . import bubblewrap, cgroup, messages, process_tree, seccomp
from .init import PR_SET_CHILD_SUBREAPER, prctl
from .monitor import END_LIMIT_S, ClientGone, RunMonitor

START = "import sys; exec(open(int(sys.argv.pop(1)), encoding='utf-8').read())"
"""Code that a jail's interpreter runs first. It runs the source in the descriptor that is its first
argument."""
INIT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "init.py")
FIRST_UIDS = (0x70000000, 0x40000000, 61000)
"""First numbers of user ids that no system assigns. A container may support only the smaller numbers."""
JAIL = "/work"
PER_USER_NAMESPACE = (5, 14)
"""First version of Linux in which each user namespace counts its processes separately."""
PR_SET_PDEATHSIG = 1


class SandboxLauncher:
    """A launcher that serves one client until the client ends."""

    def __init__(self, client: socket.socket, group: cgroup.MemoryGroup | None) -> None:
        self._client = client
        self._group = group
        self._filter: BinaryIO | None = None
        self._no_filter = ""
        with open(INIT, "rb") as source:
            self._init = _in_memory(source.read())
        try:
            self._filter = _in_memory(seccomp.program(grouped=group is not None))
        except OSError as error:
            self._no_filter = str(error)

    def serve(self) -> None:
        while (message := messages.receive(self._client)) is not None:
            request, body = message
            if "end" in request:
                continue  # the run that it should end has already ended
            if "probe" in request:
                offer = {"group": self._group is not None, "no_filter": self._no_filter}
                messages.send(self._client, {**offer, "root": os.geteuid() == 0})
                continue
            try:
                link = socket.recv_fds(self._client, 1, 1)[1] if request["link"] else []
                head, answer = self.run(request, body, link)
            except ClientGone:
                return
            except OSError as error:
                head, answer = {"failed": f"{type(error).__name__}: {error}"}, b""
            messages.send(self._client, head, answer)

    def run(self, request: dict[str, Any], body: bytes, link: list[int]) -> tuple[dict[str, Any], bytes]:
        """Run one program in one jail, once for each input. Raises `OSError`, `ClientGone`.

        `link` is the program's end of the link, if the program is one of a pair.
        """
        base = request["uid_base"]
        request["uid"] = own_uid(base) if base is not None else None
        request["others"] = _others(request)
        with contextlib.ExitStack() as held:
            linked: list[Any] = [held.enter_context(open(fd, "rb", buffering=0)) for fd in link]
            request["work"] = JAIL
            if request["level"] != "isolated":
                request["work"] = tempfile.mkdtemp(prefix="areal-jail-")
                held.callback(process_tree.remove, request["work"])
            ends_at = list(accumulate(request["stdin"], initial=0))
            inputs = [held.enter_context(_in_memory(body[a:b])) for a, b in pairwise(ends_at)]
            files = body[ends_at[-1] :]
            order = held.enter_context(_in_memory(json.dumps(request).encode() + b"\n" + files))
            ends = [os.pipe(), os.pipe()]
            reading = [held.enter_context(open(fd, "rb", buffering=0)) for fd, _ in ends]
            writing = [held.enter_context(open(fd, "wb", buffering=0)) for _, fd in ends]
            control, theirs = map(held.enter_context, socket.socketpair())
            if self._group is not None:
                self._group.begin(int(request["limits"]["memory_mb"]) << 20)
            launcher = os.getpid()
            pid = os.fork()
            if pid == 0:
                streams = [inputs[0].fileno(), *(end.fileno() for end in writing)]
                passed = [theirs.fileno(), order.fileno(), *(end.fileno() for end in inputs[1:])]
                self._become(request, streams, [*passed, *link], launcher)
            for end in (theirs, *writing, *linked):
                end.close()
            out, err = (end.fileno() for end in reading)
            for fd in (out, err):
                os.set_blocking(fd, False)
            monitor = RunMonitor(
                request, pid=pid, control=control, streams=(out, err), client=self._client, group=self._group
            )
            try:
                monitor.watch()
            finally:
                process_tree.end_children(END_LIMIT_S)
            return monitor.answer()

    def _become(
        self, request: dict[str, Any], streams: Sequence[int], passed: list[int], launcher: int
    ) -> None:
        """Turn this process, a fork of the launcher, into the first process of a jail. Never returns."""
        try:
            for to, fd in enumerate(streams):
                os.dup2(fd, to)
            # These processes die first if the machine runs out of memory. A value written by root is a lower
            # bound. Otherwise the program could lower it, but /proc is read-only in a jail.
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            if request["uid"] is not None:
                os.setgroups([])
                os.setresgid(*[request["uid"]] * 3)
                os.setresuid(*[request["uid"]] * 3)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:
                return
            words = []
            if request["level"] == "isolated":
                assert self._filter is not None
                self._filter.seek(0)
                words = bubblewrap.arguments(request, self._filter.fileno())
                os.set_inheritable(self._filter.fileno(), True)
            self._init.seek(0)
            passed = [self._init.fileno(), *passed]
            for fd in passed:
                os.set_inheritable(fd, True)
            words += [request["python"], "-I", "-S", "-c", START, *map(str, passed)]
            os.execve(words[0], words, {})
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(1)


def own_uid(base: int) -> int:
    """Return a user id that only processes in the jails of this launcher use."""
    return base + (os.getpid() if base > 1 << 20 else os.getpid() % 4000)


def _others(request: dict[str, Any]) -> int:
    """Return the number of other processes that the kernel counts against the limit.

    The kernel counts the first process of the jail, or all processes of the user if it counts those of all
    namespaces together.
    """
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if request["level"] == "isolated" and (request["uid"] is not None or release >= PER_USER_NAMESPACE):
        return 1
    return process_tree.threads_of_user(os.geteuid())


def _in_memory(data: bytes) -> BinaryIO:
    """Return the descriptor of a read-only file in memory."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        return open(f"/proc/self/fd/{fd}", "rb", buffering=0)
    finally:
        os.close(fd)


def main() -> None:
    os.umask(0o022)  # a program may be another user and must read the files in its folder
    os.chdir("/")
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    group = cgroup.enter()
    try:
        SandboxLauncher(socket.socket(fileno=int(sys.argv[1])), group).serve()
    finally:
        if group is not None:
            group.leave()
