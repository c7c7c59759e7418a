"""Functions for the descendants of a process: measure their use of the machine, from /proc, and kill them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Sequence

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def read(path: str) -> str:
    """Return the text of a file, or an empty text if the process that it describes has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def names(path: str) -> list[str]:
    """Return the names in a folder, or an empty list if the process that it describes has ended."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def _figures(text: str, *keys: str) -> int:
    """Return the sum of the figures named `keys` in a file of /proc."""
    lines = (line.partition(":") for line in text.splitlines())
    return sum(int(rest.split()[0]) for key, _, rest in lines if key in keys)


PIPE_BYTES = 64 << 10
SOCKET_BYTES = 2 * int(read("/proc/sys/net/core/wmem_max") or 212_992)
"""Largest capacity of a pipe and of a socket's sending side, if pipes cannot be enlarged."""
HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


class TreeUsage:
    """Use of the machine by all descendants of a process."""

    processes = 0  # threads count, as in the kernel's limit
    cpu_ms = 0.0
    private_bytes = 0
    """Private memory with swap and page tables. Memory shared since a fork counts once per process."""
    mapped_shared_bytes = 0  # mapped shared memory and files in memory


def children(pid: int) -> list[int]:
    if not HAS_CHILDREN:
        return [other for other in _all() if _parent(other) == pid]
    tasks = names(f"/proc/{pid}/task")
    return [int(word) for task in tasks for word in read(f"/proc/{pid}/task/{task}/children").split()]


def end_children(limit_s: float) -> None:
    """Kill and reap every descendant of this process, in at most `limit_s`.

    This process must be a subreaper. It adopts orphans, so killing its children repeatedly reaches all
    descendants.
    """
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
        except ChildProcessError:
            return
        time.sleep(0.001)


def alive(pid: int) -> bool:
    """Return whether a process exists and is running. A process that has ended but is not reaped does not
    count."""
    state = read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    return state not in ([], ["Z"], ["X"])


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def usage(root: int) -> TreeUsage:
    """Return the use by the descendants of `root`. CPU time includes processes that have ended and were
    reaped."""
    total = TreeUsage()
    total.cpu_ms = _cpu_ms(root, own=False)
    for pid in descendants(root):
        total.cpu_ms += _cpu_ms(pid, own=True)
        status = read(f"/proc/{pid}/status")
        total.private_bytes += _figures(status, "RssAnon", "VmSwap", "VmPTE") << 10
        total.mapped_shared_bytes += _figures(status, "RssShmem") << 10
        total.processes += _figures(status, "Threads")
    return total


class WaitMeter:
    """A meter of the time that processes waited for a processor while the machine did other work."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._looked_s = 0.0
        self._known: dict[str, tuple[list[str], float, float]] = {}
        """Three values for each thread: its nanoseconds of running and of waiting as the kernel reports them,
        the time when either of them last changed, and the seconds that the thread has waited so far."""

    def look(self, roots: Sequence[int], now_s: float) -> None:
        """Add the new waiting time of a thread below `roots`, if it is the only one that can run.

        If several threads are runnable, nothing is added, because they may be waiting for each other. The
        added time is at most the time since the last call. The kernel counts a wait only at its end, so a
        runnable thread whose figures do not change is treated as waiting.
        """
        most_s, self._looked_s = now_s - self._looked_s, now_s
        task = lone_runnable(roots)
        seen = read(f"{task}/schedstat").split()[:2] if task else []
        if len(seen) < 2:
            return
        before, since_s, counted_s = self._known.get(task, ([], now_s, 0.0))
        since_s = since_s if seen == before else now_s
        waited_s = int(seen[1]) / 1e9 + now_s - since_s
        if before:
            self.waited_s += min(waited_s - counted_s, most_s)
        self._known[task] = (seen, since_s, waited_s)


def lone_runnable(roots: Sequence[int]) -> str:
    """Return the folder of the only runnable thread below `roots`, or an empty text."""
    found = ""
    for folder in (f"/proc/{pid}/task" for root in roots for pid in descendants(root)):
        for task in (f"{folder}/{tid}" for tid in names(folder)):
            if read(f"{task}/stat").rpartition(")")[2].split()[:1] == ["R"]:
                if found:
                    return ""
                found = task
    return found


def proportional_bytes(root: int, counted: int) -> int:
    """Return the private memory of the descendants of `root`. Pages that they have shared since a fork count
    once.

    Returns `counted` if the kernel does not report this memory. This function is slower than `usage`.
    """
    total = 0
    for pid in descendants(root):
        rollup, status = read(f"/proc/{pid}/smaps_rollup"), read(f"/proc/{pid}/status")
        if "Pss_Anon:" not in rollup and "VmRSS:" in status:
            return counted
        total += _figures(rollup + status, "Pss_Anon", "SwapPss", "VmPTE") << 10
    return min(total, counted)


def channel_bytes(root: int) -> int:
    """Return an upper limit of the data in the sockets and pipes of the descendants of `root`."""
    found: set[str] = set()
    for folder in (f"/proc/{pid}/fd" for pid in descendants(root)):
        for name in names(folder):
            with contextlib.suppress(OSError):  # it has been closed in the meantime
                found.add(os.readlink(f"{folder}/{name}"))
    sizes = {"socket": SOCKET_BYTES, "pipe": PIPE_BYTES}
    return sum(sizes.get(name.partition(":")[0], 0) for name in found)


def _cpu_ms(pid: int, *, own: bool) -> float:
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 15:
        return 0.0
    user, system, waited_user, waited_system = (int(field) for field in fields[11:15])
    return (waited_user + waited_system + own * (user + system)) * TICK_MS


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def threads_of_user(uid: int) -> int:
    """Return the number of a user's threads on this machine. The kernel counts threads, not processes, for
    the limit of processes."""
    count = 0
    for pid in _all():
        with contextlib.suppress(OSError):  # it has ended in the meantime
            if os.stat(f"/proc/{pid}").st_uid == uid:
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def remove(folder: str) -> None:
    """Remove `folder` with all its content, at any depth. Deeply nested content is moved up before it is
    removed.

    Files that cannot be removed stay.
    """
    moved, prefix = 0, f".{os.urandom(8).hex()}"
    progress = True
    while progress:
        progress = False
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(folder)):
                try:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                    else:
                        os.chmod(entry.path, 0o700)
                        for inner in list(os.scandir(entry.path)):
                            moved += 1
                            os.rename(inner.path, os.path.join(folder, f"{prefix}-{moved}"))
                        os.rmdir(entry.path)
                    progress = True
                except OSError:
                    continue
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def folder_usage(path: str, most: int) -> tuple[int, int]:
    """Return the number of files and folders below `path`, and their bytes. Counting stops once there are
    more than `most` files and folders."""
    files = size_bytes = 0
    waiting = [path]
    while waiting and files <= most:
        with (
            contextlib.suppress(OSError),
            os.scandir(waiting.pop()) as entries,
        ):  # it may have been removed in the meantime
            for entry in itertools.islice(entries, most + 1 - files):
                files += 1
                size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return files, size_bytes
