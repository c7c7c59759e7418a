"""A child process that does not outlive its parent: `python guard.py PARENT_PID HOW COMMAND…`.

HOW is the action on the command when the parent dies: `terminate`, `kill` or `kill_all`. With `kill_all` this
script keeps running and adopts every orphan among the command's descendants. It kills all of them when the
command exits (and then exits with the same status), when it receives SIGTERM, and when the parent dies. It
ends only after the last of them has ended, because a large process needs seconds to free a device's memory.
A lock that this script has inherited thus lasts as long as they do.

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
PR_SET_CHILD_SUBREAPER = 36


def main(parent_pid: int, how: str, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if how == "kill_all":
        signal.signal(signal.SIGTERM, kill_all_and_self)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL if how == "kill" else signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:
        return 1  # the parent died before the line above

    def die_with_guard() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    try:
        if how != "kill_all":
            os.execvp(command[0], command)
        # The command inherits the locks too: if this process is killed, they last as long as the command.
        child = subprocess.Popen(command, preexec_fn=die_with_guard, close_fds=False)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        return 127
    pid, status = os.wait()
    while pid != child.pid:  # an adopted process
        pid, status = os.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_all()
    child.returncode = os.waitstatus_to_exitcode(status)
    print(f"{os.path.basename(command[0])} ended with status {child.returncode}", file=sys.stderr, flush=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def kill_all() -> None:
    """Kill the group and all descendants of this process, and return after the last has ended."""
    while True:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat", encoding="latin-1") as stat:
                    _, parent, group = stat.read().rpartition(") ")[2].split()[:3]
                # A killed process leaves its children to this one, which finds them in a later pass.
                if os.getpid() in (int(parent), int(group)) and int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:
                pass  # it has ended
        try:
            os.wait()
        except ChildProcessError:
            return


def kill_all_and_self(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_all()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
