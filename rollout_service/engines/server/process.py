"""One server process: started, waited for, watched and ended, with everything it starts.

Promises: the process group of the server is gone after `stop`, and after the death of this process in
whatever way (see `guard.py`); a server that ends before it serves, or does not serve in time, is an
`EngineError` that shows the last lines of its log.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from areal_async.runtime.log import SERVER_LOADS, get_logger
from rollout_service.engines.base import EngineError

log = get_logger("engine")

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.1
TAIL_LINES = 15
TAIL_BYTES = 16 << 10
STOP_TIMEOUT_S = 10.0


def free_port() -> int:
    """A loopback port that nobody listens on now. The server binds it some seconds later: should another be
    faster, it ends, and is started again with another port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A started server. `name` is for messages."""

    def __init__(
        self, name: str, argv: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        """Start `argv` with exactly `environment`; its output is appended to `log_path`."""
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_from = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("ab") as log:
            try:
                # -I -S: the guard needs nothing but the standard library, and soon.
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=dict(environment),
                )
            except OSError as error:
                raise EngineError(f"{name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Of the guard, which leads the process group."""
        return self._guard.pid

    def alive(self) -> bool:
        return self._guard.poll() is None

    def tail(self) -> str:
        """The last lines that this server wrote."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_from, size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    async def wait_ready(self, serves: Callable[[], Awaitable[bool]], ready_s: float) -> None:
        """Return once `serves()` is true. Raises `EngineError` when the server ends or `ready_s` passes
        first; what is left of it is killed then."""
        until_s = time.monotonic() + ready_s
        log.info(SERVER_LOADS, server=self.name.removeprefix("the ").removesuffix(" server"))
        try:
            while not await serves():
                if not self.alive():
                    raise EngineError(
                        f"{self.name} ended before it served. The end of {self.log_path}:\n{self.tail()}"
                    )
                if time.monotonic() > until_s:
                    raise EngineError(
                        f"{self.name} does not serve after {ready_s:.0f} s (rollout.server.ready_s). "
                        f"The end of {self.log_path}:\n{self.tail()}"
                    )
                await asyncio.sleep(POLL_S)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Kill the whole group and reap it. A server holds nothing that an orderly end would save."""
        self.kill()
        try:
            await asyncio.to_thread(self._guard.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # A kernel call of its driver holds it. Whoever ends it has more to do than to wait for that.
            log.warning("killed, but not gone", server=self.name, waited_s=STOP_TIMEOUT_S)
