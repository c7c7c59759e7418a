"""What the tests ask a real SGLang server beside the engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.http.keyed import VARIABLE
from rollout_service.engines.sglang.adapter import Loads, RankLoad

LIMIT_S = 300.0
LENGTH = 512
"""Tokens that the server takes."""
KEY = os.environ[VARIABLE]
"""Of all servers of the tests (see `tests/engines/conftest.py`)."""


def endless(name: str) -> GenerateRequest:
    """A request that is under way for as long as a test needs it: under version 0 the likeliest id never is
    the end (`test_an_answer_may_take_all_of_the_models_length`)."""
    return GenerateRequest(name, [4], Sampling(temperature=1.0, top_k=1, max_new_tokens=LENGTH - 12))


async def under_way(engine: HttpEngine, count: int, name: str) -> list[asyncio.Task[GenerateResult]]:
    """So many endless requests `<name>0`, `<name>1` …, once the first has a unit: its stream tells. The load
    of the server is told late, and whoever asks for it may be late too."""
    begun = asyncio.Event()
    first = engine.generate(endless(f"{name}0"), lambda _: begun.set())
    others = [engine.generate(endless(f"{name}{number}")) for number in range(1, count)]
    tasks = [asyncio.create_task(call) for call in (first, *others)]
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    return tasks


async def until(engine: HttpEngine, holds: Callable[[RankLoad], bool]) -> float:
    """Seconds until the server's load is as wanted. It tells its load after each prefill, when it falls idle,
    and after every 15 steps of decoding."""
    began_s, client = time.monotonic(), ServerClient("server", engine.url, key=KEY)
    try:
        while not holds((await client.get("/v1/loads", Loads)).loads[0]):
            assert time.monotonic() - began_s < LIMIT_S
            await asyncio.sleep(0.005)
        return time.monotonic() - began_s
    finally:
        await client.close()


async def in_server(engine: HttpEngine, wanted: Callable[[int], bool]) -> float:
    """Seconds until the number of requests in the server is one that is wanted."""
    return await until(engine, lambda load: wanted(load.num_running_reqs + load.num_waiting_reqs))
