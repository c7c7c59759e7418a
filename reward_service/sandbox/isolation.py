"""How this machine can shut a program in: each way is tried with a small program, never guessed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

from areal_async.runtime.log import get_logger
from reward_service.jail.jailer import FIRST_UIDS
from reward_service.sandbox.client import Jailer
from reward_service.sandbox.errors import CannotIsolate, CompilerMissing
from reward_service.sandbox.languages import language
from reward_service.sandbox.program import Level, Limits

log = get_logger("sandbox")

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/passwd",
    "/etc/nsswitch.conf",
    "/etc/localtime",
    "/etc/ssl/openssl.cnf",
)
ETC_JAVA = ("/etc/java-11-openjdk", "/etc/java-17-openjdk", "/etc/java-21-openjdk")
NAMESPACES = ("user", "pid", "mount", "net", "ipc", "uts", "cgroup")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": ".", "TMPDIR": "."}
INSIDE = {"HOME": "/work", "TMPDIR": "/work/.tmp"}
REMEDY = (
    "Run programs on a sandbox server elsewhere (`remote`), or allow user namespaces here: Docker: "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined; Kubernetes: hostUsers: false; "
    "Ubuntu 24.04: install bubblewrap; elsewhere: sysctl user.max_user_namespaces above 0. `sandbox: none` "
    "in the reward's arguments runs them without any protection (docs/sandbox.md)"
)


@dataclass(frozen=True)
class Way:
    """One way of running a program, that works here."""

    level: Level
    maker: str
    """Who makes the namespaces: `bubblewrap` or `own`; empty for none."""
    guards: tuple[str, ...]
    uid_base: int | None = None
    """First of the users that programs run as; none: as the user of the service."""
    bwrap: str | None = None
    """Where bubblewrap is, where it is the maker."""

    def request(
        self,
        argv: tuple[str, ...],
        limits: Limits,
        *,
        binds: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """What the jailer is asked, without files and input."""
        extra: dict[str, Any] = {}
        if self.maker == "bubblewrap":
            warden = language("python", for_others=self.as_another)
            binds = (*binds, *warden.binds, *SYSTEM_FILES, *ETC_JAVA)
            extra = {"bwrap": self.bwrap, "python": warden.run[0]}
        return {
            "level": self.level,
            "maker": self.maker,
            "uid_base": self.uid_base,
            "argv": argv,
            "env": {**ENVIRONMENT, **(INSIDE if self.maker else {}), **(env or {})},
            "binds": list(dict.fromkeys((*SYSTEM_FOLDERS, *binds))),
            "limits": {name: getattr(limits, name) for name in limits.__struct_fields__},
            "files": [],
            "collect": [],
            "stdin": 0,
            "link": False,
            **extra,
        }

    @property
    def as_another(self) -> bool:
        """Whether everything a run needs must be open to a user that owns nothing."""
        return self.maker == "bubblewrap" and self.uid_base is not None


NONE = Way("none", "", ())


def find(jailer: Jailer) -> Way:
    """The first way to be isolated that works here. Raises CannotIsolate, with why none does and what to
    change."""
    offered, _ = jailer.ask({"probe": True}, b"", 5.0)
    why: dict[str, str] = {}
    if not offered["filter"] and not offered["group"]:
        why["memory"] = (
            f"there is neither a memory control group to be had nor a filter of system calls for "
            f"{offered['machine']}, so memory could not be held"
        )
    bwrap = shutil.which("bwrap")
    for maker in ("bubblewrap", "own") if not why else ():
        if maker == "bubblewrap" and bwrap is None:
            why[maker] = "bwrap is not installed"
            continue
        for uid_base in FIRST_UIDS if offered["root"] else (None,):
            guards = (
                *NAMESPACES,
                *(("uid",) if offered["root"] else ()),
                *(("seccomp",) if offered["filter"] else ()),
                "memory group" if offered["group"] else "memory sum",
                maker,
            )
            way = Way("isolated", maker, guards, uid_base, bwrap if maker == "bubblewrap" else None)
            why[maker] = _try(jailer, way)
            if not why[maker]:
                return way
    reasons = "; ".join(f"{maker}: {reason}" for maker, reason in why.items())
    raise CannotIsolate(f"this machine cannot isolate programs ({reasons})", REMEDY)


def _try(jailer: Jailer, way: Way) -> str:
    """Why this way does not work; empty when it does."""
    limits = Limits(wall_s=10.0, cpu_s=5.0, memory_mb=128, processes=8)
    try:
        request = way.request(("/bin/sh", "-c", "exit 0"), limits)
    except CompilerMissing as error:
        return str(error)
    head, _ = jailer.ask(request, b"", limits.wall_s)
    if head["failed"]:
        return str(head["failed"])
    return "" if head["status"] == 0 else f"a first program ended with the wait status {head['status']}"
