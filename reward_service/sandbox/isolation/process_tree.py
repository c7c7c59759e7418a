"""The processes below one: their use of the machine, read from /proc, and their end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Sequence

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def read(path: str) -> str:
    """Return the file's text; empty for a process that has exited meanwhile."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def names(path: str) -> list[str]:
    """Return the names in a folder; none for a process that has gone meanwhile."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def _figures(text: str, *keys: str) -> int:
    """Return the sum of the figures called `keys` in a file of /proc."""
    lines = (line.partition(":") for line in text.splitlines())
    return sum(int(rest.split()[0]) for key, _, rest in lines if key in keys)


PIPE_BYTES = 64 << 10
SOCKET_BYTES = 2 * int(read("/proc/sys/net/core/wmem_max") or 212_992)
"""Most that a pipe and the sending side of a socket hold, where the first cannot be enlarged."""
HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


class TreeUsage:
    """Use of the machine by all processes below one."""

    processes = 0  # Threads count, as they do for the kernel's limit
    cpu_ms = 0.0
    private_bytes = 0
    """Private memory with swap and page tables; what processes share since a fork counts for each."""
    mapped_shared_bytes = 0  # Shared memory and files in memory, as far as it is mapped


def children(pid: int) -> list[int]:
    if not HAS_CHILDREN:
        return [other for other in _all() if _parent(other) == pid]
    tasks = names(f"/proc/{pid}/task")
    return [int(word) for task in tasks for word in read(f"/proc/{pid}/task/{task}/children").split()]


def end_children(limit_s: float) -> None:
    """Kill and reap every process below this one, in at most `limit_s`. An orphan falls to this process,
    which must be a subreaper, so killing children again and again reaches all of them."""
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
    """Return whether a process is there and has not ended, waited for or not."""
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
    """Return the use of the descendants of `root`. CPU time includes ended descendants that were waited
    for."""
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
    """Time that the processes below some waited for a processor while the machine did something else."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._looked_s = 0.0
        self._known: dict[str, tuple[list[str], float, float]] = {}
        """Nanoseconds that each thread ran and waited, since when both stand still, its wait so far."""

    def look(self, roots: Sequence[int], now_s: float) -> None:
        """Add the waiting time of a thread below `roots` since the last look, if it is the only thread that
        can run, because several threads may wait for each other. At most the time since the last look is
        added. The kernel counts a wait when it ends; a continuing wait appears as a thread that can run and
        has not run."""
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
    """Return the folder of the only thread below `roots` that can run; empty if there is none or more than
    one."""
    found = ""
    for folder in (f"/proc/{pid}/task" for root in roots for pid in descendants(root)):
        for task in (f"{folder}/{tid}" for tid in names(folder)):
            if read(f"{task}/stat").rpartition(")")[2].split()[:1] == ["R"]:
                if found:
                    return ""
                found = task
    return found


def proportional_bytes(root: int, counted: int) -> int:
    """Private memory of the descendants of `root`, each page counted once however many share it; `counted`
    where the kernel does not tell. Takes longer than `usage`."""
    total = 0
    for pid in descendants(root):
        rollup, status = read(f"/proc/{pid}/smaps_rollup"), read(f"/proc/{pid}/status")
        if "Pss_Anon:" not in rollup and "VmRSS:" in status:
            return counted
        total += _figures(rollup + status, "Pss_Anon", "SwapPss", "VmPTE") << 10
    return min(total, counted)


def channel_bytes(root: int) -> int:
    """Return the largest memory that the sockets and pipes of the descendants of `root` may use."""
    found: set[str] = set()
    for folder in (f"/proc/{pid}/fd" for pid in descendants(root)):
        for name in names(folder):
            with contextlib.suppress(OSError):  # it has closed it meanwhile
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
    """Number of a user's threads on this machine, which the kernel counts for its limit."""
    count = 0
    for pid in _all():
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if os.stat(f"/proc/{pid}").st_uid == uid:
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def remove(folder: str) -> None:
    """Remove `folder` and all its contents at any depth. Contents of inner folders are moved up first. Files
    that cannot be removed stay."""
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
    """(number of files and folders, their bytes) below `path`; stops counting past `most` of them."""
    files = size_bytes = 0
    waiting = [path]
    while waiting and files <= most:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:  # it may have gone meanwhile
            for entry in itertools.islice(entries, most + 1 - files):
                files += 1
                size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return files, size_bytes
