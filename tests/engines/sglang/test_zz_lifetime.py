"""The server's death and the engine's end. This file comes last: the others share that server."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from rollout_service.engines.base import EngineError, EngineLost
from rollout_service.engines.http.engine import HttpEngine
from tests.engines.conftest import processes
from tests.engines.sglang.served import endless, under_way

pytestmark = pytest.mark.engine


async def test_the_death_of_the_scheduler_is_told_and_the_end_leaves_no_process(
    recompute: HttpEngine,
) -> None:
    victims = processes(recompute.url)
    tasks = await under_way(recompute, 64, "r")
    scheduler = next(p for p in victims if "schedul" in " ".join(p.cmdline()) or "schedul" in p.name())
    os.kill(scheduler.pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(outcome, EngineLost) for outcome in outcomes)
    assert all(not isinstance(o, BaseException) or isinstance(o, EngineLost) for o in outcomes)
    with pytest.raises(EngineLost):
        await recompute.generate(endless("after"))
    assert not recompute.alive()
    await recompute.stop()
    with pytest.raises(EngineError):
        await recompute.generate(endless("stopped"))
    assert not psutil.wait_procs(victims, timeout=60)[1]
