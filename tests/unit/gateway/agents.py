"""An agent as one would write it for OpenAI, and what must be known of it afterwards."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai

from areal_async.trajectory import SegmentKind, training_rows
from tests.unit.gateway.fakes import CALLS, VOCAB, assert_recorded_is_what_the_engine_said

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TURNS = 3
ANSWER = 160
"""Tokens of an answer: enough for several updates to fall into one."""


class Logged:
    """An engine, and everything it was asked and said."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.log: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Any) -> Any:
        result = await self._engine.generate(request)
        self.log.append((request, result))
        return result


def tool(name: str, arguments: dict[str, Any]) -> str:
    return str(sum(arguments.values())) if name == "add" else "no such tool"


async def with_openai(session: Any, *, stream: bool) -> None:
    """An agent as one would write it for OpenAI, with its plain client."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2?"}]
    async with openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=session.api_key) as client:
        for _ in range(TURNS):
            asked: dict[str, Any] = {
                "model": "gpt-x",
                "messages": messages,
                "tools": tools,
                "max_tokens": ANSWER,
            }
            if stream:
                async with client.chat.completions.stream(**asked) as chunks:
                    async for _chunk in chunks:
                        pass
                    message = (await chunks.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or []:
                value = tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
            if not message.tool_calls:
                messages.append({"role": "user", "content": "Use the tool."})


def assert_a_tool_agent_was_recorded(episode: Any, log: list[Any]) -> None:
    """Its one row is what the engine was asked and said."""
    assert_recorded_is_what_the_engine_said(episode, log)
    assert len(log) == TURNS
    row, *others = training_rows(episode)
    said = [
        ("".join(VOCAB[each] for each in ids), why)
        for ids, why in ((r.token_ids, r.finish_reason) for _, r in log)
    ]
    assert not others, (said, episode.header.metadata)
    request, result = log[-1]
    assert row.token_ids.tolist() == [*request.prompt_ids, *result.token_ids]
    assert row.mask.sum() == sum(len(result.token_ids) for _, result in log)
    assert episode.header.metadata["roots"] == 1


def spans_an_update(episode: Any) -> bool:
    """Whether the weights changed in the middle of one of its answers."""
    return any(
        len(np.unique(episode.units.version[start : start + length])) > 1
        for kind, start, length in zip(
            episode.segments.kind, episode.segments.offset, episode.segments.length, strict=True
        )
        if kind == SegmentKind.SAMPLED
    )


def called_a_tool(episode: Any) -> bool:
    """Whether the model called one, and the agent answered."""
    (row,) = training_rows(episode)
    calls = {VOCAB.index(call) for call in CALLS} & set(row.token_ids[row.mask == 1].tolist())
    return bool(calls) and SegmentKind.TOOL in episode.segments.kind
