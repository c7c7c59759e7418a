"""A server's process: waited for, explained, and never left behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from areal_async.runtime.status import board
from rollout_service.engines.base import EngineError
from rollout_service.engines.http.process import ServerProcess, free_port

DEADLINE_S = 60.0
# A server with a child of its own; it says so in the file given by its first argument.
SERVER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1] + ".part").write_text(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
print("serving", flush=True)
time.sleep(600)
"""


def server(tmp_path: Path, code: str = SERVER) -> ServerProcess:
    argv = [sys.executable, "-c", code, str(tmp_path / "pids")]
    return ServerProcess("the test server", argv, dict(os.environ), tmp_path / "logs" / "server.log")


def until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_server_is_waited_for_and_ended_with_its_children(tmp_path: Path) -> None:
    async def body() -> list[int]:
        process = server(tmp_path)

        async def serves() -> bool:
            return (tmp_path / "pids").exists()

        await process.wait_ready(serves, DEADLINE_S)
        assert process.alive
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        await process.stop()
        assert not process.alive
        return pids

    for pid in asyncio.run(body()):
        until(lambda pid=pid: is_gone(pid))


def test_that_a_server_loads_is_said_to_who_asks_for_the_status(tmp_path: Path) -> None:
    async def body() -> None:
        process = server(tmp_path)
        try:
            await process.wait_ready(served, DEADLINE_S)
        finally:
            await process.stop()

    waiting: list[dict[str, str]] = []

    async def served() -> bool:
        waiting.append(board.status("rollout-0", serves=False).waiting_for)
        return True

    asyncio.run(body())
    assert waiting == [{"server": "its test server to load"}]
    assert board.status("rollout-0", serves=False).waiting_for == {}


async def test_a_server_that_ends_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text("words of an earlier server\n")
    process = server(tmp_path, "print('no such model'); raise SystemExit(3)")

    async def serves() -> bool:
        return False

    with pytest.raises(EngineError, match="no such model") as caught:
        await process.wait_ready(serves, DEADLINE_S)
    assert "earlier" not in str(caught.value)


async def test_a_server_that_takes_too_long_is_ended_and_the_field_named(tmp_path: Path) -> None:
    process = server(tmp_path)

    async def serves() -> bool:
        return False

    with pytest.raises(EngineError, match=r"rollout\.server\.ready_s"):
        await process.wait_ready(serves, 0.3)
    until(lambda: not process.alive)


async def test_a_command_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    process = ServerProcess("it", ["/no/such/python"], {}, tmp_path / "log")

    async def serves() -> bool:
        return False

    with pytest.raises(EngineError, match="/no/such/python"):
        await process.wait_ready(serves, DEADLINE_S)


def test_free_ports_are_free() -> None:
    assert 0 < free_port() < 65536
