"""A child process that does not outlive its parent: `python guard.py PARENT_PID HOW COMMAND…`.

HOW is the action on the command when the parent dies: `terminate`, `kill` or `kill_group`. With `kill_group`
this script keeps running and leads the process group of the whole command. It kills that group when the
command exits (and then exits with the same status), when it receives SIGTERM, and when the parent dies.

The script uses only the standard library. It runs under `-I -S` and starts in milliseconds. The parent could
also do this work between fork and exec, but that is unsafe because the parent has threads. This process has
only one thread.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, how: str, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if how == "kill_group":
        signal.signal(signal.SIGTERM, end_group)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL if how == "kill" else signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:
        return 1  # the parent died before the line above

    def die_with_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    try:
        if how != "kill_group":
            os.execvp(command[0], command)
        child = subprocess.Popen(command, preexec_fn=die_with_guard)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        return 127
    status = child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    print(f"{os.path.basename(command[0])} ended with status {status}", file=sys.stderr, flush=True)
    return status if status >= 0 else 128 - status


def end_group(*_: object) -> None:
    # This process is in the group too, so its own status is then the status of a killed process.
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
