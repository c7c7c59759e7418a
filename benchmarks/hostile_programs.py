"""Programs that do what a program should not, and how each may end in a sandbox.

Most are small in what they try, so that a cap which does not hold costs little; one that gets further than it
may says so with `ESCAPED`.
"""

from __future__ import annotations

from typing import NamedTuple

import psutil

from reward_service.sandbox.isolation.launcher import FIRST_UIDS


class Hostile(NamedTuple):
    source: str
    kinds: frozenset[str]
    """The ends that are right. A program may also be stopped by nothing and find that it achieved nothing."""


def hostile(source: str, *kinds: str) -> Hostile:
    return Hostile(source, frozenset(kinds))


PROGRAMS: dict[str, Hostile] = {
    "segfault": hostile("import ctypes\nctypes.string_at(0)", "signal"),
    "abort": hostile("import os\nos.abort()", "signal"),
    "os._exit": hostile("import os\nos._exit(3)", "exit"),
    "exit 0 early": hostile("import os\nos._exit(0)", "ok"),
    "infinite loop": hostile("while True:\n    pass", "cpu", "timeout"),
    "sleep": hostile("import time\ntime.sleep(1000)", "timeout"),
    "stop itself": hostile("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "memory bomb": hostile("parts = []\nwhile True:\n    parts.append(bytearray(1 << 22))", "exit", "memory"),
    "memory by children": hostile(
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        kept = bytearray(60 << 20)\n"
        "        time.sleep(1000)\n"
        "time.sleep(1000)",
        "memory",
    ),
    "files in memory": hostile(
        "import os\n"
        "n = 0\n"
        "try:\n"
        "    while n < 400:\n"
        "        with open(f'part{n}', 'wb') as file:\n"
        "            file.write(bytes(1 << 20))\n"
        "        n += 1\n"
        "except OSError:\n"
        "    raise SystemExit(4)\n"
        "print('ESCAPED', n)",
        "exit",
        "files",
    ),
    "fork bomb": hostile(
        "import os\n"
        "def bomb(depth):\n"
        "    while True:\n"
        "        try:\n"
        "            if os.fork() == 0:\n"
        "                depth += 1\n"
        "        except OSError:\n"
        "            continue\n"
        "bomb(0)",
        "cpu",
        "timeout",
        "processes",
        "memory",
    ),
    "thread bomb": hostile(
        "import threading, time\n"
        "for n in range(300):\n"
        "    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "print('ESCAPED')",
        "exit",
        "timeout",
        "processes",
    ),
    "1 GB of output": hostile(
        "import sys\nfor _ in range(1 << 14):\n    sys.stdout.write('x' * (1 << 16))", "output"
    ),
    "1 GB of errors": hostile(
        "import os\nfor _ in range(1 << 14):\n    os.write(2, b'x' * (1 << 16))", "output"
    ),
    "one large file": hostile(
        "with open('large', 'wb') as file:\n"
        "    for _ in range(1 << 10):\n        file.write(bytes(1 << 20))\n"
        "print('ESCAPED')",
        "exit",
        "files",
    ),
    "zombie children": hostile(
        "import os\nfor _ in range(5):\n    if os.fork() == 0:\n        os._exit(0)\nprint('done')", "ok"
    ),
    "daemon left behind": hostile(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(1000)\n"
        "    os._exit(0)\n"
        "print('done')",
        "ok",
    ),
    "signals blocked": hostile(
        "import signal\n"
        "for number in signal.valid_signals():\n"
        "    try:\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n"
        "        continue\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "while True:\n"
        "    pass",
        "cpu",
        "timeout",
        "signal",
    ),
    "kill everyone": hostile(
        "import os, signal\n"
        "try:\n"
        "    os.kill(-1, signal.SIGTERM)\n"
        "except OSError:\n"
        "    pass\n"
        "for pid in range(1, 64):\n"
        "    try:\n"
        "        if pid != os.getpid():\n"
        "            os.kill(pid, signal.SIGTERM)\n"
        "    except OSError:\n"
        "        continue\n"
        "print('done')",
        "ok",
        "signal",
    ),
    "environment": hostile(
        "import os\nprint('ESCAPED' if 'AREAL_TEST_SECRET' in os.environ else 'nothing')", "ok"
    ),
    "environment of others": hostile(
        "import glob\n"
        "found = b''\n"
        "for path in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try:\n"
        "        found += open(path, 'rb').read()\n"
        "    except OSError:\n"
        "        continue\n"
        "print('ESCAPED' if b'AREAL_TEST_SECRET' in found else 'nothing')",
        "ok",
    ),
    "files outside": hostile(
        "import os\n"
        "places = ('/etc/shadow', '/root/.bashrc', '/proc/1/environ', '/proc/1/mem', '/dev/mem', '/sys/fs')\n"
        "for path in places:\n"
        "    try:\n"
        "        os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1)\n"
        "        print('ESCAPED', path)\n"
        "    except OSError:\n"
        "        continue",
        "ok",
    ),
    "write everywhere": hostile(
        "import os\n"
        "here = os.path.realpath('.')\n"
        "for folder in ('/', '/etc', '/usr', '/usr/bin', '/var/tmp', '/dev', '/root', '/home', '/proc'):\n"
        "    try:\n"
        "        open(folder + '/areal-was-here', 'w').close()\n"
        "        print('ESCAPED', folder)\n"
        "    except OSError:\n"
        "        continue\n"
        "for folder in ('/tmp', '/dev/shm'):\n"
        "    try:\n"
        "        open(folder + '/areal-was-here', 'w').close()\n"
        "    except OSError:\n"
        "        continue",
        "ok",
    ),
    "sockets": hostile(
        "import socket\n"
        "for family in (socket.AF_INET, socket.AF_INET6):\n"
        "    try:\n"
        "        end = socket.socket(family)\n"
        "        end.settimeout(0.5)\n"
        "        end.bind(('127.0.0.1' if family == socket.AF_INET else '::1', 0))\n"
        "        end.connect(('127.0.0.1', 22))\n"
        "        print('ESCAPED')\n"
        "    except OSError:\n"
        "        continue",
        "ok",
    ),
    "deep recursion": hostile(
        "import sys\nsys.setrecursionlimit(10**9)\ndef down(n):\n    return down(n + 1) + 1\ndown(0)",
        "exit",
        "signal",
        "memory",
        "cpu",
        "timeout",
    ),
    "clock trick": hostile(
        "import time\n"
        "time.time = time.monotonic = time.perf_counter = lambda: 0.0\n"
        "try:\n"
        "    time.clock_settime(time.CLOCK_REALTIME, 0)\n"
        "    print('ESCAPED')\n"
        "except OSError:\n"
        "    pass\n"
        "while time.time() < 1:\n"
        "    pass",
        "cpu",
        "timeout",
    ),
    "look into others": hostile(
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for pid in (1, os.getppid()):\n"
        "    if libc.ptrace(16, pid, 0, 0) == 0:\n"
        "        print('ESCAPED ptrace', pid)\n"
        "    try:\n"
        "        open(f'/proc/{pid}/mem', 'rb').read(1)\n"
        "        print('ESCAPED mem', pid)\n"
        "    except OSError:\n"
        "        continue",
        "ok",
    ),
    "new namespaces": hostile(
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if os.geteuid() == 0 or libc.mount(b'none', b'/proc', b'tmpfs', 0, None) == 0:\n"
        "    print('ESCAPED')",
        "ok",
    ),
    "pickle that runs": hostile(
        "import pickle, sys\n"
        "class Trap:\n"
        "    def __reduce__(self):\n"
        "        return (print, ('ESCAPED',))\n"
        "sys.stdout.buffer.write(pickle.dumps(Trap())[:4])",
        "ok",
    ),
    "no text": hostile("import os\nos.write(1, bytes(range(256)))", "ok"),
}


def orphans_of_jails() -> set[int]:
    """Processes of a user that only jails have, and not below the launcher whose process id is in that
    user's. Where jails run as the user of the service this finds nothing."""
    found = set()
    for process in psutil.process_iter(["uids"]):
        uids = process.info["uids"]
        bases = [base for base in FIRST_UIDS[:2] if uids is not None and base <= uids.real < base + (1 << 22)]
        if not bases:
            continue
        try:
            above = {parent.pid for parent in process.parents()}
        except psutil.NoSuchProcess:
            continue
        if uids.real - bases[0] not in above and psutil.pid_exists(process.pid):
            found.add(process.pid)
    return found
