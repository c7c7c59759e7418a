"""A real server sleeps with requests in flight, and continues after it wakes, with newer weights if there are
any. On a CPU neither server can release memory: both take the calls, and vLLM reports its state."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from areal_async.base.versions import VersionTag
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from tests.engines.servers import KEY, Kind, Model
from tests.engines.updates import endless
from tests.waiting import deadline_s

pytestmark = pytest.mark.engine
FIRST = 4  # Units of each answer before the server sleeps
LIMIT_S = deadline_s(60)


async def states_of(kind: Kind, engine: HttpEngine) -> Any:
    """Return whether the server reports that it sleeps; None for SGLang, which does not report it."""
    if kind.name != "vllm":
        return None
    client = ServerClient("server", engine.url, key=KEY)
    try:
        told = await client.get("/is_sleeping", dict)
        _, content = await client.request("GET", "/metrics")
    finally:
        await client.close()
    lines = [line for line in content.decode().splitlines() if line.startswith("vllm:engine_sleep_state")]
    on = {line.partition('sleep_state="')[2].partition('"')[0] for line in lines if line.endswith(" 1.0")}
    return told["is_sleeping"], on


async def slept(kind: Kind, engine: HttpEngine, snapshot: Any = None) -> tuple[list[Any], list[int], Any]:
    """Answers to long greedy requests in whose midst the server slept, their lengths at that time, and the
    server's state then. The last answer is to a request that was made in the server's sleep."""
    told: list[list[int]] = [[] for _ in range(4)]
    asked = [
        asyncio.ensure_future(engine.generate(endless(f"{time.monotonic()}"), each.extend)) for each in told
    ]
    async with asyncio.timeout(LIMIT_S):
        while min(map(len, told)) < FIRST:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await engine.pause()
    await engine.sleep()
    state = await states_of(kind, engine)
    before = [len(each) for each in told]
    late = asyncio.ensure_future(engine.generate(endless("late")))
    assert await engine.device_bytes() > 0
    assert engine.alive()
    assert [len(each) for each in told] == before, "it samples in its sleep"
    assert not late.done()
    await engine.wake()
    if snapshot is not None:
        await engine.load(snapshot)
    await engine.resume()
    return await asyncio.gather(*asked, late), before, state


def assert_greedy(model: Model, answer: Any) -> None:
    """Each unit is the likeliest under the weights of its own version."""
    for epoch, version in set(zip(answer.epochs.tolist(), answer.versions.tolist(), strict=True)):
        likeliest = model.logits(VersionTag("policy", epoch, version), [4], answer).argmax(-1).numpy()
        own = answer.versions == version
        np.testing.assert_array_equal(answer.token_ids[own], likeliest[own])


async def test_requests_outlive_the_sleep_of_a_real_server_and_continue_under_newer_weights(
    owned: tuple[Kind, HttpEngine], model_of: Any
) -> None:
    kind, engine = owned
    model, served = model_of(kind), engine.version
    awake = await states_of(kind, engine)
    answers, _, asleep = await slept(kind, engine)
    for answer in answers:
        assert (set(answer.versions.tolist()), len(answer.token_ids)) == ({served.version}, 500)
        assert_greedy(model, answer)
    newer = model.snapshot(served.version + 1, served.epoch)
    answers, before, _ = await slept(kind, engine, newer)
    *interrupted, late = answers
    assert engine.version == newer.tag
    assert set(late.versions.tolist()) == {newer.tag.version}
    for answer, units in zip(interrupted, before, strict=True):
        assert_greedy(model, answer)
        assert set(answer.versions[:units].tolist()) == {served.version}
        assert answer.versions[-1] == newer.tag.version
    if kind.name == "vllm":
        assert (awake, asleep) == ((False, {"awake"}), (True, {"weights_offloaded"}))
        assert await states_of(kind, engine) == awake
