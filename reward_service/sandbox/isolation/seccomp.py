"""A filter of system calls. It forbids the calls that a program does not need to read, compute and print.

These calls fail with EPERM:
- sockets of every family; only a pair of Unix sockets without addresses and without sent descriptors is
  allowed
- locks, leases and watches on files, because the system folders are the host's
- new namespaces and mounts, and inspection of other processes
- kernel keys, BPF, io_uring, userfaultfd, performance counters
- memory that is not counted for a process: memfd, System V, pages lent to a pipe, and, without a memory
  group, anonymous shared memory
- priorities and processor affinity, because a program could use them to wait longer for a processor, and such
  waits are not charged
- limits of other processes, clocks, modules, reboot

`clone3` fails with ENOSYS, because its flags are in memory that a filter cannot read. The C library then uses
`clone`, whose flags are checked. A call with another architecture's numbers kills the process.

libseccomp knows the numbers of each architecture and compiles the filter. bubblewrap loads it.
"""

from __future__ import annotations

import ctypes
import errno
import os

LIBRARY = "libseccomp.so.2"
_NAMES = """
socket connect bind listen sendmsg sendmmsg flock inotify_init inotify_init1 vmsplice io_setup ptrace
process_vm_readv process_vm_writev pidfd_getfd kcmp process_madvise mount umount2 pivot_root chroot move_mount
open_tree fsopen fsconfig fsmount fspick mount_setattr setns unshare bpf perf_event_open userfaultfd add_key
request_key keyctl io_uring_setup io_uring_enter io_uring_register kexec_load kexec_file_load init_module
finit_module delete_module reboot swapon swapoff acct quotactl quotactl_fd name_to_handle_at open_by_handle_at
fanotify_init memfd_create memfd_secret shmget shmat semget msgget mq_open clock_settime settimeofday adjtimex
clock_adjtime sethostname setdomainname syslog iopl ioperm modify_ldt vhangup personality
setpriority ioprio_set sched_setscheduler sched_setparam sched_setattr sched_setaffinity
"""
REFUSED = _NAMES.split()
NEWER = {"process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447}
"""Numbers of calls that an older libseccomp does not know by name.

One number is enough, because calls added since 2019 have the same number on every architecture.
"""
NAMESPACE_FLAGS = (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)
"""All CLONE_NEW* flags of `clone`. A time namespace can only be made with `unshare` or `clone3`."""
AF_UNIX, TIOCSTI, TIOCLINUX = 1, 0x5412, 0x541C
FCNTL_REFUSED = (6, 7, 37, 38, 1024, 1026, 1031)
"""Forbidden commands of `fcntl`: locks (F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW), F_SETLEASE, F_NOTIFY,
F_SETPIPE_SZ."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
BAD_ARCHITECTURE = 2
DIFFERS, MASKED = 1, 7
"""Comparisons: the argument differs from the value, or its bits under a mask equal the value."""
WORD = 0xFFFFFFFF  # bits of an argument that the kernel reads as an `int`; it ignores higher bits


class Condition(ctypes.Structure):
    """One condition of a rule: `struct scmp_arg_cmp`."""

    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


def program(*, grouped: bool, machine: int | None = None) -> bytes:
    """Return the filter as `struct sock_filter[]`, for this machine or the architecture `machine`
    (AUDIT_ARCH_*).

    `grouped` means that a memory group counts all memory. Only then is anonymous shared memory allowed.
    Raises `OSError` if libseccomp is missing or cannot make the filter.
    """
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))

    def checked(result: int, what: str) -> None:
        if result < 0:
            raise OSError(-result, f"libseccomp: {what}: {os.strerror(-result)}")

    def refuse(name: str, *conditions: Condition, error: int = errno.EPERM) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        number = NEWER.get(name, number) if number == -1 else number
        action, array = ctypes.c_uint32(ERRNO | error), (Condition * len(conditions))(*conditions)
        checked(library.seccomp_rule_add_array(context, action, number, len(conditions), array), name)

    try:
        checked(library.seccomp_attr_set(context, BAD_ARCHITECTURE, ctypes.c_uint32(KILL)), "architecture")
        if machine is not None:
            checked(library.seccomp_arch_remove(context, ctypes.c_uint32(0)), "architecture")
            checked(library.seccomp_arch_add(context, ctypes.c_uint32(machine)), "architecture")
        for name in REFUSED:
            refuse(name)
        refuse("clone3", error=errno.ENOSYS)
        for flag in NAMESPACE_FLAGS:
            refuse("clone", Condition(0, MASKED, flag, flag))
        for command in (TIOCSTI, TIOCLINUX):
            refuse("ioctl", Condition(1, MASKED, WORD, command))
        for command in FCNTL_REFUSED:
            refuse("fcntl", Condition(1, MASKED, WORD, command))
        refuse("mmap", Condition(3, MASKED, MAP_HUGETLB, MAP_HUGETLB))
        refuse("prlimit64", Condition(0, DIFFERS, 0, 0))
        if not grouped:
            shared = MAP_SHARED | MAP_ANONYMOUS
            refuse("mmap", Condition(3, MASKED, shared, shared))
        refuse("sendto", Condition(4, DIFFERS, 0, 0))
        refuse("socketpair", Condition(0, DIFFERS, AF_UNIX, 0))
        with open(os.memfd_create("filter", os.MFD_CLOEXEC), "rb") as file:
            checked(library.seccomp_export_bpf(context, file.fileno()), "export")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
