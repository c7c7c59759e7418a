"""The arguments of bubblewrap: readable system folders, and one small writable folder in memory."""

from __future__ import annotations

import os
from typing import Any

INNER_UID = "1000"
DEVICES = ("null", "zero", "full", "random", "urandom")
SHOWN_AS = {"zero": "full"}  # It reads the same. Mapping /dev/zero would make memory that no limit counts
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
    "shm": "/work/.tmp",
}


def arguments(request: dict[str, Any], filter_fd: int) -> list[str]:
    """Return the command line of `bwrap`, up to the program that becomes process 1.

    `filter_fd` is the descriptor of the compiled filter of system calls, which applies to process 1 and all
    its descendants.
    """
    words = [request["bwrap"], "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1"]
    words += ["--uid", INNER_UID, "--gid", INNER_UID, "--cap-drop", "ALL", "--seccomp", str(filter_fd)]
    words += ["--hostname", "jail", "--clearenv", "--tmpfs", "/dev"]
    words += ["--proc", "/proc"] if request["proc"] else ["--dir", "/proc/self"]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{SHOWN_AS.get(name, name)}", f"/dev/{name}"]
    for name, to in DEVICE_LINKS.items():
        words += ["--symlink", to, f"/dev/{name}"]
    for path in request["binds"]:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--ro-bind-try", path, path]
    for path, place in request["packages"]:
        words += ["--ro-bind", path, place]
    words += ["--perms", "0755", "--size", str(int(request["limits"]["files_mb"]) << 20), "--tmpfs", "/work"]
    words += ["--dir", "/work/.tmp", "--symlink", "/work/.tmp", "/tmp", "--chdir", "/work"]
    words += ["--remount-ro", "/proc"] if request["proc"] else []
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--"]
