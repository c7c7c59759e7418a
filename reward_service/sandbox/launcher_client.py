"""The other end of a launcher: one child process, asked over a socket pair."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from reward_service.sandbox.isolation import messages
from reward_service.sandbox.program import SandboxError

START = "import sys; sys.path.append(sys.argv.pop()); from isolation.launcher import main; main()"
"""What the launcher's interpreter runs. The last argument is the folder of the package `isolation`."""
FOLDER = str(Path(__file__).resolve().parent)
ANSWER_GRACE_S = 40.0
"""Time beyond the wall limit: making the jail, ending it, sending what it said."""


class LauncherDied(SandboxError):
    """The launcher is gone; another may do better."""


class LauncherClient:
    """Started when first asked; started again when it has died. Not for two threads at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._owner = 0

    def ask(self, head: dict[str, Any], body: bytes, wall_s: float) -> tuple[dict[str, Any], bytes]:
        """Raises SandboxError when there is no answer."""
        for attempt in (1, 2):
            self.begin(head, body, wall_s)
            try:
                return self.answer()
            except LauncherDied:
                if attempt == 2:
                    raise
        raise AssertionError("the second try returns or raises")

    def begin(self, head: dict[str, Any], body: bytes, wall_s: float, link: int | None = None) -> None:
        """Send a request, with the descriptor that is to be the program's link, if any. `answer` comes next.
        Raises SandboxError."""
        connection = self._connected()
        try:
            connection.settimeout(wall_s + ANSWER_GRACE_S)
            messages.send(connection, head, body)
            if link is not None:
                socket.send_fds(connection, [b"l"], [link])
        except OSError as error:
            self.close()
            raise LauncherDied(f"the launcher takes no request: {error}") from error

    def answer(self) -> tuple[dict[str, Any], bytes]:
        """The answer to the request that was begun. Raises SandboxError."""
        try:
            answer = messages.receive(self.connection)
        except (OSError, ValueError) as error:
            self.close()
            raise SandboxError(f"the launcher does not answer: {error}") from error
        if answer is None:
            self.close()
            raise LauncherDied("the launcher died. Look for its message on the standard error of the service")
        return answer

    def end(self) -> None:
        """Have the run that was begun ended at once; its answer comes all the same."""
        with contextlib.suppress(OSError):
            messages.send(self.connection, {"end": True})

    @property
    def connection(self) -> socket.socket:
        """Readable when the answer has come."""
        if self._link is None:
            raise SandboxError("the launcher was asked nothing")
        return self._link

    def _connected(self) -> socket.socket:
        if self._link is not None and self._owner == os.getpid() and self._alive():
            return self._link
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", START, str(theirs.fileno()), FOLDER],
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

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End it and what runs in its jail. Safe to repeat."""
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
