"""A memory control group for one launcher and its jails. No process in the group can exceed its limit.

The launcher enters the group once, at its start, so that its jails begin inside the group. Moving a process
into the group later would take as long as making a jail. To find out whether groups are available, the
launcher makes one and enters it.
"""

from __future__ import annotations

import contextlib
import os
import time

PREFIX = "areal-launcher-"
RESERVE_BYTES = 8 << 20  # room for the first process of a jail and the kernel's data of the jail
LEAVE_LIMIT_S = 1.0
FILES = {
    1: {
        "limits": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        "used": "memory.usage_in_bytes",
        "peak": "memory.max_usage_in_bytes",
        "kills": "memory.oom_control",
        "cache": "cache",
        "unlimited": "-1",
    },
    2: {
        "limits": ("memory.max",),
        "used": "memory.current",
        "peak": "memory.peak",
        "kills": "memory.events",
        "cache": "file",
        "unlimited": "max",
    },
}
"""Names of corresponding files, by the version of control groups."""


class MemoryGroup:
    """The group of one launcher.

    Call `begin(limit)` for each jail, `over()` and `used_bytes()` during its run, and `peak_bytes()` at its
    end.
    """

    def __init__(self, above: str, version: int) -> None:
        """Make the group below `above` and enter it. Raises `OSError` or `ValueError` if that is
        impossible."""
        self._above, self._names = above, FILES[version]
        self._folder = os.path.join(above, f"{PREFIX}{os.getpid()}")
        os.mkdir(self._folder)
        try:
            self._killed = self._kills()
            _write(os.path.join(self._folder, "cgroup.procs"), str(os.getpid()))
            if version == 2:
                _write(os.path.join(self._folder, "memory.swap.max"), "0")
            self._fixed_bytes = 0
            self._peak_fd: int | None = None
            with contextlib.suppress(OSError):  # before Linux 6.12, the file of version 2 is read-only
                self._peak_fd = os.open(self._path("peak"), os.O_RDWR | os.O_CLOEXEC)
            self.begin(1 << 30)
        except BaseException:
            self.leave()
            raise

    def begin(self, limit_bytes: int) -> None:
        """Limit this process and its descendants to `limit_bytes` beyond their present memory. Raises
        `OSError`."""
        used_bytes, files_bytes = self._holds()
        self._fixed_bytes = used_bytes - files_bytes
        self._set_limit(str(self._fixed_bytes + RESERVE_BYTES + limit_bytes))
        self._killed = self._kills()
        if self._peak_fd is not None:
            os.pwrite(self._peak_fd, b"0", 0)

    def _set_limit(self, limit: str) -> None:
        paths = [os.path.join(self._folder, name) for name in self._names["limits"]]
        paths = [path for path in paths if os.path.exists(path)]
        for path in reversed(paths):  # the limit of memory with swap must not be below the limit of memory
            _write(path, str(self._names["unlimited"]))
        for path in paths:
            _write(path, limit)

    def over(self) -> bool:
        """Return whether the kernel has killed a process because of the limit since `begin`."""
        return self._kills() > self._killed

    def used_bytes(self) -> int:
        """Return the growth of memory since `begin`, without cached files of the host."""
        used_bytes, files_bytes = self._holds()
        return max(0, used_bytes - files_bytes - self._fixed_bytes)

    def peak_bytes(self) -> int:
        """Return the largest growth of memory since `begin`, or 0 if the kernel does not report it."""
        if self._peak_fd is None:
            return 0
        _, files_bytes = self._holds()
        return max(0, int(os.pread(self._peak_fd, 64, 0)) - files_bytes - self._fixed_bytes)

    def leave(self) -> None:
        """Return to the parent group and remove this one. If the removal fails, the next launcher tries it
        again."""
        with contextlib.suppress(OSError):
            _write(os.path.join(self._above, "cgroup.procs"), str(os.getpid()))
        deadline_s = time.monotonic() + LEAVE_LIMIT_S
        while time.monotonic() < deadline_s and os.path.exists(self._folder):
            with contextlib.suppress(OSError):  # the kernel still counts an ended process
                os.rmdir(self._folder)
                return
            time.sleep(0.005)

    def _path(self, what: str) -> str:
        return os.path.join(self._folder, str(self._names[what]))

    def _kills(self) -> int:
        words = _read(self._path("kills")).split()
        if "oom_kill" not in words:
            raise ValueError("this kernel does not tell of kills for memory")
        return int(words[words.index("oom_kill") + 1])

    def _holds(self) -> tuple[int, int]:
        """Return all charged bytes, and how many of them are cached files of the host."""
        used_bytes = int(_read(self._path("used")))
        lines = dict(line.split() for line in _read(os.path.join(self._folder, "memory.stat")).splitlines())
        return used_bytes, max(0, int(lines[str(self._names["cache"])]) - int(lines["shmem"]))


def enter() -> MemoryGroup | None:
    """Return a new group with this process in it, or None if this user may not have one."""
    for above, version in places():
        _remove_dead(above)
        with contextlib.suppress(OSError, ValueError, KeyError):
            return MemoryGroup(above, version)
    return None


def places() -> list[tuple[str, int]]:
    """Return the groups in which a new group may be possible, with their version, nearest first.

    In version 2, a group with processes cannot have children with limits, so the new group may have to be
    below an ancestor of the present group. The search ends at the first ancestor with a limit of its own,
    because processes must stay under that limit.
    """
    mounts: dict[int, tuple[str, str]] = {}
    for line in _read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, target = before.split(" ")[3:5]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            mounts[2 if kind == "cgroup2" else 1] = (root.rstrip("/"), target)
    found: list[tuple[str, int]] = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if not controllers else 1
        if version not in mounts or (version == 1 and "memory" not in controllers.split(",")):
            continue
        root, target = mounts[version]
        own = target + path.removeprefix(root).rstrip("/")
        found.append((own, version))
        while version == 2 and own != target and _unlimited(own):
            own = os.path.dirname(own)
            found.append((own, version))
    return found


def _unlimited(folder: str) -> bool:
    try:
        return _read(os.path.join(folder, "memory.max")).strip() == "max"
    except FileNotFoundError:
        return True  # memory is not counted there
    except OSError:
        return False


def _remove_dead(above: str) -> None:
    """Remove the groups of killed launchers. Groups that still have a process stay, because they cannot be
    removed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(above):
            pid = name.removeprefix(PREFIX)
            if pid != name and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(above, name))


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
