"""What the API says: replies, streams, refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rollout_service.engines.base import EngineError, RequestError
from rollout_service.gateway.openai import plain, read
from rollout_service.gateway.requests import check_json
from tests.unit.gateway.fakes import (
    CALLS,
    CHAT,
    KEEPING,
    ROUTE,
    TOOL,
    Scripted,
    http_of,
    make_tokenizer,
    openai_of,
    serving,
)

SAID = f"Let me. {CALLS[0]}{CALLS[1]}{{END}}"


@asynccontextmanager
async def calling(engine: Scripted, **how: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A plain client that has the key, and its session."""
    async with serving(engine, engine.tokenizer, **how) as (_, _ctx, session):
        async with http_of(session) as http:
            yield http, session


async def test_a_stream_says_what_it_would_have_said_whole(tokenizer: Any) -> None:
    talks = Scripted(tokenizer, [SAID, SAID])
    async with calling(talks) as (_http, session), openai_of(session) as client:
        models = [model.id for model in (await client.models.list()).data]
        asked: Any = {**CHAT, "tools": [TOOL], "logprobs": True, "stream_options": None}
        whole = await client.chat.completions.create(**asked)
        asked["stream_options"] = {"include_usage": True}
        deltas = []
        async with client.chat.completions.stream(**asked) as chunks:
            async for event in chunks:
                if event.type == "content.delta" and event.delta:
                    deltas.append(event.delta)
            streamed = await chunks.get_final_completion()
    for completion in (whole, streamed):
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me. "
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        assert calls == [("add", '{"a":1,"b":2}'), ("add", '{"a":3,"b":4}')]
        assert [t.token for t in choice.logprobs.content] == [*"Let me. ", *CALLS[:2], "<|im_end|>"]
        assert choice.logprobs.content[1].logprob < 0
        assert completion.usage.completion_tokens == 11
    assert deltas == ["Let me. "]
    assert models == ["policy"]


@pytest.mark.parametrize(
    ("said", "asked", "reason"),
    [
        ("yes{END}", {}, "stop"),
        ("yes and no{END}", {"max_tokens": 3}, "length"),
        ("yes#", {"stop": ["!", "#"]}, "stop"),
    ],
)
async def test_why_an_answer_ended(said: str, asked: Any, reason: str, tokenizer: Any) -> None:
    async with calling(Scripted(tokenizer, [said])) as (http, _session):
        reply = (await http.post(ROUTE, json={**CHAT, **asked})).json()
    assert reply["choices"][0]["finish_reason"] == reason
    assert reply["choices"][0]["message"]["content"] == "yes"


async def test_sampling_is_what_was_asked_for(tokenizer: Any) -> None:
    engine = Scripted(tokenizer)

    async with calling(engine) as (http, _session):
        for more in (
            {"temperature": 0.5, "max_completion_tokens": 7, "seed": 3, "stop": "x"},
            {"max_tokens": 10**6},
        ):
            assert (await http.post(ROUTE, json={**CHAT, **more})).status_code == 200
        for _ in range(2):
            await http.post(ROUTE, json={**CHAT, "seed": 3, "n": 2})
    first, second, *seeded = (request.sampling for request, _ in engine.log)
    assert (first.temperature, first.max_new_tokens, first.stop) == (0.5, 7, ("x",))
    assert (second.temperature, second.max_new_tokens, second.stop) == (1.0, 128, ())
    assert first.seed == seeded[0].seed == seeded[2].seed != seeded[1].seed == seeded[3].seed


async def test_what_cannot_be_trained_on_is_refused_or_ignored_as_the_job_says(tokenizer: Any) -> None:
    async def statuses(engine: Any, **how: Any) -> list[int]:
        bodies: list[Any] = [{"temperature": 0}, {"top_p": 0.5}, {"top_k": 3}, {"top_p": 1, "top_k": -1}]
        async with calling(engine, **how) as (http, _):
            replies = [await http.post(ROUTE, json={**CHAT, **body}) for body in bodies]
        return [reply.status_code for reply in replies]

    assert await statuses(Scripted(tokenizer)) == [400, 400, 400, 200]
    assert await statuses(Scripted(tokenizer), trains=False) == [200] * 4
    engine = Scripted(tokenizer)
    assert await statuses(engine, sampling="job") == [200] * 4
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r, _ in engine.log} == {
        (1.0, 1.0, 0)
    }


TABLE = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))


async def test_a_body_is_refused_by_field(tokenizer: Any) -> None:
    engine = Scripted(tokenizer)
    async with calling(engine) as (http, _):
        for field, change in TABLE["refused"]:
            reply = await http.post(ROUTE, json={**CHAT, **change})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, field)
            assert error["type"] == "invalid_request_error"
            assert error["message"]
    assert not engine.begun


async def test_harmless_fields_are_ignored(tokenizer: Any) -> None:
    async with calling(Scripted(tokenizer)) as (http, _):
        assert (await http.post(ROUTE, json={**CHAT, **TABLE["ignored"]})).status_code == 200


async def test_failures_of_the_engine_have_their_status(tokenizer: Any) -> None:
    engine = Scripted(tokenizer)

    async with calling(engine) as (http, session):
        found = []
        for fail in (RequestError("no"), EngineError("lost"), None):
            engine.fail = fail
            for stream in (False, True):
                reply = await http.post(ROUTE, json={**CHAT, "stream": stream})
                found.append(reply.status_code)
        long = {"role": "user", "content": "x" * 5000}
        found.append((await http.post(ROUTE, json={**CHAT, "messages": [long]})).status_code)
        found.append((await http.post(ROUTE, content=b"{")).status_code)
        found.append((await http.post(ROUTE, content=b"[]")).status_code)
        found.append((await http.get(ROUTE)).status_code)
        found.append((await http.post("/v1/embeddings", json={})).status_code)
    assert [*found, session.calls] == [400, 400, 503, 503, 200, 200, 400, 400, 400, 405, 404, 2]


async def test_tools_need_a_template_that_has_them(tokenizer: Any) -> None:
    plain = make_tokenizer(KEEPING.replace("tools", "toys").replace("tool_call>", "call>"))

    async with calling(Scripted(plain)) as (http, _session):
        reply = await http.post(ROUTE, json={**CHAT, "tools": [TOOL]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools"


async def test_a_call_after_a_stop_text_is_none(tokenizer: Any) -> None:
    async with calling(Scripted(tokenizer, [f"{CALLS[0]}##{CALLS[1]}"])) as (http, _session):
        reply = (await http.post(ROUTE, json={**CHAT, "tools": [TOOL], "stop": "##"})).json()
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a":1,"b":2}'


async def test_without_tools_to_choose_a_call_is_text(tokenizer: Any) -> None:
    async with calling(Scripted(tokenizer, [CALLS[0] + "{END}"])) as (http, _session):
        asked = {**CHAT, "tools": [TOOL], "tool_choice": "none"}
        choice = (await http.post(ROUTE, json=asked)).json()["choices"][0]
    assert choice["message"]["content"] == CALLS[0]
    assert choice["finish_reason"] == "stop"


async def test_an_answer_that_the_engine_ended_is_no_answer(tokenizer: Any) -> None:
    class Ending(Scripted):
        def result(self, request: Any, said: str) -> Any:
            result = super().result(request, said)
            return dataclasses.replace(result, finish_reason="abort" if "half" in said else "stop")

    async with calling(Ending(tokenizer, ["whole{END}", "half"])) as (http, session):
        reply = await http.post(ROUTE, json={**CHAT, "n": 2})
    assert (reply.status_code, session.calls) == (503, 0)


PLAIN: dict[str, Any] = CHAT | {"n": 2, "temperature": 0.5, "stop": ["x"], "seed": 3, "max_tokens": 7}
DEEP: Any = functools.reduce(lambda inner, _: {"properties": inner}, range(64), {})


@pytest.mark.parametrize(
    ("more", "is_plain"),
    [
        ({}, True),
        ({"tools": [TOOL]}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"user": "me"}, False),
        ({"temperature": None}, True),
        ({"n": "two"}, False),
        ({"n": True}, False),
        ({"unknown": 1}, False),
        ({"messages": []}, False),
        ({"messages": [{"role": "assistant", "content": None, "refusal": None}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, False),
        ({"chat_template_kwargs": DEEP}, False),
    ],
)
def test_a_body_of_plain_fields_is_read_as_any_other_is(more: dict[str, Any], is_plain: bool) -> None:
    raw = json.dumps(PLAIN | more).encode()
    body = plain(raw)
    assert (body is not None) == is_plain
    if body is not None:
        check_json(json.loads(raw))
        assert body == read(json.loads(raw))
