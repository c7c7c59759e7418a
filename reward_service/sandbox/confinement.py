"""Ways to confine a program on this machine. A small program always tests whether a way works; this is never
guessed."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from reward_service.sandbox.interpreter import Interpreter, python
from reward_service.sandbox.isolation import messages
from reward_service.sandbox.isolation.launcher import FIRST_UIDS
from reward_service.sandbox.program import CannotIsolate, Level, PythonMissing, RunLimits, SandboxError

START = "import sys; sys.path.append(sys.argv.pop()); from isolation.launcher import main; main()"
"""Code that the launcher's interpreter runs. Its last argument is the folder that contains the package
`isolation`."""
FOLDER = str(Path(__file__).resolve().parent)
ANSWER_GRACE_S = 40.0  # Seconds beyond the limit by the clock to make the jail, end it and send the output.


class LauncherDied(SandboxError):
    """The launcher has died. Another launcher may work."""


class LauncherClient:
    """A client of the launcher, the process that starts jails. The first request starts the launcher, and a
    request after its death restarts it.

    Two threads must not use one client at the same time.
    """

    def __init__(self, start: str = START) -> None:
        self.start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._owner = 0

    def ask(self, head: dict[str, Any], body: bytes, clock_s: float) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the answer. Raises `SandboxError` without an answer."""
        with contextlib.suppress(LauncherDied):
            self.begin(head, body, clock_s)
            return self.answer()
        self.begin(head, body, clock_s)
        return self.answer()

    def begin(self, head: dict[str, Any], body: bytes, clock_s: float, link: int | None = None) -> None:
        """Send a request, possibly with the descriptor of the program's link. Afterwards, the caller must
        call `answer`. Raises `SandboxError`."""
        connection = self._connected()
        try:
            connection.settimeout(clock_s + ANSWER_GRACE_S)
            messages.send(connection, head, body)
            if link is not None:
                socket.send_fds(connection, [b"l"], [link])
        except OSError as error:
            self.close()
            raise LauncherDied(f"the launcher takes no request: {error}") from error

    def answer(self) -> tuple[dict[str, Any], bytes]:
        """Return the answer to the request in progress. Raises `SandboxError`."""
        try:
            if (answer := messages.receive(self.connection)) is not None:
                return answer
        except (OSError, ValueError) as error:
            self.close()
            raise SandboxError(f"the launcher does not answer: {error}") from error
        self.close()
        raise LauncherDied("the launcher died. Look for its message on the standard error of the service")

    def end(self) -> None:
        """End the run in progress at once. The launcher still sends its answer."""
        with contextlib.suppress(OSError):
            messages.send(self.connection, {"end": True})

    @property
    def pid(self) -> int:
        """Return the launcher's process id, or 0 before the first request."""
        return self._process.pid if self._process is not None else 0

    @property
    def connection(self) -> socket.socket:
        """Return the connection, which is readable once the answer has arrived."""
        if self._link is None:
            raise SandboxError("the launcher was asked nothing")
        return self._link

    def _connected(self) -> socket.socket:
        alive = self._process is not None and self._process.poll() is None
        if self._link is not None and self._owner == os.getpid() and alive:
            return self._link
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", self.start, str(theirs.fileno()), FOLDER],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={},
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"the launcher cannot be started: {error}") from error
        self._link, self._owner = ours, os.getpid()
        return ours

    def close(self) -> None:
        """End the launcher and the processes in its jail. It is harmless to call this again."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None and self._owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
        self._process = None


# --- ways of running a program -----------------------------------------------------------------------


SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_FILES = "ld.so.cache alternatives passwd nsswitch.conf localtime ssl/openssl.cnf"
SYSTEM_FILES = [f"/etc/{name}" for name in _FILES.split()]
NAMESPACES = ("user", "pid", "mount", "net", "ipc", "uts", "cgroup")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": ".", "TMPDIR": "."}
PACKAGES = "/packages"
"""Folder in a jail in which Python packages from outside folders are visible."""
INSIDE = {"HOME": "/work", "TMPDIR": "/work/.tmp"}
REMEDY = (
    "Install bubblewrap and libseccomp (Debian: `apt-get install bubblewrap libseccomp2`), run programs "
    "elsewhere (`areal-async reward serve` on a machine that can, and the reward `remote` here), or allow "
    "user namespaces here: Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined; "
    "Kubernetes: hostUsers: false; elsewhere: sysctl user.max_user_namespaces above 0. `sandbox: none` in "
    "the reward's arguments runs them without any protection (docs/sandbox.md)"
)


class Confinement(NamedTuple):
    """A way to run a program that works on this machine."""

    level: Level
    guards: tuple[str, ...] = ()
    """Parts of the confinement.

    They are namespaces (`user`, `pid`, `mount`, `net`, `ipc`, `uts`, `cgroup`), a separate user (`uid`),
    `seccomp`, the memory limit (`memory group` or `memory sum`) and `bubblewrap`.
    """
    uid_base: int | None = None  # first uid of programs; None: programs run as the service's user
    proc: bool = True  # whether a jail has a `/proc`; some containers refuse it

    def request(self, spoken: Interpreter, limits: RunLimits) -> dict[str, Any]:
        """Return the request to the launcher, without files and input.

        Raises `PythonMissing` if there is no interpreter for the jail's first process.
        """
        first = python(self.as_another)
        isolated = self.level == "isolated"
        folders = [f"{PACKAGES}/{n}" if isolated else one.path for n, one in enumerate(spoken.packages)]
        path = {"PYTHONPATH": ":".join(folders)} if folders else {}
        return {
            "level": self.level,
            "uid_base": self.uid_base,
            "proc": self.proc,
            "bwrap": shutil.which("bwrap"),
            "python": first.run[0],
            "argv": spoken.run,
            "env": {**ENVIRONMENT, **(INSIDE if isolated else {}), **spoken.env, **path},
            "packages": [
                (f"{folder.path}/{name}", f"{place}/{name}") if name else (folder.path, place)
                for folder, place in zip(spoken.packages, folders, strict=True)
                for name in folder.names or ("",)
            ],
            "binds": list(dict.fromkeys((*SYSTEM_FOLDERS, *spoken.binds, *first.binds, *SYSTEM_FILES))),
            "limits": msgspec.structs.asdict(limits),
            "files": [],
            "stdin": [0],
            "within_s": math.inf,
            "beside": 0,
            "link": False,
        }

    @property
    def as_another(self) -> bool:
        """Return whether programs run as a user who owns no files. The files that a program needs must then
        be readable by everybody."""
        return self.uid_base is not None


def find(launcher: LauncherClient) -> Confinement:
    """Return the first way of isolation that works on this machine.

    Raises `CannotIsolate` with the reason why each way fails, and the fix.
    """
    offered, _ = launcher.ask({"probe": True}, b"", 5.0)
    missing = "bwrap is not installed" if shutil.which("bwrap") is None else offered["no_filter"]
    reasons: list[str] = []
    uid = ("uid",) if offered["root"] else ()
    memory = "memory group" if offered["group"] else "memory sum"
    guards = (*NAMESPACES, *uid, "seccomp", memory, "bubblewrap")
    for uid_base, proc in product(FIRST_UIDS if offered["root"] else (None,), (True, False)):
        found = Confinement("isolated", guards, uid_base, proc)
        if not (why := missing or _try(launcher, found)):
            return found
        reasons.append(why)
    told = "; ".join(dict.fromkeys(reasons))
    raise CannotIsolate(f"this machine cannot isolate programs (bubblewrap: {told})", REMEDY)


def _try(launcher: LauncherClient, found: Confinement) -> str:
    """Return the reason why this way does not work, or an empty text."""
    limits = RunLimits(wall_s=10.0, cpu_s=5.0, clock_s=20.0, memory_mb=128, processes=8)
    try:
        request = found.request(Interpreter(("/bin/sh", "-c", "exit 0")), limits)
    except PythonMissing as error:
        return str(error)
    head, _ = launcher.ask(request, b"", limits.clock_s)
    if head["failed"]:
        return str(head["failed"])
    status = head["runs"][0]["status"]
    return "" if status == 0 else f"a first program ended with the wait status {status}"
