"""Linux calls that the standard library of Python 3.11 lacks, as functions that raise OSError."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2

MACHINE = platform.machine()
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(MACHINE)
CAPSET = {"x86_64": 126, "aarch64": 91}.get(MACHINE)
MOUNT_SETATTR = 442
"""Calls added since 2019 have the same number on every architecture."""


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: Any) -> int:
    return _checked(LIBC.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def unshare(flags: int) -> None:
    _checked(LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {source} on {target}")


def umount(target: str, flags: int) -> None:
    _checked(LIBC.umount2(target.encode(), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    if PIVOT_ROOT is None:
        raise OSError(38, f"pivot_root: its number is not known for {MACHINE}")
    syscall(PIVOT_ROOT, new.encode(), old.encode())


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(LIBC.prctl(option, *padded), f"prctl {option}")


def mount_readonly(target: str) -> None:
    """Everything at and below `target`: read-only, no set-user-id bits, no devices."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    wanted = Attributes(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    at_recursive, at_fdcwd = 0x8000, -100
    try:
        syscall(
            MOUNT_SETATTR,
            ctypes.c_int(at_fdcwd),
            target.encode(),
            ctypes.c_uint(at_recursive),
            ctypes.byref(wanted),
            ctypes.c_size_t(ctypes.sizeof(wanted)),
        )
    except OSError:
        # Before Linux 5.12: this mount alone, with the flags that a user namespace may not take off it.
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def bound_capabilities() -> None:
    """Take away what any later program could gain. Does what the caller's rights allow."""
    for number in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            break  # EINVAL past the last one; EPERM where there is no right to, and so nothing to gain
    LIBC.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)


def drop_capabilities() -> None:
    """All that the calling thread has."""
    if CAPSET is not None:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        nothing = (ctypes.c_uint32 * 6)()
        syscall(CAPSET, ctypes.byref(header), ctypes.byref(nothing))


def write(path: str, text: str) -> None:
    """Write to a file that the kernel has made. No module is loaded for it: in a jail they may be out of
    reach."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
