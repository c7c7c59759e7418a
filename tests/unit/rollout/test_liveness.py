"""Whether a server lives: slowness is no death, an ended process is one at once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

from rollout_service.engines.http.process import Liveness, Patience, ServerProcess

PATIENCE = Patience(misses=3, span_s=0.2, pause_s=0.01)
LONG = Patience(misses=3, span_s=600.0, pause_s=0.01)


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
def test_a_server_is_given_up_after_several_misses_over_a_stated_time(
    misses: int, silent_s: float, over: bool
) -> None:
    assert Patience().is_over(misses, silent_s) is over


def test_one_answer_in_time_is_life() -> None:
    probes = Probes(chain([False] * 5, repeat(True)))
    assert asyncio.run(Liveness(probes, None, LONG).confirmed())
    assert probes.count == 6


def test_silence_for_the_stated_time_is_death() -> None:
    began_s = time.monotonic()
    assert not asyncio.run(Liveness(Probes(repeat(False)), None, PATIENCE).confirmed())
    assert time.monotonic() - began_s >= PATIENCE.span_s


def test_an_ended_process_is_dead_at_once(tmp_path: Path) -> None:
    probes = Probes(repeat(False))

    async def body() -> bool:
        process = ServerProcess("it", [sys.executable, "-c", ""], dict(os.environ), tmp_path / "log")
        liveness = Liveness(probes, process, LONG)
        try:
            async with asyncio.timeout(60):
                return await liveness.confirmed()
        finally:
            await process.stop()

    assert not asyncio.run(body())


def test_all_who_ask_meanwhile_share_one_examination() -> None:
    probes = Probes(chain([False, False], repeat(True)))

    async def body() -> list[bool]:
        liveness = Liveness(probes, None, LONG)
        return await asyncio.gather(*(liveness.confirmed() for _ in range(20)))

    assert asyncio.run(body()) == [True] * 20
    assert probes.count == 3


def test_nobody_waits_for_an_examination_that_was_closed() -> None:
    async def body() -> bool:
        liveness = Liveness(Probes(repeat(False)), None, LONG)
        asked = asyncio.create_task(liveness.confirmed())
        await asyncio.sleep(0)
        liveness.close()
        async with asyncio.timeout(60):
            return await asked

    assert not asyncio.run(body())
