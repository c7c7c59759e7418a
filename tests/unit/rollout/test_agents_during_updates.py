"""Unmodified clients run a three-turn tool agent while the weights change under it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

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
from tests.unit.gateway.fakes import CHAT, make_tokenizer, openai_of, serving, write_chat_model
from tests.unit.rollout.conftest import Tiny
from tests.unit.rollout.test_local_engine import Steps
from tests.waiting import until


@asynccontextmanager
async def updated(folder: Path) -> AsyncIterator[Logged]:
    """The local engine, with other weights again and again, each time in mid-answer."""
    model, engine = Tiny(folder, noise=0.02), LocalEngine(folder, slots=8, max_model_len=4096)
    await engine.start(model.weights(0))

    async def update() -> None:
        for version in itertools.count(1):
            snapshot, enough = model.weights(version), engine.stats().tokens_total + 40
            await until(lambda n=enough: engine.stats().running and engine.stats().tokens_total > n)
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


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the chat tokenizer, as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("chat")
    write_chat_model(folder)
    return folder


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


async def test_in_a_worker_the_first_words_come_before_the_answer_is_complete(chat_model, monkeypatch):
    """Through everything that stands between an agent and the engine of a job."""
    steps, model, said = Steps(monkeypatch), Tiny(chat_model, noise=0.02), [""] * 4
    replicas = ReplicaSet(lambda _: LocalEngine(chat_model, slots=8, max_model_len=4096))
    await replicas.start(model.weights(0))
    try:
        async with serving(replicas, make_tokenizer()) as (_, ctx, _):
            # Any unit may end an answer, but few do: of many the most go on.
            ctx.sampling = ctx.sampling.__class__(max_new_tokens=40)
            async with ctx.gateway() as session, openai_of(session) as client:
                steps.allow(3)
                chunks = await client.chat.completions.create(**CHAT, n=4, stream=True)
                async for chunk in chunks:
                    said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
                    if any(said):
                        break
                assert replicas.stats().running > 0, "the answers are far from complete"
                await replicas.exchange(model.weights(1))
                steps.allow(100)
                async for chunk in chunks:
                    said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            episode = ctx.builder.build()
    finally:
        await replicas.stop()
    assert len(episode.header.calls) == 4
    assert (episode.min_version, episode.max_version) == (0, 1)
    assert all(said)
