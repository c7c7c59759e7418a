"""Which isolation this machine offers: each rung is tried once with a small program, never guessed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_async.observe.log import get_logger
from reward_service.jail.jailer import FIRST_UIDS
from reward_service.sandbox.client import Jailer
from reward_service.sandbox.errors import CompilerMissing
from reward_service.sandbox.languages import language
from reward_service.sandbox.program import Level, Limits

log = get_logger("sandbox")

LOCAL: tuple[Level, ...] = ("seccomp", "bubblewrap", "namespaces", "rlimits")
"""What one machine may offer, from strong to weak."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/passwd",
    "/etc/nsswitch.conf",
    "/etc/localtime",
    "/etc/ssl/openssl.cnf",
)
OF_NAMESPACES = ("user", "pid", "mount", "net", "ipc", "uts")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": ".", "TMPDIR": "."}


@dataclass(frozen=True)
class Rung:
    """One way of confining a program, that works here."""

    level: Level
    guards: tuple[str, ...]
    uid_base: int | None
    """First of the users that programs run as; none: as the user of the service."""

    def request(
        self,
        argv: tuple[str, ...],
        limits: Limits,
        *,
        binds: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """What the jailer is asked, without files and input."""
        built_here = self.level in ("namespaces", "seccomp")
        here = () if built_here else (*SYSTEM_FILES, *ETC_JAVA)
        extra: dict[str, Any] = {}
        if self.level == "bubblewrap":
            warden = language("python", for_others=self.as_another)
            binds = (*binds, *warden.binds)
            extra = {"bwrap": bwrap(), "python": warden.run[0]}
        inside = {} if self.level == "rlimits" else {"HOME": "/work", "TMPDIR": "/work/.tmp"}
        return {
            "level": self.level,
            "guards": self.guards,
            "uid_base": self.uid_base,
            "argv": argv,
            "env": {**ENVIRONMENT, **inside, **(env or {})},
            "binds": list(dict.fromkeys((*SYSTEM_FOLDERS, *binds, *here))),
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
        return self.level in ("rlimits", "bubblewrap") and self.uid_base is not None


ETC_JAVA = ("/etc/java-11-openjdk", "/etc/java-17-openjdk", "/etc/java-21-openjdk")


def climb(jailer: Jailer, levels: Sequence[Level]) -> tuple[Rung | None, dict[Level, str]]:
    """(the first rung of `levels` that works here, why those before it do not). Starts small programs. Raises
    SandboxError when the jailer cannot work at all."""
    offered, _ = jailer.ask({"probe": True}, b"", 5.0)
    refused: dict[Level, str] = {}
    users: tuple[int | None, ...] = FIRST_UIDS if offered["root"] else (None,)
    filtering = ("seccomp",) if offered["seccomp"] else ()
    walls = ("landlock",) if offered["landlock"] else ()
    low = ("uid",) if offered["root"] else ()
    guards: dict[Level, tuple[str, ...]] = {
        "seccomp": (*OF_NAMESPACES, *low, "seccomp"),
        "bubblewrap": (*OF_NAMESPACES, *low, *filtering),
        "namespaces": (*OF_NAMESPACES, *low),
        "rlimits": (*low, *filtering, *walls),
    }
    for level in levels:
        if level == "seccomp" and not filtering:
            refused[level] = "the numbers of this architecture's system calls are not known"
            continue
        if level == "bubblewrap" and bwrap() is None:
            refused[level] = "bwrap is not installed"
            continue
        for uid_base in users:
            rung = Rung(level, guards[level], uid_base)
            refused[level] = _try(jailer, rung)
            if not refused[level]:
                return rung, refused
        log.info("no such sandbox here", level=level, why=refused[level])
    return None, refused


def bwrap() -> str | None:
    """Where bubblewrap is installed."""
    return shutil.which("bwrap")


def _try(jailer: Jailer, rung: Rung) -> str:
    """Why this rung does not work; empty when it does."""
    limits = Limits(wall_s=10.0, cpu_s=5.0, memory_mb=128, processes=8)
    try:
        request = rung.request(("/bin/sh", "-c", "exit 0"), limits)
    except CompilerMissing as error:
        return str(error)
    head, _ = jailer.ask(request, b"", limits.wall_s)
    if head["failed"]:
        return str(head["failed"])
    return "" if head["status"] == 0 else f"a first program ended with the wait status {head['status']}"
