"""Unmodified clients against real servers: tool agents, streaming and not, while the weights change."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from agreement import Snapshots, job_for

from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines import make_engine
from rollout_service.replicas import exchange
from tests.unit.gateway.agents import (
    ANSWER,
    Logged,
    assert_a_tool_agent_was_recorded,
    called_a_tool,
    spans_an_update,
    with_openai,
)
from tests.unit.gateway.fakes import make_tokenizer, serving, write_chat_model

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
ROOM = 16_384
"""Tokens of a conversation in which each token of two answers calls a tool, whose results take 43 each."""
UPDATE_S = 0.05  # Pace of the trainer that is played; nothing waits for it


async def updates(engine: Any, snapshots: Snapshots) -> None:
    """Other weights again and again, each time in mid-answer."""
    for version in itertools.count(1):
        snapshot = await asyncio.to_thread(snapshots.write, VersionTag("policy", 0, version))
        await asyncio.sleep(UPDATE_S)
        while not engine.stats().running:  # noqa: ASYNC110 - in mid-answer, on any machine
            await asyncio.sleep(0.001)
        await exchange(engine, snapshot)


async def recorded(engine: Any, stream: bool) -> tuple[Any, Logged]:
    """The episode of an agent, and what the engine was asked and said for it."""
    logged, tokenizer = Logged(engine), make_tokenizer()
    async with serving(logged, tokenizer) as (_, ctx, _):
        ctx.sampling = Sampling(max_new_tokens=ANSWER)
        async with ctx.gateway() as session:
            await with_openai(session, stream=stream)
        return ctx.builder.build(), logged


@pytest.mark.parametrize("name", ["sglang", "vllm"])
async def test_the_rows_of_tool_agents_equal_the_servers_ids(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_chat_model(model, hidden_size=128)
    snapshots = Snapshots(model, tmp_path / "snapshots", noise=0.3)
    job = job_for(name, model, max_model_len=ROOM)
    engine = make_engine(job, slots=8, activity="agents")

    try:
        await engine.start(snapshots.write(VersionTag("policy", 0, 0)))
        updating = asyncio.create_task(updates(engine, snapshots))
        try:
            found = [await recorded(engine, stream) for stream in (False, True, False, True)]
        finally:
            updating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await updating
    finally:
        await engine.stop()
    for episode, logged in found:
        assert_a_tool_agent_was_recorded(episode, logged.log)
    # Of all: a random model's answers may be short, and one of them may fall between two updates.
    assert any(spans_an_update(episode) for episode, _ in found)
    assert any(called_a_tool(episode) for episode, _ in found)
