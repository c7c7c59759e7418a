"""The first process of a jail: lays out files, starts the program, reaps its processes, hands back files.

In a jail of bubblewrap it is process 1: all processes of the program are its descendants, no signal from
inside reaches it, and when it dies the kernel kills every process of the jail. Without a jail (`none`) it
adopts all orphans of the program, until the launcher ends them.

The launcher hands this text to the interpreter in a descriptor, since the program's user need not be able to
read the folder that it lies in. So it imports the standard library only, and of that what loads quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # `typing` takes as long to load as half of the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

STREAMS = 3  # Input, output and errors of this process are those of the program
FAILED_TO_START = 127
STACK_MB = 256  # Address space beside the memory limit, for stacks that are large and mostly not used
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def main() -> None:
    """Never returns. The arguments are descriptors: of the socket to the launcher, which is told what
    happens; of a file with the request, a line of JSON with the files' contents behind it; of the inputs of
    the second run and later ones; and of the program's link, if it has one."""
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
    """Start the program with each input in turn, wait for its end, kill its remaining processes, and report.
    Stop when a run fails."""
    _lay_out(request, body)
    prctl(PR_SET_DUMPABLE, 0)  # no program of the same user may look into this process
    if request["level"] != "isolated":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Signals from the jail cannot reach process 1 unless it has handlers for them.
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
    if request["collect"]:
        _tell(control, {"ended": True})  # what is copied now is not the program's memory
        os.read(control, 1)
    most_bytes = int(request["limits"]["files_mb"]) << 20
    found = [(name, _read_file(request["work"], name, most_bytes)) for name in request["collect"]]
    artifacts = [(name, data) for name, data in found if data is not None]
    report["artifacts"] = [(name, len(data)) for name, data in artifacts]
    _tell(control, report, b"".join(data for _, data in artifacts))


def _run_once(request: dict[str, Any], control: int, stdin: int, link: Sequence[int]) -> dict[str, Any]:
    """One run of the program, until nothing of it is left in a jail: its wait status, its CPU time and how
    long it took, without the time that this process waited for a processor after its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    trouble, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(stdin, 0)
        _become(request, link, theirs)
    for fd in (theirs, stdin, *link):
        os.close(fd)  # who reads the other ends is to see the program's end
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
    return {"status": status, **used_ms, "artifacts": []}


def _lay_out(request: dict[str, Any], body: bytes) -> None:
    at = 0
    for name, mode, size in request["files"]:
        _write_file(os.path.join(request["work"], name), mode, body[at : at + size])
        at += size


def _start_anew(request: dict[str, Any], body: bytes) -> bool:
    """Make the jail as it was before a run that has ended; False where that cannot be done."""
    if request["level"] != "isolated":
        return False  # what the program left may still be running
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
    """Time that a process has waited for a processor; 0 where the kernel does not tell."""
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
    """Turn this process into the program, bound by its limits. Never returns."""
    try:
        # First out of the way of the link's number, then onto it.
        trouble, *high = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (trouble, *link))
        for to, fd in enumerate(high, STREAMS):
            os.dup2(fd, to)
        os.closerange(STREAMS + len(link), trouble)
        os.closerange(trouble + 1, 1 << 20)
        os.setsid()
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                with contextlib.suppress(OSError):  # the C library keeps two for itself
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
        # As at public judges; memory bounds it. Threads that name no size have the C library's default.
        resource.RLIMIT_STACK: (resource.RLIM_INFINITY,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_RTPRIO: (0, 0),
        resource.RLIMIT_SIGPENDING: (64, 64),
    }
    if limits["address_space"]:
        wanted[resource.RLIMIT_AS] = ((int(limits["memory_mb"]) + STACK_MB) << 20,) * 2
    for which, (soft, hard) in wanted.items():
        most = resource.getrlimit(which)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = (most if one == resource.RLIM_INFINITY else min(one, most) for one in (soft, hard))
        resource.setrlimit(which, (soft, hard))


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) < 0:
        raise OSError(f"prctl {option} is refused")


def _wait_for(child: int) -> tuple[int, float]:
    """Return the wait status of `child` and how long it has waited for a processor. All processes that ended
    before it are reaped."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        waited_s = _waited_s(child) if ended is not None and ended.si_pid == child else 0.0
        pid, status = os.waitpid(ended.si_pid if ended is not None else -1, 0)
        if pid == child:
            return status, waited_s


def _write_file(path: str, mode: int, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, mode)
    with open(fd, "wb") as file:
        file.write(data)
        os.fchmod(fd, mode)


def _read_file(work: str, name: str, most_bytes: int) -> bytes | None:
    """Return the file that the program left at `name` in the folder `work`; None if it is no plain file, is
    reached by a link, whichever part of the name it is, or is too large."""
    *folders, last = [part for part in name.split("/") if part not in ("", ".")]
    fd = os.open(work, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for flags, part in [*((os.O_DIRECTORY, one) for one in folders), (os.O_NONBLOCK, last)]:
            inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=fd)
            os.close(fd)
            fd = inner
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > most_bytes:
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
