"""An answer is in the episode when, and only when, the agent was sent it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import struct
from typing import Any

import httpx
import pytest

from rollout_service.gateway import GatewayError
from rollout_service.gateway.toolcalls import ParsedText, parse
from tests.unit.gateway.fakes import (
    CHAT,
    DEADLINE_S,
    ROUTE,
    TOOL,
    Scripted,
    assert_recorded_is_what_the_engine_said,
    http_of,
    made_gateway,
    make_context,
    openai_of,
    serving,
)
from tests.waiting import until

BROKEN = {
    "half a surrogate pair in an argument": '{"name": "add", "arguments": {"a": "\\ud800"}}',
    "half a surrogate pair in a name": '{"name": "\\udfff", "arguments": {}}',
    "half a surrogate pair in a key": '{"name": "add", "arguments": {"\\ud800": 1}}',
    "lists 3,000 deep": '{"name": "add", "arguments": {"a": ' + "[" * 3000 + "]" * 3000 + "}}",
    "objects 200 deep": '{"name": "add", "arguments": ' + '{"a":' * 200 + "1" + "}" * 200 + "}",
    "brackets that never close": '{"name": "add", "arguments": ' + "[" * 3000,
    "not a number": '{"name": "add", "arguments": {"a": NaN}}',
    "an infinite number": '{"name": "add", "arguments": {"a": 1e999}}',
    "5,000 digits": '{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", ["half a surrogate pair in an argument", "lists 3,000 deep"])
async def test_a_tool_call_that_no_reply_could_carry_is_text(what, stream, tokenizer):
    said = f"<tool_call>{BROKEN[what]}</tool_call>"

    talks = Scripted(tokenizer, [said + "{END}"])
    async with serving(talks, tokenizer) as (gateway, _, _session):
        ctx = make_context(talks, tokenizer, gateway, tokens=10_000)
        async with ctx.gateway() as session, openai_of(session) as client:
            asked = {**CHAT, "tools": [TOOL]}
            if stream:
                async with client.chat.completions.stream(**asked) as chunks:
                    choice = (await chunks.get_final_completion()).choices[0]
            else:
                choice = (await client.chat.completions.create(**asked)).choices[0]
            assert (choice.message.content, choice.finish_reason) == (said, "stop")
            assert not choice.message.tool_calls
            assert session.calls == 1
        episode, log = ctx.builder.build(), talks.log
    assert_recorded_is_what_the_engine_said(episode, log)


@pytest.mark.parametrize("what", BROKEN)
def test_so_it_is_in_every_family(what: str) -> None:
    hermes = f"<tool_call>{BROKEN[what]}</tool_call>"
    assert parse(hermes, "hermes") == ParsedText(hermes)
    llama = "<|python_tag|>" + BROKEN[what].replace("arguments", "parameters")
    assert parse(llama, "llama") == ParsedText(llama)


def called_with(arguments: str) -> str:
    """A history in which the agent called a tool with this text."""
    call = {"id": "c", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return json.dumps(CHAT | {"messages": [*CHAT["messages"], answer]})


NESTED = {
    "body": '{"messages": ' + "[" * 3000 + "]" * 3000 + "}",
    "metadata": json.dumps(CHAT)[:-1] + ', "metadata": ' + '{"a":' * 300 + "1" + "}" * 300 + "}",
    "tool": json.dumps(CHAT)[:-1]
    + ', "tools": [{"type": "function", "function": {"name": "f", "parameters": '
    + ('{"properties":' * 400 + "{}" + "}" * 400 + "}}]}"),
    "arguments given as text": called_with('{"a":' + "[" * 3000),
    "half a surrogate pair": '{"messages": [{"role": "user", "content": "\\ud800\\u0041"}]}',
    "half a surrogate pair in arguments": called_with('{"a": "\\ud800"}'),
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
}


@pytest.mark.parametrize("what", NESTED)
async def test_a_request_that_cannot_be_carried_is_a_sentence(what, tokenizer, caplog):
    async with serving(Scripted(tokenizer), tokenizer) as (_, _ctx, session), http_of(session) as http:
        reply = await http.post(ROUTE, content=NESTED[what])
        # Arguments are text to the API: what is no JSON in them is shown to the model as it is.
        assert reply.status_code == (200 if "arguments" in what else 400)
        if reply.status_code == 400:
            assert len(reply.json()["error"]["message"]) < 300
        assert (await http.post(ROUTE, json=CHAT)).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def raw_client(session: Any, body: dict[str, Any], *, receive_bytes: int = 0) -> socket.socket:
    """A connection over which a request for a chat completion was sent."""
    port = int(session.origin.rpartition(":")[2])
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(("127.0.0.1", port))
    content = json.dumps(body).encode()
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Authorization: Bearer {session.api_key}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return client


def vanish(client: socket.socket) -> None:
    """Close with a reset, as the kernel does for a process that was killed."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_whose_client_left_meanwhile_is_not_recorded(stream: bool, tokenizer: Any) -> None:
    """The client goes in the very moment that the engine answers."""

    class Late(Scripted):
        client: socket.socket

        def result(self, request: Any, said: str) -> Any:
            result = super().result(request, said)
            if said == "late{END}":
                vanish(self.client)
            return result

    engine = Late(tokenizer, ["late{END}", "early{END}"])
    async with serving(engine, tokenizer) as (gateway, ctx, session), http_of(session) as http:
        engine.client = await asyncio.to_thread(raw_client, session, CHAT | {"stream": stream})
        await until(lambda: engine.log and not session.open and not gateway.started.server.state.tasks)
        assert session.calls == 0
        assert (await http.post(ROUTE, json=CHAT)).status_code == 200
        assert session.calls == 1
        engine.log.pop(0)
        episode, log = ctx.builder.build(), engine.log
    assert_recorded_is_what_the_engine_said(episode, log)
    assert episode.header.response_text == "early"


@pytest.mark.parametrize("reads", [True, False])
async def test_an_answer_is_recorded_when_its_last_byte_has_left(reads: bool, tokenizer: Any) -> None:
    """It is longer than what the kernel holds for a client that does not read."""

    engine = Scripted(tokenizer, ["x" * 9000 + "{END}"] * 8)
    async with serving(engine, tokenizer) as (gateway, _, _session):
        ctx = make_context(engine, tokenizer, gateway, tokens=10_000)
        async with ctx.gateway() as session:
            body = CHAT | {"logprobs": True, "n": 8}
            client = await asyncio.to_thread(raw_client, session, body, receive_bytes=4096)
            server = gateway.started.server
            await until(lambda: any(c.transport.get_write_buffer_size() for c in server.connections))
            assert session.calls == 0, "some of it is still here"
            if reads:
                seen = b""
                while b'"usage":' not in seen[-400:]:
                    seen += await asyncio.to_thread(client.recv, 1 << 20)
            client.close()
            await until(lambda: not server.state.tasks)
            assert session.calls == int(reads)


async def test_an_agents_calls_are_greedy_and_not_trained_in_an_episode_that_is_a_baseline(tokenizer):
    talks = Scripted(tokenizer, ["yes{END}"])
    async with serving(talks, tokenizer) as (gateway, _, _session):
        ctx = make_context(talks, tokenizer, gateway, greedy=True)
        async with ctx.gateway() as session, openai_of(session) as client:
            await client.chat.completions.create(**CHAT, temperature=0.7)
        episode = ctx.builder.build()
    (call,) = episode.header.calls
    assert (call.sampling.temperature, episode.n_sampled) == (0.0, 0)
    assert_recorded_is_what_the_engine_said(episode, talks.log)


async def test_an_answer_that_was_sent_and_cannot_be_recorded_fails_the_episode(tokenizer: Any) -> None:
    class Torn(Scripted):
        def result(self, request: Any, said: str) -> Any:
            result = super().result(request, said)
            return dataclasses.replace(result, versions=result.versions[:-1])

    engine = Torn(tokenizer)
    async with serving(engine, tokenizer) as (gateway, _, _session):

        async def episode() -> None:
            async with make_context(engine, tokenizer, gateway).gateway() as session:
                async with http_of(session) as http:
                    reply = await http.post(ROUTE, json=CHAT)
                    assert reply.status_code == 200

        with pytest.raises(GatewayError, match="do not match"):
            await episode()


async def test_calls_that_end_together_are_recorded_one_by_one(tokenizer: Any) -> None:
    """The record of the second episode's call fails, and those of the others do not."""
    together = asyncio.Event()

    async def gate(_: Any) -> None:
        if len(engine.begun) == 3:
            together.set()
        await together.wait()

    engine = Scripted(tokenizer)
    engine.gate = gate
    with made_gateway(tokenizer) as gateway:
        episodes = [make_context(engine, tokenizer, gateway, sample=sample) for sample in range(3)]
        ended: list[str] = []

        async def call(ctx: Any) -> None:
            try:
                async with ctx.gateway() as session, http_of(session) as http:
                    if ctx.sample == 1:
                        ctx.answered = None  # what records an answer
                    await http.post(ROUTE, json=CHAT)
                    ended.append(f"{ctx.sample}: {session.calls}")
            except (GatewayError, httpx.RemoteProtocolError):
                ended.append(f"{ctx.sample} failed")

        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*map(call, episodes))
        finally:
            await gateway.close()
    assert sorted(ended) == ["0: 1", "1 failed", "2: 1"]
