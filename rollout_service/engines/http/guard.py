"""Runs a server so that nothing of it outlives this project's process: `python guard.py PARENT_PID COMMAND…`.

Only the standard library, and no import of this project: the script must be up in milliseconds. The guard
leads a process group in which the whole server lives. It ends when the server does (with its exit status),
when it is told to (SIGTERM), and when its parent dies; each time everything else in the group is killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: Sequence[str]) -> int:
    def end(*_: object) -> None:
        # The guard is in the group too: its own status is then that of a kill.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        return 1  # it died before the line above

    def die_with_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    # One thread runs here, so code between fork and exec is safe.
    server = subprocess.Popen(command, preexec_fn=die_with_guard)
    status = server.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    print(f"the server ended with status {status}", file=sys.stderr, flush=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
