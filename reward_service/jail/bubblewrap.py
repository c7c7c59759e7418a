"""A jail made by bubblewrap, for hosts that let it make namespaces and nobody else (by a profile of its own
or the set-user-id bit). It builds the room; our warden is process 1 in it and does what it does elsewhere.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from reward_service.jail import frames, linux, rooms

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OURS = "/.ours"
"""Where the warden finds its code in the jail."""
START = (
    "import sys; sys.path.insert(0, sys.argv[-1]); "
    "from reward_service.jail.bubblewrap import inside; inside([int(fd) for fd in sys.argv[1:-1]])"
)


def become(
    request: dict[str, Any], body: bytes, control: socket.socket, streams: tuple[int, ...], jailer: int
) -> None:
    """Turn this process into bubblewrap, with the warden below it. Returns when nobody wants that now."""
    if request["uid"] is not None:
        os.setgroups([])
        os.setresgid(request["uid"], request["uid"], request["uid"])
        os.setresuid(request["uid"], request["uid"], request["uid"])
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != jailer:
        return
    frames.send(control, {"first": os.getpid()})
    if frames.receive(control) is None:
        return
    order = os.memfd_create("request", 0)
    with open(order, "wb", closefd=False) as file:
        file.write(frames.packed(request, body))
    os.lseek(order, 0, os.SEEK_SET)
    fds = (order, control.fileno(), *streams)
    for fd in fds:
        os.set_inheritable(fd, True)
    warden = [request["python"], "-I", "-S", "-c", START, *map(str, fds), OURS]
    os.execve(request["bwrap"], [request["bwrap"], *room(request), "--", *warden], {})


def room(request: dict[str, Any]) -> list[str]:
    """The room of `rooms.build`, in bubblewrap's words."""
    limits, inner = request["limits"], str(rooms.INNER_UID)
    words = [
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--as-pid-1",
        "--uid",
        inner,
        "--gid",
        inner,
    ]
    words += ["--hostname", "jail", "--proc", "/proc", "--tmpfs", "/dev", "--clearenv"]
    for name in rooms.DEVICES:
        words += ["--dev-bind", f"/dev/{rooms.SHOWN_AS.get(name, name)}", f"/dev/{name}"]
    for name, to in rooms.DEVICE_LINKS.items():
        words += ["--symlink", to, f"/dev/{name}"]
    for path in request["binds"]:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--ro-bind-try", path, path]
    for name in ("__init__.py", "jail"):
        words += ["--ro-bind", os.path.join(ROOT, "reward_service", name), f"{OURS}/reward_service/{name}"]
    words += ["--perms", "0755", "--size", str(int(limits["files_mb"]) << 20), "--tmpfs", "/work"]
    words += ["--dir", "/work/.tmp", "--symlink", "/work/.tmp", "/tmp"]
    return [*words, "--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"]


def inside(fds: list[int]) -> None:
    """Process 1 of the jail; never returns."""
    from reward_service.jail import warden

    order, control_fd, *streams = fds
    control = socket.socket(fileno=control_fd)
    try:
        with open(order, "rb") as file:
            request, body = frames.unpacked(file.read())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        warden.start_program(request, body, control, tuple(streams), "/work", None)
    except BaseException as error:
        frames.send(control, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)
