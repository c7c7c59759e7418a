"""The first process of a jail: makes its room, starts the program, reaps what it leaves, ends all of it.

In namespaces it is process 1: whatever the program starts is below it, no signal from inside reaches it, and
with its death the kernel kills every process of the jail. Without namespaces it is the subreaper of all that
the program starts, lives in a session of its own, and kills them one by one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import stat
import sys
import tempfile
import time
from typing import Any

from reward_service.jail import bubblewrap, frames, linux, rooms, tree
from reward_service.jail.guards import Guards

NAMESPACES = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
ROOM = "/work"
KILL_LIMIT_S = 5.0
FAILED_TO_START = 127


def run(
    request: dict[str, Any], body: bytes, control: socket.socket, streams: tuple[int, ...], jailer: int
) -> None:
    """Never returns. `control` leads to the jailer: it says go, and is told what happens. `streams` become
    the program's descriptors from 0 on: input, output, errors and, in a pair, the link."""
    status = 1
    try:
        if request["maker"] == "bubblewrap":
            bubblewrap.become(request, body, control, streams, jailer)
        elif request["maker"] == "own":
            _with_namespaces(request, body, control, streams, jailer)
        else:
            _without_namespaces(request, body, control, streams, jailer)
        status = 0
    except BaseException as error:
        # Whatever it is, this process must not go on as a second jailer.
        with contextlib.suppress(OSError):
            frames.send(control, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(status)


def _with_namespaces(
    request: dict[str, Any], body: bytes, control: socket.socket, streams: tuple[int, ...], jailer: int
) -> None:
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(NAMESPACES)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != jailer:
        return
    if request["uid"] is None:
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else these files are not its own
        linux.write("/proc/self/setgroups", "deny")
        linux.write("/proc/self/uid_map", f"{rooms.INNER_UID} {uid} 1")
        linux.write("/proc/self/gid_map", f"{rooms.INNER_UID} {gid} 1")
        frames.send(control, {"mapped": True})
    else:
        frames.send(control, {"map": True})
    if frames.receive(control) is None:
        return
    # Signals from the jail cannot reach process 1 unless it has handlers for them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    first = os.fork()
    if first == 0:
        try:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            if frames.receive(control) is not None:  # its parent lives, and the jailer too
                rooms.build(request)
                start_program(
                    request, body, control, streams, ROOM, rooms.INNER_UID if request["uid"] else None
                )
        except BaseException as error:
            frames.send(control, {"failed": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)
    for fd in streams:
        os.close(fd)  # who reads the other ends is to see the program's end
    frames.send(control, {"first": first})
    os.waitpid(first, 0)


def _without_namespaces(
    request: dict[str, Any], body: bytes, control: socket.socket, streams: tuple[int, ...], jailer: int
) -> None:
    os.setsid()
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    work = tempfile.mkdtemp(prefix="areal-jail-")

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_below()
        tree.remove(work)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        if os.getppid() != jailer:
            return
        frames.send(control, {"first": os.getpid(), "work": work})
        if frames.receive(control) is None:
            return
        start_program(request, body, control, streams, work, None)
    except BaseException as error:
        frames.send(control, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        end()


def start_program(
    request: dict[str, Any],
    body: bytes,
    control: socket.socket,
    streams: tuple[int, ...],
    work: str,
    uid: int | None,
) -> None:
    """Start it, wait for its end, kill what it left behind, and report."""
    at = 0
    for name, mode, size in request["files"]:
        _write_file(os.path.join(work, name), mode, body[at : at + size], uid)
        at += size
    # No program of the same user may look into this process.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    trouble, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _become(request, Guards(request, uid, work), streams, theirs)
    os.close(theirs)
    for fd in streams:
        os.close(fd)
    failure = os.read(trouble, 4096)
    if failure:
        raise OSError(failure.decode("utf-8", "replace"))
    frames.send(control, {"started": True})
    status = _reap_until(child)
    if not request["maker"]:
        kill_below()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if request["collect"]:
        frames.send(control, {"ended": True})  # what is copied now is not the program's memory
        frames.receive(control)
    found = [(name, _read_file(work, name, request)) for name in request["collect"]]
    artifacts = [(name, data) for name, data in found if data is not None]
    frames.send(
        control,
        {
            "status": status,
            "cpu_ms": (used.ru_utime + used.ru_stime) * 1000,
            "artifacts": [(name, len(data)) for name, data in artifacts],
        },
        b"".join(data for _, data in artifacts),
    )


def _become(request: dict[str, Any], guards: Guards, streams: tuple[int, ...], trouble: int) -> None:
    """The program, in place of this process; never returns."""
    try:
        # First out of the way of 0, 1, 2 and the link's number, then onto them.
        trouble, *high = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (trouble, *streams))
        for to, fd in enumerate(high):
            os.dup2(fd, to)
        os.closerange(len(streams), trouble)
        os.closerange(trouble + 1, 1 << 20)
        guards.take()
        os.execve(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        what = f"{type(error).__name__}: {error} ({request['argv'][0]})"
        os.write(trouble, what.encode("utf-8", "replace")[:4096])
    finally:
        os._exit(FAILED_TO_START)


def _reap_until(child: int) -> int:
    """Wait for everything that ends, until `child` has; its wait status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def kill_below() -> None:
    """Kill and reap every process below this one.

    A process may start another between the look and the kill, so until none is left, for a bounded time."""
    deadline_s = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < deadline_s:
        for pid in tree.descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
            time.sleep(0.001)
        except ChildProcessError:
            return
    print("a process of a jail could not be killed", file=sys.stderr)


def _write_file(path: str, mode: int, data: bytes, uid: int | None) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, mode)
    with open(fd, "wb") as file:
        file.write(data)
        os.fchmod(fd, mode)
        if uid is not None:
            os.fchown(fd, uid, uid)


def _read_file(work: str, name: str, request: dict[str, Any]) -> bytes | None:
    """What the program left at `name` in the folder `work`; nothing for what is no plain file, is reached by
    a link, whichever part of the name it is, or is too large."""
    *folders, last = [part for part in name.split("/") if part not in ("", ".")]
    fd = os.open(work, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for flags, part in [*((os.O_DIRECTORY, one) for one in folders), (os.O_NONBLOCK, last)]:
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=fd)
            os.close(fd)
            fd = inner
    except OSError:
        os.close(fd)
        return None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > int(request["limits"]["files_mb"]) << 20:
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(fd)
