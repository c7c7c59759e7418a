"""A filter of system calls: what no program that reads, computes and prints has a use for.

It refuses, with EPERM: sockets of every family (a pair of Unix ones remains, without addresses and without
descriptors sent over it); locks, leases and watches on files, since the system folders are the host's; new
namespaces and mounts; looking into other processes; kernel keys, BPF, io_uring, userfaultfd, performance
counters; memory outside the accounts (memfd, System V, pages lent to a pipe, and without a memory group
anonymous memory that is shared); clocks, modules, reboot. `clone3` answers ENOSYS, since its flags lie in
memory that a filter cannot read: the C library then uses `clone`, whose flags are checked. A call by another
architecture's numbers kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from reward_service.jail import linux

# name: (x86_64, aarch64); None where the architecture has no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "flock": (73, 32),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "personality": (135, 92),
}
CLONE, CLONE3, IOCTL, FCNTL, MMAP = (56, 220), (435, 435), (16, 29), (72, 25), (9, 222)
SOCKETPAIR, SENDTO = (53, 199), (44, 206)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
NAMESPACE_FLAGS = 0x7E020000
"""Every CLONE_NEW* that `clone` takes (a time namespace needs `unshare` or `clone3`)."""
AF_UNIX, TIOCSTI, TIOCLINUX = 1, 0x5412, 0x541C
FCNTL_REFUSED = (6, 7, 37, 38, 1024, 1026, 1031)
"""Locks (F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW), F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
X32_BIT = 0x40000000

LOAD, JEQ, JGE, JSET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
NR, ARCH = 0, 4
"""Offsets in `struct seccomp_data`."""


def refuse(number: int) -> int:
    return 0x00050000 | number


def argument(number: int, *, high: bool = False) -> int:
    """Offset of half an argument; both architectures are little-endian."""
    return 16 + 8 * number + 4 * high


def program(machine: str, *, grouped: bool = False) -> bytes | None:
    """The filter as `struct sock_filter[]`; nothing for an architecture whose numbers are not known.
    `grouped`: a memory group counts all memory, so that shared memory need not be refused."""
    if machine not in ARCHITECTURES:
        return None
    column, audit = ARCHITECTURES[machine]
    code: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, ARCH),
        (JEQ, 1, 0, audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NR),
    ]
    if machine == "x86_64":
        code += [(JGE, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += [(JEQ, 0, 1, number), (RETURN, 0, 0, refuse(errno.EPERM))]
    code += [(JEQ, 0, 1, CLONE3[column]), (RETURN, 0, 0, refuse(errno.ENOSYS))]
    refused = (RETURN, 0, 0, refuse(errno.EPERM))
    for call, which, offset, value in (
        (CLONE, JSET, argument(0), NAMESPACE_FLAGS),
        (IOCTL, JEQ, argument(1), TIOCSTI),
        (IOCTL, JEQ, argument(1), TIOCLINUX),
        *((FCNTL, JEQ, argument(1), command) for command in FCNTL_REFUSED),
        (MMAP, JSET, argument(3), MAP_HUGETLB),
        (SENDTO, JSET, argument(4), 0xFFFFFFFF),
        (SENDTO, JSET, argument(4, high=True), 0xFFFFFFFF),
    ):
        code += [
            (JEQ, 0, 4, call[column]),
            (LOAD, 0, 0, offset),
            (which, 0, 1, value),
            refused,
            (LOAD, 0, 0, NR),
        ]
    code += [(JEQ, 0, 4, SOCKETPAIR[column]), (LOAD, 0, 0, argument(0)), (JEQ, 1, 0, AF_UNIX), refused]
    code += [(LOAD, 0, 0, NR)]
    if not grouped:
        code += [(JEQ, 0, 4, MMAP[column]), (LOAD, 0, 0, argument(3)), (JSET, 0, 2, MAP_SHARED)]
        code += [(JSET, 0, 1, MAP_ANONYMOUS), refused]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def install(code: bytes) -> None:
    """Bind the calling process and all it starts. Needs `no_new_privs`. Raises OSError."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    buffer = ctypes.create_string_buffer(code, len(code))
    filled = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    linux.prctl(linux.PR_SET_SECCOMP, linux.SECCOMP_MODE_FILTER, ctypes.addressof(filled))
