"""Agents of several policies: the model's name says which of them answers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from areal_async.trajectory import EpisodeBuilder, Sampling, seen_by
from rollout_service.workflows import Context, PolicyEngine, Renderer
from tests.unit.gateway.fakes import DEADLINE_S, Scripted, made_gateway, openai_of


async def test_the_model_names_the_policy_and_each_has_conversations_of_its_own(tokenizer: Any) -> None:
    engines = {
        "coder": Scripted(tokenizer, ["I write.{END}", "Again.{END}"]),
        "tester": Scripted(tokenizer, ["I test.{END}"]),
    }
    builder = EpisodeBuilder(
        "job", "t", "t#0", 0, policies=("coder", "tester"), agents=(("coder", 0), ("tester", 1))
    )
    render = Renderer(tokenizer)
    with made_gateway(tokenizer, policies=("coder", "tester")) as gateway:
        ctx = Context(
            engines["coder"],
            render,
            builder,
            episode_id="t#0.0",
            sampling=Sampling(max_new_tokens=64),
            seed=5,
            gateway=gateway,
            others={"tester": PolicyEngine(engines["tester"], render, Sampling(max_new_tokens=32))},
        )
        try:
            async with asyncio.timeout(DEADLINE_S), ctx.gateway() as session, openai_of(session) as client:
                models = (await client.models.list()).data
                assert [model.id for model in models] == ["coder", "tester"]
                messages: list[Any] = [{"role": "user", "content": "Go."}]
                for model in ("coder", "openai/tester", "coder"):
                    reply = await client.chat.completions.create(model=model, messages=messages)
                    if model == "coder":
                        messages += [
                            {"role": "assistant", "content": reply.choices[0].message.content},
                            {"role": "user", "content": "And?"},
                        ]
                with pytest.raises(openai.NotFoundError, match="the models here are coder, tester"):
                    await client.chat.completions.create(model="gpt-4", messages=messages)
        finally:
            await gateway.close()
    for policy, limit, calls in (("coder", 64, 2), ("tester", 32, 1)):
        asked = [request for request, _ in engines[policy].log]
        assert [request.sampling.max_new_tokens for request in asked] == [limit] * calls
        said = sum(len(result.token_ids) for _, result in engines[policy].log)
        assert seen_by(builder.build(), policy).n_sampled == said
    header = builder.build().header
    assert [header.policies[call.policy] for call in header.calls] == ["coder", "tester", "coder"]
    assert builder.build().segments.agent.tolist() == [0, 0, 1, 1, 0, 0]
    assert builder.build().segments.parent.tolist()[4] == 1
