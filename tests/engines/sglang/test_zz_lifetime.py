"""The server's death and the engine's end. This file comes last: the others share that server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, EngineLost, GenerateRequest
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from tests.engines.sglang.served import KEY, in_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
LONG = Sampling(temperature=1.0, max_new_tokens=60)
PROMPT = [5, 6, 7]


def processes(url: str) -> list[psutil.Process]:
    """The server at `url` and all its children."""
    port = int(url.rpartition(":")[2])
    owner = next(
        psutil.Process(c.pid)
        for c in psutil.net_connections("tcp")
        if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN
    )
    return [owner, *owner.children(recursive=True)]


def test_the_death_of_the_scheduler_is_told_and_the_end_leaves_no_process(
    recompute: HttpEngine, run: Callable[..., Any]
) -> None:
    async def body() -> None:
        victims = processes(recompute.url)
        client = ServerClient("server", recompute.url, key=KEY)
        tasks = [
            asyncio.create_task(recompute.generate(GenerateRequest(f"k{i}", PROMPT, LONG))) for i in range(64)
        ]
        await in_server(client, lambda n: n > 0)
        scheduler = next(p for p in victims if "schedul" in " ".join(p.cmdline()) or "schedul" in p.name())
        os.kill(scheduler.pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(outcome, EngineLost) for outcome in outcomes)
        assert all(not isinstance(o, BaseException) or isinstance(o, EngineLost) for o in outcomes)
        with pytest.raises(EngineLost):
            await recompute.generate(GenerateRequest("after", PROMPT, LONG))
        assert not recompute.alive()
        await client.close()
        await recompute.stop()
        with pytest.raises(EngineError):
            await recompute.generate(GenerateRequest("stopped", PROMPT, LONG))
        assert not psutil.wait_procs(victims, timeout=10)[1]

    run(body())
