"""Unmodified clients run a three-turn tool agent while the weights change under it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_async.models.answers import Detokenizer
from areal_async.models.tokenizer import load_tokenizer
from rollout_service.engines.local.engine import LocalEngine
from tests.unit.gateway.agents import (
    ANSWER,
    Logged,
    assert_a_tool_agent_was_recorded,
    called_a_tool,
    spans_an_update,
    with_openai,
)
from tests.unit.gateway.fakes import VOCAB, make_tokenizer, serving, write_chat_model
from tests.unit.rollout.conftest import Tiny
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


def test_an_engine_reads_the_text_of_an_answer_as_the_gateway_does(chat_model: Path) -> None:
    """Otherwise an answer that the agent sends back is not recognised, and its path ends."""
    ids = list(range(len(VOCAB)))
    read = Detokenizer(load_tokenizer(chat_model)), Detokenizer(make_tokenizer())
    assert [each.decode([[token] for token in ids]) for each in read] == [["", *VOCAB[1:]]] * 2


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
        episode, log = ctx.builder.build(), engine.log
    assert_a_tool_agent_was_recorded(episode, log)
    assert spans_an_update(episode)
    assert episode.max_version > episode.min_version
    assert called_a_tool(episode)
