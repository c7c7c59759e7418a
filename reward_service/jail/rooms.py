"""A file system of the jail's own: system folders to read, one small folder in memory to write."""

from __future__ import annotations

import os
import socket
from typing import Any

from reward_service.jail import linux

INNER_UID = 1000
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
    "shm": "/work/.tmp",
}
SHOWN_AS = {"zero": "full"}
"""It reads the same. Mapping the other makes memory that is counted nowhere."""
ETC_FILES = {
    "passwd": "root:x:0:0::/:/bin/false\nprogram:x:1000:1000::/work:/bin/sh\n",
    "group": "root:x:0:\nprogram:x:1000:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "hosts": "127.0.0.1 localhost\n",
}
ETC_BINDS = ("ld.so.cache", "alternatives", "java-17-openjdk", "java-11-openjdk", "java-21-openjdk")
PRIVATE = linux.MS_NOSUID | linux.MS_NODEV


def build(request: dict[str, Any]) -> None:
    """Make it and move into it. For process 1 of a new mount namespace. Raises OSError."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    root = _place(request["binds"])
    linux.mount("tmpfs", root, "tmpfs", PRIVATE, "size=4m,nr_inodes=4096,mode=755")
    for path in request["binds"]:
        _bind(path, root)
    _devices(root)
    os.mkdir(f"{root}/etc", 0o755)
    for name, text in ETC_FILES.items():
        with open(f"{root}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    for name in ETC_BINDS:
        _bind(f"/etc/{name}", root)
    os.mkdir(f"{root}/proc", 0o555)
    try:
        linux.mount("proc", f"{root}/proc", "proc", PRIVATE | linux.MS_NOEXEC | linux.MS_RDONLY)
    except OSError:
        # Refused in containers that hide parts of their own; most programs do without.
        os.mkdir(f"{root}/proc/self")
    os.mkdir(f"{root}/work")
    limits = request["limits"]
    size = f"size={int(limits['files_mb'])}m,nr_inodes={int(limits['files']) + 4}"
    linux.mount("tmpfs", f"{root}/work", "tmpfs", PRIVATE, f"{size},mode=755,uid={INNER_UID},gid={INNER_UID}")
    os.mkdir(f"{root}/work/.tmp")
    os.chmod(f"{root}/work/.tmp", 0o1777)
    os.symlink("/work/.tmp", f"{root}/tmp")
    os.mkdir(f"{root}/.old")
    linux.pivot_root(root, f"{root}/.old")
    os.chdir("/")
    linux.umount("/.old", linux.MNT_DETACH)
    os.rmdir("/.old")
    linux.mount("none", "/", None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | PRIVATE)
    socket.sethostname("jail")


def _place(binds: list[str]) -> str:
    """A folder to build on that hides nothing that is bound from below it."""
    for path in ("/mnt", "/media", "/srv", "/opt", "/tmp"):
        if os.path.isdir(path) and not any(one == path or one.startswith(path + "/") for one in binds):
            return path
    raise OSError("no folder of /mnt, /media, /srv, /opt and /tmp is free to build a jail on")


def _bind(path: str, root: str) -> None:
    """Show the host's `path` in the jail, to read and run only. A path that is not there is left out."""
    target = root + path
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    else:
        return
    linux.mount(path, target, None, linux.MS_BIND | linux.MS_REC)
    linux.mount_readonly(target)


def _devices(root: str) -> None:
    os.makedirs(f"{root}/dev", exist_ok=True)
    for name in DEVICES:
        target = f"{root}/dev/{name}"
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(f"/dev/{SHOWN_AS.get(name, name)}", target, None, linux.MS_BIND)
    for name, to in DEVICE_LINKS.items():
        os.symlink(to, f"{root}/dev/{name}")
