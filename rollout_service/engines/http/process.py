"""The server of an engine: start or attach, wait, watch, and end it with all its child processes.

Promises: all processes of the server are gone after `end`, and after the death of this process for any reason
(see `base/processes.py`). If a server ends before it serves, or is not ready in time, `EngineError` shows
the last lines of its log. A server whose process has ended is dead immediately. A server whose process still
runs, or that is attached, may only be slow. Such a server is treated as dead after several unanswered probes
over a set time (`Patience`).
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from areal_async.base.addresses import LOOPBACK
from areal_async.base.gpus import children_on, cpus_near
from areal_async.base.log import get_logger
from areal_async.base.processes import ChildProcess
from areal_async.rpc.board import board
from rollout_service.engines.base import EngineError
from rollout_service.engines.http import keyed
from rollout_service.engines.http.adapter import PATIENCE, Patience, ServerSettings
from rollout_service.engines.http.client import ServerClient

log = get_logger("engine")

Variables = Mapping[str, str]
Argv = Callable[[int], Sequence[str]]  # Return the argument vector of a server on a port

POLL_S = 0.1
TAIL_LINES = 15
PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR .*?\] )?")
"""Beginning of a line of a log."""
ERROR = re.compile(r"((?:\w+\.)*\w+(?:Error|Exception)(?:: .*)?)$")
"""Last line of a traceback."""
NO_CAUSE = ("root cause", "/freeze_gc", "Connection refused")
CAUSE_LENGTH = 300
LOG_BYTES = 256 << 10  # Bytes read from the end of its log
STARTS = 2  # Attempts to start a server, because the port may be taken before the server binds it
PORT_TAKEN = "ddress already in use"
ATTACH_PAUSE_S = 0.2
UNAUTHORIZED = 401
QUERY_LIMIT_S = 10.0  # Longest wait for the driver's report of used memory


def free_port() -> int:
    """Return a free loopback port. The server binds the port seconds later. If another process takes the port
    first, the server ends and is started again with another port."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def cause_of(lines: Sequence[str]) -> str:
    """Return the last error in the lines of a server's log. Empty if there is none. Errors that only point to
    another one, and one of every start of SGLang, do not count."""
    lines = [PREFIX.sub("", line) for line in lines]
    for place in reversed(range(len(lines))):
        error = ERROR.match(lines[place])
        if error is None or any(words in error[1] for words in NO_CAUSE):
            continue
        if "validation error" in error[1]:  # pydantic says on the next line what is wrong
            said = "".join(lines[place + 1 : place + 2]).partition(" [type=")[0]
            return f"{error[1]}: {said.strip()}"[:CAUSE_LENGTH]
        if ":" in error[1]:
            return error[1][:CAUSE_LENGTH]
        code = next((line for line in reversed(lines[:place]) if line.strip(" ^~")), "")
        return f"{error[1]}: {code.strip()}"[:CAUSE_LENGTH]
    return ""


class ServerProcess(ChildProcess):
    """A started server. None of its processes outlives this process. `name` is for messages."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environment: Variables,
        log_path: Path,
        cpus: frozenset[int] = frozenset(),
        held_fds: Sequence[int] = (),
    ) -> None:
        """Start `argv` with exactly `environment`, on these CPUs if there are any. The output is appended to
        `log_path`. The server and its guard inherit `held_fds`."""
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_from = log_path.stat().st_size if log_path.exists() else 0
        try:
            with children_on(cpus):
                fates: dict[str, Any] = {"on_orphaned": "kill_all", "pass_fds": held_fds}
                super().__init__(argv, environment=environment, output=log_path, **fates)
        except OSError as error:
            raise EngineError(f"{name} cannot be started: {error}") from error

    async def end(self) -> None:
        """Kill the server and return once all its processes have ended, so that their memory is free."""
        while await self.stop() is None:
            log.warning("an engine server is killed but has not ended", server=self.name, pid=self.pid)

    def tail(self) -> str:
        """Return the last error that this server wrote, and its last lines."""
        lines = self.written().splitlines()
        cause = f"Its error is {error}. " if (error := cause_of(lines).rstrip(".")) else ""
        return f"{cause}The end of {self.log_path}:\n" + "\n".join(lines[-TAIL_LINES:])

    def written(self) -> str:
        """Return the log of this server, or the end of a long one."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_from, size - LOG_BYTES))
            return log.read().decode(errors="replace")

    async def wait_ready(self, serves: Callable[[], Awaitable[bool]], ready_s: float) -> None:
        """Return once `serves()` is true. Raises `EngineError` if the server ends or `ready_s` passes first.
        The rest of the server is then killed."""
        until_s = time.monotonic() + ready_s
        server = self.name.removeprefix("the ")
        log.info("engine server loads", server=server)
        board.waits("server", f"its {server} to load")
        try:
            while not await serves():
                late = time.monotonic() > until_s
                if late or not self.alive:
                    failed = f"does not serve after {ready_s:.0f} s (rollout.server.ready_s)"
                    failed = failed if self.alive else "ended before it served"
                    raise EngineError(f"{self.name} {failed}. {self.tail()}")
                await asyncio.sleep(POLL_S)
        except BaseException:
            self.kill()
            raise
        finally:
            board.waits("server", "")


def used_bytes(process: ServerProcess, gpus: Sequence[str]) -> int | None:
    """Return the memory in use on `gpus`, as the driver reports it. Without GPUs, return the resident memory
    of the server's process group. None if the driver's tool is missing. Blocks for a moment."""
    if gpus:
        ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        ask.append(f"--id={','.join(gpus)}")
        try:
            told = subprocess.run(ask, capture_output=True, timeout=QUERY_LIMIT_S, check=True)
            return sum(int(line) << 20 for line in told.stdout.split())  # in MiB
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
    found = 0
    with suppress(psutil.Error):
        leader = psutil.Process(process.pid)
        for each in (leader, *leader.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                found += each.memory_info().rss
    return found


@dataclass(eq=False)
class Liveness:
    """Check whether one server is alive, after an error with it. `answers` probes it once, in bounded time.
    `process` is None for an attached server."""

    answers: Callable[[], Awaitable[bool]]
    process: ServerProcess | None
    patience: Patience = PATIENCE
    _examination: asyncio.Task[bool] | None = None
    _closed: bool = False

    def ended(self) -> bool:
        """Return whether its process has ended."""
        return self.process is not None and not self.process.alive

    async def confirmed(self) -> bool:
        """Return whether the server is alive. All callers share one running check."""
        if self._examination is None or self._examination.done():
            self._examination = asyncio.create_task(self._examine())
        return await asyncio.shield(self._examination)

    def close(self) -> None:
        """Stop a running check after its next probe."""
        self._closed = True

    async def _examine(self) -> bool:
        clock = asyncio.get_running_loop().time
        since_s, misses = clock(), 0
        while not self._closed and not self.ended():
            if await self.answers():
                return True
            misses += 1
            if self.patience.is_over(misses, clock() - since_s):
                return False
            await asyncio.sleep(self.patience.pause_s)
        return False


async def started(
    name: str, argv: Argv, environment: Variables, settings: ServerSettings, path: str
) -> tuple[ServerProcess, ServerClient]:
    """Start a server with `argv(port)` (`python … -m MODULE …`) and a new key. Return it once it answers
    `path` with 200, only with the key. Raises `EngineError` if the server ends early, is not ready in time,
    or answers requests without the key. In these cases the server is killed."""
    for attempt in range(1, STARTS + 1):
        port, key = free_port(), settings.key or secrets.token_hex(32)
        command = list(argv(port))
        # `keyed.py` runs the module instead, and checks the key.
        command[command.index("-m")] = keyed.__file__
        variables, cpus = {**environment, keyed.VARIABLE: key}, cpus_near(settings.gpus)
        process = ServerProcess(name, command, variables, settings.log_path, cpus, settings.held_fds)
        url = f"http://{LOOPBACK}:{port}"
        client = ServerClient(f"{name} at {url}", url, key=key)
        try:
            await process.wait_ready(partial(client.serves, path), settings.ready_s)
            stranger = ServerClient(client.name, client.url)
            try:
                status, _ = await stranger.request("GET", path)
            finally:
                await stranger.close()
            if status != UNAUTHORIZED:
                raise EngineError(
                    f"{client.name} answers without its key (status {status}): this release of the server "
                    "does not serve as this project expects. Use the release that `make engines-gpu` (on a "
                    "CPU: `make engines`) installs"
                )
            return process, client
        except BaseException as error:
            await process.end()
            await client.close()
            taken = isinstance(error, EngineError) and PORT_TAKEN in process.written()
            if not taken or attempt == STARTS:
                raise
    raise AssertionError("the last attempt returns or raises")


async def attached(name: str, settings: ServerSettings, *, path: str) -> ServerClient:
    """Return the server at `settings.url` once it answers `path` with 200. Raises `EngineError` if it does
    not answer in time."""
    assert settings.url is not None
    client = ServerClient(f"{name} at {settings.url}", settings.url, key=settings.key)
    try:
        async with asyncio.timeout(settings.ready_s):
            while not await client.serves(path):  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(ATTACH_PAUSE_S)
    except BaseException as error:
        await client.close()
        if isinstance(error, TimeoutError):
            raise EngineError(
                f"{client.name} (rollout.server.urls) does not serve within {settings.ready_s:.0f} s "
                "(rollout.server.ready_s)"
            ) from error
        raise
    return client
