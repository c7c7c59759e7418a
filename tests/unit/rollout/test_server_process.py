"""A server's process: waited for, explained, never left behind. Slowness is no death, an ended process is
one at once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import chain, repeat
from pathlib import Path

import pytest

from areal_async.rpc.board import board
from rollout_service.engines.base import EngineError
from rollout_service.engines.http.process import PORT_TAKEN, Liveness, Patience, ServerProcess
from tests.processes import is_gone
from tests.unit.rollout.fakes import eventually
from tests.waiting import deadline_s

DEADLINE_S = deadline_s(120)
PATIENCE = Patience(misses=3, span_s=0.2, pause_s=0.01)
LONG = Patience(misses=3, span_s=600.0, pause_s=0.01)
# A server with a child of its own; it says so in the file given by its first argument.
SERVER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1] + ".part").write_text(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
print("serving", flush=True)
time.sleep(600)
"""


@asynccontextmanager
async def server(
    tmp_path: Path, code: str = SERVER, python: str = sys.executable
) -> AsyncIterator[ServerProcess]:
    argv, log = [python, "-c", code, str(tmp_path / "pids")], tmp_path / "logs" / "server.log"
    process = ServerProcess("the test server", argv, dict(os.environ), log)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process
    finally:
        await process.stop()


async def never() -> bool:
    return False


async def test_a_server_is_waited_for_and_ended_with_its_children(tmp_path: Path) -> None:
    waiting: list[dict[str, str]] = []

    async def serves() -> bool:
        waiting.append(board.status("rollout-0", serves=False).waiting_for)
        return (tmp_path / "pids").exists()

    async with server(tmp_path) as process:
        await process.wait_ready(serves, DEADLINE_S)
        assert process.alive
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        await process.end()
        assert not process.alive
        assert all(map(is_gone, pids))
    # That it loads is said to who asks for the status.
    assert waiting[0] == {"server": "its test server to load"}
    assert board.status("rollout-0", serves=False).waiting_for == {}


@pytest.mark.parametrize("said", ["EADDRINUSE: Address already in use", "out of memory"])
async def test_a_server_that_ends_early_shows_the_end_of_its_log_and_whose_its_port_was(said, tmp_path):
    """A server says it of its processes' ports too, long before the end of its log."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text("an earlier server: address already in use\n")
    code = f"print({said!r}); print('a line of a long trace\\n' * 200); raise SystemExit(3)"
    async with server(tmp_path, code) as process:
        with pytest.raises(EngineError, match=r"(?s)ended before.*a line of a long trace") as caught:
            await process.wait_ready(never, DEADLINE_S)
        assert (PORT_TAKEN in process.written()) == ("in use" in said)
    assert "earlier" not in str(caught.value)


async def test_a_server_that_takes_too_long_is_ended_and_the_field_named(tmp_path: Path) -> None:
    async with server(tmp_path) as process:
        with pytest.raises(EngineError, match=r"rollout\.server\.ready_s"):
            await process.wait_ready(never, 0.3)
        await eventually(lambda: not process.alive)


async def test_a_command_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    async with server(tmp_path, python="/no/such/python") as process:
        with pytest.raises(EngineError, match="/no/such/python"):
            await process.wait_ready(never, DEADLINE_S)


# --- does it live? ---------------------------------------------------------------------------------------


class Probes:
    """Answers as it is told, and counts."""

    def __init__(self, answers: Iterator[bool]) -> None:
        self.count = 0
        self._answers = answers

    async def __call__(self) -> bool:
        self.count += 1
        return next(self._answers)


@pytest.mark.parametrize(
    ("misses", "silent_s", "over"),
    [(1, 100.0, False), (2, 100.0, False), (3, 19.9, False), (3, 20.0, True), (90, 19.0, False)],
)
def test_a_server_is_given_up_after_several_misses_over_a_stated_time(misses, silent_s, over):
    assert Patience().is_over(misses, silent_s) is over


async def test_one_answer_in_time_is_life_and_all_who_ask_meanwhile_share_one_examination() -> None:
    probes = Probes(chain([False] * 5, repeat(True)))
    liveness = Liveness(probes, None, LONG)
    assert await asyncio.gather(*(liveness.confirmed() for _ in range(20))) == [True] * 20
    assert probes.count == 6


async def test_silence_for_the_stated_time_is_death() -> None:
    began_s = time.monotonic()
    assert not await Liveness(never, None, PATIENCE).confirmed()
    assert time.monotonic() - began_s >= PATIENCE.span_s


async def test_an_ended_process_is_dead_at_once(tmp_path: Path) -> None:
    async with server(tmp_path, "") as process:
        assert not await Liveness(never, process, LONG).confirmed()


async def test_nobody_waits_for_an_examination_that_was_closed() -> None:
    liveness = Liveness(never, None, LONG)
    asked = asyncio.create_task(liveness.confirmed())
    await asyncio.sleep(0)
    liveness.close()
    async with asyncio.timeout(DEADLINE_S):
        assert not await asked
