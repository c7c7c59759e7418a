"""What programs have got out of a sandbox by, or might: each tries, and says ESCAPED where it got further."""

import fcntl
import os
import socket
import tempfile
import time

import pytest

from reward_service.sandbox import Program, RunLimits
from tests.waiting import LIMIT_S

LIMITS = RunLimits(wall_s=30, cpu_s=20, memory_mb=128, processes=16)
X86 = os.uname().machine == "x86_64"

# --- ways to the host -----------------------------------------------------------------------------------


def test_no_socket_of_any_family_can_be_had(attempt):
    attempt(
        "for family in range(64):\n"
        "    for kind in (1, 2, 3, 5):\n"
        "        for protocol in (0, 1, 6, 16, 17):\n"
        "            tried((family, kind), socket.socket, family, kind, protocol)\n"
        "    if family != socket.AF_UNIX:\n"
        "        tried(('pair', family), socket.socketpair, family)"
    )


def test_no_server_of_the_host_is_reached_by_a_path_or_a_name(attempt):
    """A Redis of the job listens on a path, others on abstract names: with a pair's end one could connect."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as by_path:
        os.chmod(folder, 0o755)
        by_path.bind(f"{folder}/redis.sock")
        os.chmod(f"{folder}/redis.sock", 0o777)
        by_path.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_name:
            by_name.bind(f"\0areal-test-{os.getpid()}")
            by_name.setblocking(False)
            attempt(
                f"places = ['{folder}/redis.sock', '\\0areal-test-{os.getpid()}']\n"
                "for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n"
                "    for place in places:\n"
                "        end = socket.socketpair(socket.AF_UNIX, kind)[0]\n"
                "        tried('connect', end.connect, place)\n"
                "        tried('bind', end.bind, '\\0mine')\n"
                "        tried('bind', end.bind, 'mine')\n"
                "        tried('sendto', end.sendto, b'SET', place)\n"
                "        tried('sendmsg', end.sendmsg, [b'SET'], [], 0, place)\n"
                "try:\n    listed = open('/proc/self/net/unix').read()\n"
                "except OSError:\n    listed = ''\n"
                f"if '{folder}' in listed or 'areal-test' in listed: print('ESCAPED', listed)"
            )
            with pytest.raises(BlockingIOError):
                by_name.recv(1)
            by_path.setblocking(False)
            with pytest.raises(BlockingIOError):
                by_path.accept()


def test_no_file_of_the_host_can_be_locked_watched_or_changed(attempt):
    """The system folders are the host's: `sh` is read in every jail."""
    attempt(
        "fd = os.open('/bin/sh', os.O_RDONLY)\n"
        "tried('flock', fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "tried('flock', fcntl.flock, fd, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
        "tried('lockf', fcntl.lockf, fd, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
        "import struct\n"
        "lock = struct.pack('hhqqi', 0, 0, 0, 0, 0)\n"
        "for command in (6, 7, 37, 38):\n    tried(command, fcntl.fcntl, fd, command, lock)\n"
        "tried('lease', fcntl.fcntl, fd, 1024, 0)\n"
        "tried('notify', fcntl.fcntl, os.open('/usr/bin', os.O_RDONLY), 1026, 1)\n"
        "if libc.inotify_init1(0) >= 0: print('ESCAPED inotify')\n"
        "tried('write', os.open, '/bin/sh', os.O_WRONLY)\n"
        "tried('chmod', os.chmod, '/bin/sh', 0o777)\n"
        "tried('utime', os.utime, '/bin/sh')\n"
        "tried('xattr', os.setxattr, '/bin/sh', 'user.x', b'1')\n"
        "tried('link', os.link, '/bin/sh', '/work/sh')\n"
        "tried('rename', os.rename, '/usr/bin', '/usr/bon')"
    )
    with open("/bin/sh", "rb") as file:  # and it is not locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


LINKS = "import os\nos.mkdir('d')\nopen('d/f', 'w').write('mine')\nos.symlink('d', 'e')\n"


def test_no_link_is_followed_to_what_is_brought_back(every_sandbox, tmp_path):
    secret = tmp_path
    (secret / "shadow").write_text("do-not-tell")
    source = LINKS + (
        f"os.symlink({str(secret)!r}, 'out')\nos.symlink('/proc/1', 'one')\n"
        "os.symlink('/proc/self/root', 'root')\n"
        f"os.symlink({str(secret)!r}, 'd/deep')\nos.symlink('/etc', 'etc')\n"
    )
    wanted = ("out/shadow", "e/f", "d/deep/shadow", "one/environ", "root/etc/passwd", "etc/passwd", "d/f")
    outcome = every_sandbox.run(Program(source=source, collect=wanted, limits=LIMITS))
    assert outcome.ok, outcome.describe()
    assert outcome.artifacts == {"d/f": b"mine"}


def test_deep_folders_are_removed_with_the_run(every_sandbox):
    before = set(os.listdir(tempfile.gettempdir()))
    source = (
        "import os\nos.mkdir('shut', 0o000)\n"
        "try:\n    for _ in range(400):\n        os.mkdir('d' * 99)\n        os.chdir('d' * 99)\n"
        "except OSError:\n    pass"
    )
    outcome = every_sandbox.run(Program(source=source, limits=LIMITS))
    assert outcome.ok, outcome.describe()
    left = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("areal-jail-")} - before
    deadline_s = time.monotonic() + LIMIT_S  # others' runs on this machine have such folders for a while
    while left := left & set(os.listdir(tempfile.gettempdir())):
        assert time.monotonic() < deadline_s, left


def test_nothing_but_plain_files_is_brought_back_and_nobody_waits_for_a_pipe(every_sandbox):
    source = "import os\nos.mkfifo('pipe')\nopen('large', 'wb').truncate(40 << 20)\nos.mkdir('folder')"
    limits = RunLimits(wall_s=30, files_mb=64)
    outcome = every_sandbox.run(Program(source=source, collect=("pipe", "folder", "folder/x"), limits=limits))
    assert (outcome.kind, outcome.artifacts) == ("ok", {})


# --- the kernel's wide doors ----------------------------------------------------------------------------

CALLS = {
    "ptrace": (101, 0, 0, 0, 0), "process_vm_readv": (310, 1, 0, 0, 0, 0, 0), "bpf": (321, 5, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0), "userfaultfd": (323, 0), "io_uring_setup": (425, 1, 0),
    "io_setup": (206, 1, 0), "add_key": (248, 0, 0, 0, 0, -2), "keyctl": (250, 0, -3, 1),
    "memfd_create": (319, 0, 0), "memfd_secret": (447, 0), "shmget": (29, 0, 4096, 0o1600),
    "semget": (64, 0, 1, 0o1600), "msgget": (68, 0, 0o1600), "unshare user": (272, 0x10000000),
    "unshare net": (272, 0x40000000), "clone3": (435, 0, 0), "clone user": (56, 0x10000011, 0, 0, 0, 0),
    "setns": (308, 0, 0), "chroot": (161, 0), "mount": (165, 0, 0, 0, 0, 0), "umount2": (166, 0, 2),
    "open_tree": (428, -100, 0, 1), "fsopen": (430, 0, 0), "fanotify_init": (300, 0, 0),
    "open_by_handle_at": (304, -100, 0, 0), "name_to_handle_at": (303, -100, 0, 0, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0), "init_module": (175, 0, 0, 0),
    "reboot": (169, 0xFEE1DEAD - (1 << 32), 672274793, 0, 0), "swapon": (167, 0, 0),
    "settimeofday": (164, 0, 0), "sethostname": (170, 0, 0), "iopl": (172, 3), "modify_ldt": (154, 0, 0, 0),
    "personality": (135, 0x0040000), "pidfd_getfd": (438, 0, 0, 0), "kcmp": (312, 1, 1, 0, 0, 0),
    "syslog": (103, 10, 0, 0), "quotactl": (179, 0, 0, 0, 0), "acct": (163, 0),
    "vmsplice": (278, 1, 0, 0, 0),
}  # fmt: skip


@pytest.mark.skipif(not X86, reason="the numbers are those of x86-64")
def test_the_calls_with_a_history_of_holes_are_refused(attempt):
    """By EPERM of the filter, whatever their arguments: other errors would say that the kernel looked."""
    source = (
        f"calls = {CALLS!r}\n"
        "for name, (number, *arguments) in calls.items():\n"
        "    ctypes.set_errno(0)\n"
        "    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(one) for one in arguments])\n"
        "    if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):\n"
        "        print('ESCAPED', name, result, ctypes.get_errno())"
    )
    attempt(source)


def test_a_filter_cannot_be_walked_around(attempt):
    """By 32-bit numbers, by the x32 ones, by a filter of one's own that allows."""
    if not X86:
        pytest.skip("the numbers are those of x86-64")
    assert attempt("refused('x32', 0x40000000 + 41, 1, 1, 0)", ok=False).kind == "signal"
    source = (
        "libc.prctl(22, 2, 0)\n"
        "tried('socket', socket.socket)\n"
        "if libc.prctl(38, 0, 0, 0, 0) == 0: print('ESCAPED no_new_privs')"
    )
    attempt(source)


ATTEMPTS = {
    "a program run from memory": (
        "fd = libc.memfd_create(b'x', 0)\nif fd >= 0: print('ESCAPED')\n"
        "open('copy', 'wb').write(open('/bin/sh', 'rb').read())\nos.chmod('copy', 0o4755)\n"
        "out = os.popen('./copy -c \"id -u; id -g\"').read()\nif '0\\n' == out[:2]: print('ESCAPED', out)"
    ),
    "programs with the bit to become another user": (
        "import glob, stat\n"
        "for path in glob.glob('/usr/bin/*') + glob.glob('/usr/sbin/*'):\n"
        "    if os.path.exists(path) and os.stat(path).st_mode & stat.S_ISUID:\n"
        "        if not os.statvfs(path).f_flag & os.ST_NOSUID: print('ESCAPED', path)\n"
        "if os.path.exists('/usr/bin/su'): os.system('su -c \"echo ESCAPED\" </dev/null 2>/dev/null')"
    ),
    "to be root": (
        "for call in (os.setuid, os.setgid, os.seteuid):\n    tried(call.__name__, call, 0)\n"
        "tried('setgroups', os.setgroups, [0])\n"
        "status = open('/proc/self/status').read()\n"
        "for line in status.splitlines():\n"
        "    if line.startswith(('CapEff', 'CapPrm', 'CapBnd', 'CapAmb')) and int(line.split()[1], 16): "
        "print('ESCAPED', line)"
    ),
    "the memory of others": (
        "for pid in [1, os.getppid(), *range(2, 40)]:\n"
        "    if pid == os.getpid(): continue\n"
        "    for name in ('mem', 'environ', 'maps', 'fd/0', 'root', 'cwd'):\n"
        "        tried((pid, name), lambda: os.stat(f'/proc/{pid}/{name}') if '/' in name or name in "
        "('root', 'cwd') else open(f'/proc/{pid}/{name}', 'rb').read(1))"
    ),
    "one's own memory by a file": (
        "tried('mem', lambda: open('/proc/self/mem', 'r+b'))\n"
        "for name in ('clear_refs', 'coredump_filter', 'uid_map', 'setgroups', 'attr/current', 'comm'):\n"
        "    tried(name, lambda: open(f'/proc/self/{name}', 'w'))"
    ),
    "the kernel's switches": (
        "for path in ('/proc/sysrq-trigger', '/proc/sys/kernel/core_pattern', '/proc/sys/vm/drop_caches',\n"
        "             '/proc/sys/kernel/hostname', '/proc/sys/net/core/somaxconn',\n"
        "             '/proc/sys/user/max_user_namespaces'):\n"
        "    tried(path, lambda: open(path, 'w').write('1'))\n"
        "for path in ('/sys', '/proc/kcore', '/proc/kmsg', '/proc/kpagecount', '/dev/mem', '/dev/kmsg',\n"
        "             '/dev/fuse', '/dev/kvm', '/dev/net/tun', '/dev/ptmx', '/dev/tty', '/run'):\n"
        "    tried(path, lambda: os.listdir(path)[0] if os.path.isdir(path) else os.open(path, os.O_RDWR))"
    ),
    "mounts": (
        "if libc.mount(b'proc', b'/work', b'proc', 0, None) == 0: print('ESCAPED')\n"
        "if libc.mount(b'/', b'/work', None, 4096, None) == 0: print('ESCAPED')\n"
        "if libc.mount(None, b'/usr', None, 4096 | 32, None) == 0: print('ESCAPED')\n"
        "if libc.umount2(b'/proc', 2) == 0: print('ESCAPED')"
    ),
    "a way up out of the root": (
        "os.chdir('/')\nfor _ in range(9): os.chdir('..')\n"
        "seen = set(os.listdir('.'))\n"
        "if seen & {'home', 'var', 'run', 'sys', '.old'}: print('ESCAPED', seen)\n"
        "tried('root', os.listdir, '/proc/1/root')\ntried('fd', os.listdir, '/proc/1/fd')"
    ),
    "terminals": (
        "tried('tty', os.open, '/dev/tty', os.O_RDWR)\ntried('pty', os.openpty)\n"
        "tried('push', fcntl.ioctl, 0, 0x5412, b'x')"
    ),
    "a core": (
        "import resource\ntried('limit', resource.setrlimit, resource.RLIMIT_CORE, (1 << 20, 1 << 20))\n"
        "if os.fork() == 0: os.abort()\nos.wait()\n"
        "if [n for n in os.listdir('.') if 'core' in n]: print('ESCAPED')"
    ),
    "higher limits": (
        "import resource\n"
        "for name in ('AS', 'NPROC', 'NOFILE', 'FSIZE', 'CPU', 'MEMLOCK'):\n"
        "    which = getattr(resource, f'RLIMIT_{name}')\n"
        "    soft, hard = resource.getrlimit(which)\n"
        "    tried(name, resource.setrlimit, which, (hard + 1, hard + 1))\n"
        "tried('nice', os.nice, -5)\n"
        "tried('fifo', os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(9))"
    ),
    "descriptors that were left open": ("for fd in range(3, 1 << 10):\n    tried(fd, os.fstat, fd)"),
    "files in the system's folders": (
        "for root in ('/', '/usr', '/etc', '/dev', '/proc', '/bin', '/lib', '/var'):\n"
        "    tried(root, lambda: open(f'{root}/areal-was-here', 'w'))\n"
        "tried('node', os.mknod, 'disk', 0o60600, os.makedev(8, 0))"
    ),
    "deep folders and long names": (
        "try:\n"
        "    for _ in range(3000):\n        os.mkdir('d' * 200)\n        os.chdir('d' * 200)\n"
        "except OSError:\n    pass"
    ),
    "a clock of its own": "tried('clock', time.clock_settime, time.CLOCK_REALTIME, 0)\n"
    "tried('offsets', lambda: open('/proc/self/timens_offsets', 'w').write('monotonic 9 0'))",
    "descriptors sent over a pair": (
        "import array\none, other = socket.socketpair()\n"
        "tried('sent', one.sendmsg, [b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))])"
    ),
    "signals to a process outside": (
        "for pid in range(2, 1 << 16, 7):\n"
        "    if pid != os.getpid(): tried(pid, os.kill, pid, 0)\n"
        "os.kill(1, signal.SIGKILL)"
    ),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_nothing_comes_of(attempt, name):
    outcome = attempt(ATTEMPTS[name], ok=False)
    assert outcome.kind in ("ok", "exit", "files"), outcome.describe()


def test_a_jail_does_not_reach_another_that_runs_beside_it(isolated, opening):
    """Both know of the other, and try its processes, its folder and its memory."""
    looks = (
        "mine = open(f'areal-mark-{os.getpid()}', 'w')\n"
        "os.write(3, b'x')\nos.read(3, 1)\n"
        "pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]\n"
        "if len(pids) > 3: print('ESCAPED', pids)\n"
        "tried('kill', os.kill, -1, signal.SIGKILL)\n"
        "names = os.listdir('/work')\n"
        "if len([n for n in names if n.startswith('areal-mark')]) != 1: print('ESCAPED', names)\n"
        "os.write(3, b'y')\nprint(os.read(3, 1))"
    )
    pair = [Program(source=opening + looks, limits=LIMITS) for _ in range(2)]
    for outcome in isolated.run_pair(*pair):
        assert b"ESCAPED" not in outcome.stdout
        assert outcome.stdout.endswith(b"b'y'\n") or outcome.kind == "ended", outcome.describe()


def test_no_descriptor_and_no_identity_crosses_the_link(isolated, opening):
    sends = (
        "import array\nend = socket.socket(fileno=3)\n"
        "fds = array.array('i', [os.open('/usr', os.O_RDONLY)])\n"
        "tried('sent', end.sendmsg, [b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])\n"
        "end.send(b'y')"
    )
    takes = (
        "end = socket.socket(fileno=3)\ndata, others, _, _ = end.recvmsg(9, 4096)\n"
        "if others or data != b'y': print('ESCAPED', others)\n"
        "peer = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)\n"
        "pid = int.from_bytes(peer[:4], 'little')\n"
        "if pid > 0: print('ESCAPED', pid)\n"
        "try:\n    fd = int.from_bytes(end.getsockopt(socket.SOL_SOCKET, 77, 4), 'little')\n"
        "except OSError:\n    fd = -1\n"
        "if fd >= 0: tried('signal', signal.pidfd_send_signal, fd, 0)\n"
        "print('looked')"
    )
    tests, program = isolated.run_pair(
        Program(source=opening + takes, limits=LIMITS), Program(source=opening + sends, limits=LIMITS)
    )
    assert tests.stdout == b"looked\n", tests.describe()
    assert b"ESCAPED" not in program.stdout


def test_what_ordinary_programs_need_works(attempt):
    """The filter takes nothing away that solutions of tasks use."""
    source = """
import asyncio, concurrent.futures, multiprocessing, sqlite3, subprocess, tempfile, threading
def square(n): return n * n
if __name__ == '__main__':
    with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(square, range(4))))
    with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(square, range(4)))
    async def one(): return await asyncio.sleep(0, 7)
    print(asyncio.run(one()))
    print(subprocess.run(['/bin/sh', '-c', 'echo shell'], capture_output=True).stdout)
    base = sqlite3.connect(':memory:')
    print(base.execute('select 1 + 1').fetchone())
    with tempfile.TemporaryFile() as file: print(file.write(b'abc'))
    with open('mapped', 'w+b') as file:
        file.write(b'abcd')
        file.flush()
        print(mmap.mmap(file.fileno(), 4)[:])
    print(open('/dev/null', 'w').write('x'), len(open('/dev/urandom', 'rb').read(4)))
"""
    outcome = attempt(source, RunLimits(wall_s=30, cpu_s=20, memory_mb=512, processes=32))
    assert outcome.stdout.decode().split("\n")[:7] == [
        "[0, 1, 4, 9]",
        "[0, 1, 4, 9]",
        "7",
        "b'shell\\n'",
        "(2,)",
        "3",
        "b'abcd'",
    ]
