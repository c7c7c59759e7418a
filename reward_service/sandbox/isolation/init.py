"""The first process of a jail: it writes files, starts the program, and reaps its children.

In a jail of bubblewrap this process is process 1. All processes of the program are its descendants, no signal
from inside reaches it, and the kernel kills all of them when process 1 dies. Without a jail (`none`), this
process adopts all orphans of the program until the launcher kills them.

The launcher passes the source of this module to the interpreter through a descriptor, because the user of the
program may be unable to read the folder of the module. The module therefore imports only modules of the
standard library, and only ones that load quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import struct
import sys
import time

TYPE_CHECKING = False  # importing `typing` takes as long as half of the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

STREAMS = 3  # input, output and errors of this process are the program's
FAILED_TO_START = 127
STACK_MB = 256  # address space beside the memory limit, for large and mostly unused stacks
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def main() -> None:
    """Run the jail. Never returns. All arguments are descriptors.

    The first is the socket to the launcher for reports. The second is a file with the request: a JSON line,
    then the contents of files. The next ones are the inputs of the second and later runs. The last is the
    program's link, if it has one.
    """
    control, order, *others = map(int, sys.argv[1:])
    try:
        with open(order, "rb") as file:
            head, _, body = file.read().partition(b"\n")
        request = json.loads(head)
        more = len(request["stdin"]) - 1
        run(request, body, control, [0, *others[:more]], others[more:])
    except BaseException as error:
        _tell(control, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def run(
    request: dict[str, Any], body: bytes, control: int, inputs: Sequence[int], link: Sequence[int]
) -> None:
    """Start the program with each input in turn, wait for its end, kill its remaining processes and report.

    Stops after the first failed run.
    """
    _lay_out(request, body)
    prctl(PR_SET_DUMPABLE, 0)  # no program of the same user may inspect this process
    if request["level"] != "isolated":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Signals from the jail cannot reach process 1 without a handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for stdin in inputs:
        report = _run_once(request, control, stdin, link)
        if stdin == inputs[-1]:
            break
        report["more"] = report["status"] == 0 and _start_anew(request, body)
        _tell(control, report)
        if not report["more"]:
            return
        os.read(control, 1)
    _tell(control, report)


def _run_once(request: dict[str, Any], control: int, stdin: int, link: Sequence[int]) -> dict[str, Any]:
    """Run the program once. In a jail, return only when none of its processes is left.

    Return the program's wait status, its CPU time and its duration. The duration excludes the time that this
    process waited for a processor after the program's end.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    trouble, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(stdin, 0)
        _become(request, link, theirs)
    for fd in (theirs, stdin, *link):
        os.close(fd)  # readers of the other ends must see the program's end
    failure = os.read(trouble, 4096)
    os.close(trouble)
    if failure:
        raise OSError(failure.decode("utf-8", "replace"))
    _tell(control, {"started": True})
    began_s = time.monotonic() - _waited_s()
    status, waited_s = _wait_for(child)
    if request["level"] == "isolated":
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    ran_ms = (time.monotonic() - _waited_s() - began_s) * 1000
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    used_ms = {"cpu_ms": cpu_s * 1000, "ran_ms": ran_ms, "waited_ms": waited_s * 1000}
    return {"status": status, **used_ms}


def _lay_out(request: dict[str, Any], body: bytes) -> None:
    at = 0
    for name, size in request["files"]:
        _write_file(os.path.join(request["work"], name), body[at : at + size])
        at += size


def _start_anew(request: dict[str, Any], body: bytes) -> bool:
    """Reset the jail after a finished run. Return False if that is impossible."""
    if request["level"] != "isolated":
        return False  # processes of the program may still be running
    try:
        for fd in range(1, STREAMS):
            os.set_blocking(fd, True)
        os.chmod(request["work"], 0o755)
        for folder, folders, files in os.walk(request["work"]):
            for path in (os.path.join(folder, name) for name in files + folders):
                if os.path.isdir(path) and not os.path.islink(path):
                    os.chmod(path, 0o755)
                else:
                    os.unlink(path)
        for folder, _, _ in os.walk(request["work"], topdown=False):
            if folder not in (request["work"], os.path.join(request["work"], ".tmp")):
                os.rmdir(folder)
        _lay_out(request, body)
    except (OSError, RecursionError):
        return False
    return True


def _waited_s(pid: int | str = "self") -> float:
    """Return the time that a process has waited for a processor, or 0 if the kernel does not report it."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _tell(control: int, head: dict[str, Any], body: bytes = b"") -> None:
    """Send a message as `messages.send` does."""
    encoded = json.dumps(head).encode()
    left = memoryview(struct.pack("<IQ", len(encoded), len(body)) + encoded + body)
    while left:
        left = left[os.write(control, left) :]


def _become(request: dict[str, Any], link: Sequence[int], trouble: int) -> None:
    """Turn this process into the program, with its limits. Never returns."""
    try:
        # Move the descriptors above the link's number first, then to their places.
        trouble, *high = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (trouble, *link))
        for to, fd in enumerate(high, STREAMS):
            os.dup2(fd, to)
        os.closerange(STREAMS + len(link), trouble)
        os.closerange(trouble + 1, 1 << 20)
        os.setsid()
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                with contextlib.suppress(OSError):  # the C library reserves two for itself
                    signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.umask(0o022)
        os.chdir(request["work"])
        _limit(request["limits"], request["others"])
        os.execve(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        what = f"{type(error).__name__}: {error} ({request['argv'][0]})"
        os.write(trouble, what.encode("utf-8", "replace")[:4096])
    finally:
        os._exit(FAILED_TO_START)


def _limit(limits: dict[str, Any], others: int) -> None:
    cpu_s = int(limits["cpu_s"]) + 1
    wanted = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_FSIZE: (int(limits["files_mb"]) << 20,) * 2,
        resource.RLIMIT_NOFILE: (int(limits["open_files"]),) * 2,
        resource.RLIMIT_NPROC: (int(limits["processes"]) + others,) * 2,
        # The stack is unlimited as at public judges, and the memory limit bounds it. Threads without a stack
        # size use the C library's default.
        resource.RLIMIT_STACK: (resource.RLIM_INFINITY,) * 2,
        resource.RLIMIT_AS: ((int(limits["memory_mb"]) + STACK_MB) << 20,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_RTPRIO: (0, 0),
        resource.RLIMIT_SIGPENDING: (64, 64),
    }
    for which, (soft, hard) in wanted.items():
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = (most if one == resource.RLIM_INFINITY else min(one, most) for one in (soft, hard))
        resource.setrlimit(which, (soft, hard))


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) < 0:
        raise OSError(f"prctl {option} is refused")


def _wait_for(child: int) -> tuple[int, float]:
    """Reap processes until `child` ends. Return the wait status of `child`, and the time that `child` waited
    for a processor."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        waited_s = _waited_s(child) if ended is not None and ended.si_pid == child else 0.0
        pid, status = os.waitpid(ended.si_pid if ended is not None else -1, 0)
        if pid == child:
            return status, waited_s


def _write_file(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
    with open(fd, "wb") as file:
        file.write(data)
        os.fchmod(fd, 0o644)


if __name__ == "__main__":
    main()
