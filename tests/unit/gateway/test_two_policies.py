"""Agents of several policies: the model's name says which of them answers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from areal_async.trajectory import EpisodeBuilder, Sampling, seen_by
from rollout_service.workflows import PolicyEngine, Renderer
from tests.unit.gateway.fakes import DEADLINE_S, Scripted, made_gateway, make_context, openai_of


async def test_the_model_names_the_policy_and_each_has_conversations_of_its_own(tokenizer: Any) -> None:
    engines = {
        "coder": Scripted(tokenizer, ["I write.{END}", "Again.{END}"]),
        "tester": Scripted(tokenizer, ["I test.{END}"]),
    }
    policies, agents = ("coder", "tester"), (("coder", 0), ("tester", 1))
    builder = EpisodeBuilder("job", "t", "t#0", 0, policies=policies, agents=agents)
    with made_gateway(tokenizer, policies=("coder", "tester")) as gateway:
        others = {"tester": PolicyEngine(engines["tester"], Renderer(tokenizer), Sampling(max_new_tokens=32))}
        ctx = make_context(engines["coder"], tokenizer, gateway, tokens=64, builder=builder, others=others)
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
