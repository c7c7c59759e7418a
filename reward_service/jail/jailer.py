"""The process that makes jails: takes a request, makes one jail, watches it, answers; one at a time.

Started by `reward_service.sandbox` with nothing in its environment. Ends when its client does, and with it
whatever runs in its jail.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from typing import Any, BinaryIO

from reward_service.jail import frames, linux, memory, seccomp, tree, warden
from reward_service.jail.keeper import SETUP_LIMIT_S, ClientGone, Keeper, Seen

FIRST_UIDS = (0x70000000, 0x40000000, 61000)
"""Users that no system gives to anyone; a container may know only the smaller ones."""
PER_USER_NAMESPACE = (5, 14)
"""From this Linux on a namespace counts the processes of its users by itself."""


def serve(client: socket.socket, group: memory.MemoryGroup | None) -> None:
    while (message := frames.receive(client)) is not None:
        request, body = message
        if "end" in request:
            continue  # the run that this was meant for had ended by itself
        if "probe" in request:
            frames.send(client, probe(group))
            continue
        try:
            link = socket.recv_fds(client, 1, 1)[1] if request["link"] else []
            head, answer = run(request, body, client, link, group)
        except ClientGone:
            return
        except OSError as error:
            head, answer = {"failed": f"{type(error).__name__}: {error}"}, b""
        frames.send(client, head, answer)


def probe(group: memory.MemoryGroup | None) -> dict[str, Any]:
    """What this machine offers beside namespaces, which only trying them tells."""
    return {
        "machine": linux.MACHINE,
        "filter": seccomp.program(linux.MACHINE) is not None,
        "group": group is not None,
        "root": os.geteuid() == 0,
    }


def own_uid(base: int) -> int:
    """A user for what runs in the jails of this jailer, and of no other."""
    return base + (os.getpid() if base > 1 << 20 else os.getpid() % 4000)


def run(
    request: dict[str, Any],
    body: bytes,
    client: socket.socket,
    link: list[int],
    group: memory.MemoryGroup | None,
) -> tuple[dict[str, Any], bytes]:
    """One program in one jail. `link`: the end of a pair's link that is the program's, if it has one.
    Raises OSError, ClientGone."""
    stdin_bytes = body[: request["stdin"]]
    files = body[request["stdin"] :]
    if request["uid_base"] is not None:
        request["uid"] = own_uid(request["uid_base"])
    else:
        request["uid"] = None
    request["others"] = _others(request)
    request["grouped"] = group is not None
    with contextlib.ExitStack() as open_fds:
        linked = [open_fds.enter_context(open(fd, "rb", buffering=0)) for fd in link]
        stdin = open_fds.enter_context(_sealed(stdin_bytes))
        ends = [os.pipe(), os.pipe()]
        ours = [open_fds.enter_context(open(fd, "rb", buffering=0)) for fd, _ in ends]
        writing = [open_fds.enter_context(open(fd, "wb", buffering=0)) for _, fd in ends]
        control, theirs = socket.socketpair()
        open_fds.enter_context(control)
        open_fds.enter_context(theirs)
        if group is not None:
            group.begin(int(request["limits"]["memory_mb"]) << 20)
        jailer = os.getpid()
        pid = os.fork()
        if pid == 0:
            client.close()
            control.close()
            for reading in ours:
                reading.close()
            out_theirs, err_theirs = (end.fileno() for end in writing)
            streams = (stdin.fileno(), out_theirs, err_theirs, *link)
            warden.run(request, files, theirs, streams, jailer)
        theirs.close()
        for end in (*writing, *linked):
            end.close()
        out, err = (end.fileno() for end in ours)
        for fd in (out, err):
            os.set_blocking(fd, False)
        first, failed = _set_up(request, pid, control)
        if failed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            tree.reap(SETUP_LIMIT_S)
            return {"failed": failed}, b""
        began_s = time.monotonic()
        keeper = Keeper(
            request, pid=pid, first=first, control=control, streams=(out, err), client=client, group=group
        )
        return _answer(keeper.watch(), (out, err), began_s)


def _set_up(request: dict[str, Any], pid: int, control: socket.socket) -> tuple[int, str]:
    """(the process that is the root of the jail, why it could not be made)."""
    control.settimeout(SETUP_LIMIT_S)
    try:
        while (message := frames.receive(control)) is not None:
            head, _ = message
            if "failed" in head:
                return 0, str(head["failed"])
            if "first" in head:
                if request["maker"]:
                    _first_to_die(int(head["first"]))
                frames.send(control, {"go": True})
                control.settimeout(None)
                request["work"] = head.get("work")
                return int(head["first"]), ""
            if "map" in head:
                uid = request["uid"]
                for name in ("uid_map", "gid_map"):
                    with open(f"/proc/{pid}/{name}", "w", encoding="utf-8") as file:
                        file.write(f"0 {os.geteuid()} 1\n1000 {uid} 1\n")
            frames.send(control, {"go": True})
    except OSError as error:
        return 0, f"{type(error).__name__}: {error}"
    return 0, "the first process of the jail ended at once"


def _first_to_die(pid: int) -> None:
    """When the machine is out of memory. Written with the right to, it is a floor that the program cannot go
    below; without it the program could, so /proc is read-only in a jail."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")


def _answer(seen: Seen, streams: tuple[int, int], began_s: float) -> tuple[dict[str, Any], bytes]:
    out, err = (bytes(seen.output[fd]) for fd in streams)
    began_s = seen.began_s if seen.began_s is not None else began_s
    ended_s = seen.ended_s if seen.ended_s is not None else time.monotonic()
    head = {
        "failed": seen.failed,
        "kind": seen.kind,
        "status": seen.status,
        "wall_ms": (ended_s - began_s) * 1000,
        "cpu_ms": seen.cpu_ms,
        "peak_mb": seen.peak_bytes / (1 << 20),
        "stdout": len(out),
        "stderr": len(err),
        "artifacts": seen.artifacts,
    }
    return head, out + err + seen.artifact_bytes


def _others(request: dict[str, Any]) -> int:
    """Processes that the kernel counts against the limit beside the program's own."""
    if request["maker"] == "bubblewrap":
        return 1
    if request["uid"] is not None:
        return 0
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if request["maker"] and release >= PER_USER_NAMESPACE:
        return 2
    return tree.threads_of_user(os.geteuid())


def _sealed(data: bytes) -> BinaryIO:
    """A file in memory that can be read and nothing else."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    fcntl.fcntl(
        fd,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
    )
    try:
        return open(f"/proc/self/fd/{fd}", "rb", buffering=0)
    finally:
        os.close(fd)


def main() -> None:
    os.umask(0o022)  # a program may be another user, and must read what is put into its room
    os.chdir("/")
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    group = memory.enter()
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), group)
    finally:
        if group is not None:
            group.leave()
