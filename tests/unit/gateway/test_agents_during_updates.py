"""Unmodified clients run a three-turn tool agent while the weights change under it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import training_rows
from rollout_service.engines.local.engine import LocalEngine
from rollout_service.replicas import ReplicaSet
from tests.unit.gateway.agents import (
    ANSWER,
    TURNS,
    Logged,
    assert_a_tool_agent_was_recorded,
    called_a_tool,
    spans_an_update,
    with_openai,
)
from tests.unit.gateway.fakes import (
    FORGETFUL,
    assert_recorded_is_what_the_engine_said,
    make_tokenizer,
    serving,
)
from tests.unit.rollout.test_streaming import Steps

UPDATE_S = 0.1


class Snapshot:
    """Weights unlike those of any other version."""

    def __init__(self, model: dict[str, torch.Tensor], version: int) -> None:
        noise = torch.Generator().manual_seed(version)
        self.tag = VersionTag("policy", 0, version)
        self.tensors = {
            name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise) for name, tensor in model.items()
        }


@asynccontextmanager
async def updated(folder: Path) -> AsyncIterator[Logged]:
    """The local engine, with other weights every 100 ms."""
    weights = {
        name: tensor.detach()
        for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()
    }
    engine = LocalEngine(folder, slots=8, max_model_len=4096)
    await engine.start(Snapshot(weights, 0))

    async def update() -> None:
        version = 0
        while True:
            version += 1
            snapshot = Snapshot(weights, version)
            await asyncio.sleep(UPDATE_S)
            while not engine.stats().running:  # noqa: ASYNC110 - in mid-answer, on any machine
                await asyncio.sleep(0.001)
            await engine.pause()
            await engine.load(snapshot)
            await engine.resume()

    updates = asyncio.ensure_future(update())
    try:
        yield Logged(engine)
    finally:
        updates.cancel()
        await asyncio.gather(updates, return_exceptions=True)
        await engine.stop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_rows_of_a_tool_agent_are_the_engines_ids(stream: bool, chat_model: Path) -> None:
    tokenizer = make_tokenizer()
    async with (
        updated(chat_model) as engine,
        serving(engine, tokenizer, call_timeout_s=20) as (_, ctx, session),
    ):
        ctx.sampling = ctx.sampling.__class__(max_new_tokens=ANSWER)
        async with ctx.gateway() as session:
            await with_openai(session, stream=stream)
        engine.assert_told_all_along(TURNS if stream else 0)
        episode, log = ctx.builder.build(), engine.log
    assert_a_tool_agent_was_recorded(episode, log)
    assert spans_an_update(episode)
    assert episode.max_version > episode.min_version
    assert called_a_tool(episode)


def test_in_a_worker_the_first_words_come_before_the_answer_is_complete(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through everything that stands between an agent and the engine of a job."""
    steps = Steps(monkeypatch)
    weights = {
        name: tensor.detach()
        for name, tensor in AutoModelForCausalLM.from_pretrained(chat_model).state_dict().items()
    }

    async def main() -> tuple[Any, Any]:
        replicas = ReplicaSet(lambda _: LocalEngine(chat_model, slots=8, max_model_len=4096))
        await replicas.start(Snapshot(weights, 0))
        try:
            async with serving(replicas, make_tokenizer()) as (_, ctx, _):
                # Any unit may end an answer, but few do: of many the most go on.
                ctx.sampling = ctx.sampling.__class__(max_new_tokens=40)
                async with (
                    ctx.gateway() as session,
                    openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=session.api_key) as client,
                ):
                    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "Speak."}], "n": 4}
                    steps.allow(3)
                    chunks = await client.chat.completions.create(**asked, stream=True)
                    said = [""] * 4
                    async for chunk in chunks:
                        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
                        if any(said):
                            break
                    assert replicas.stats().running > 0, "the answers are far from complete"
                    await replicas.exchange(Snapshot(weights, 1))
                    steps.allow(100)
                    async for chunk in chunks:
                        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            return ctx.builder.build(), said
        finally:
            await replicas.stop()

    episode, said = asyncio.run(main())
    assert len(episode.header.calls) == 4
    assert (episode.min_version, episode.max_version) == (0, 1)
    assert all(said)


async def test_a_template_that_drops_text_makes_a_new_root_during_updates(chat_model: Path) -> None:
    """Here the tool calls of earlier answers are what the template forgets."""
    forgetful = make_tokenizer(
        FORGETFUL.replace("m.tool_calls or []", "(m.tool_calls or [] if loop.last else [])")
    )

    async with updated(chat_model) as engine, serving(engine, forgetful) as (_, ctx, session):
        await with_openai(session, stream=False)
        episode, log = ctx.builder.build(), engine.log
    assert_recorded_is_what_the_engine_said(episode, log)
    assert episode.header.metadata["roots_by_reason"].get("template", 0) >= 1
    assert len(training_rows(episode)) == episode.header.metadata["roots"]
