"""Recorded paths go on after the sampled ids, or end: never anything between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from areal_async.trajectory import SegmentKind, training_rows
from tests.unit.gateway.fakes import (
    CALLS,
    EOS,
    FORGETFUL,
    SHORTENING,
    TEMPLATE,
    Scripted,
    assert_recorded_is_what_the_engine_said,
    make_tokenizer,
    openai_of,
    serving,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@asynccontextmanager
async def talking(tokenizer: Any, *script: str) -> AsyncIterator[Any]:
    """An OpenAI `client`, the `engine`, and after the block the `episode`, which is what the engine said."""
    talk = SimpleNamespace(engine=Scripted(tokenizer, script))
    async with serving(talk.engine, tokenizer) as (_, ctx, session):
        async with openai_of(session) as talk.client:
            yield talk
    talk.episode = ctx.builder.build()
    assert_recorded_is_what_the_engine_said(talk.episode, talk.engine.log)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(talk: Any, messages: list[Any], **more: Any) -> Any:
    reply = await talk.client.chat.completions.create(model="any", messages=messages, **more)
    return reply.choices[0].message


async def test_a_conversation_is_one_path_of_the_sampled_ids(tokenizer: Any) -> None:
    script = [f"Let me see. {CALLS[0]}{{END}}", "It is 3.{END}", f"{CALLS[1]}"]
    messages: list[Any] = [{"role": "system", "content": "Add."}, user("1+2?")]
    async with talking(tokenizer, *script) as talk:
        for n in range(3):
            message = await ask(talk, messages, tools=[TOOL])
            calls = message.tool_calls or []
            answers = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
            messages += [message, *(answers or [user(f"and {n}?")])]
    episode = talk.episode
    assert len(training_rows(episode)) == 1
    kinds = [SegmentKind(kind).name for kind in episode.segments.kind]
    assert kinds == ["PROMPT", "SAMPLED", "TOOL", "SAMPLED", "ENVIRONMENT", "SAMPLED"]
    assert episode.header.metadata["roots"] == 1
    text = tokenizer.decode(episode.units.token_id.tolist())
    assert "22" not in text
    assert text.startswith("<|im_start|>system\nAdd.\n# Tools\n")
    assert text.endswith(
        f"1+2?<|im_end|>\n<|im_start|>assistant\nLet me see. {CALLS[0]}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>\n"
        f"<|im_start|>user\nand 1?<|im_end|>\n<|im_start|>assistant\n{CALLS[1]}"
    )
    assert episode.header.prompt_text.endswith("1+2?<|im_end|>\n<|im_start|>assistant\n")
    assert episode.segments.turn.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("said", "asked", "shown", "path"),
    [
        ("abcdefgh{END}", {"max_tokens": 4}, "abcd", "abcd"),
        ("Act. Obs:", {"stop": ["Obs:"]}, "Act. ", "Act. Obs:"),
        ("yes<pad>", {}, "yes", "yes<pad>"),
    ],
    ids=["cut by its length", "a stop text stays though the agent does not see it", "another end token"],
)
async def test_a_turn_is_closed_as_the_template_closes_it(said, asked, shown, path, tokenizer):
    async with talking(tokenizer, said, "ok{END}") as talk:
        message = await ask(talk, [user("go")], **asked)
        assert message.content == shown
        repeated = {"role": "assistant", "content": shown.strip()}
        await ask(talk, [user("go"), repeated, user("on")])
    for ids in (talk.engine.log[1][0].prompt_ids, talk.episode.units.token_id):
        assert f"{path}<|im_end|>\n<|im_start|>user\non<|im_end|>" in tokenizer.decode(ids.tolist())
    assert (talk.episode.units.token_id == EOS).sum() == 4
    assert talk.episode.header.metadata["roots"] == 1


@pytest.mark.parametrize(
    ("template", "roots"),
    [(None, {"new": 1}), (FORGETFUL, {"new": 1, "template": 1}), (SHORTENING, {"new": 1, "template": 1})],
)
async def test_a_template_that_drops_text_makes_a_new_root_and_is_counted(template, roots, tokenizer):
    tokenizer = tokenizer if template is None else make_tokenizer(template)
    async with talking(tokenizer, "<think>hm</think>yes{END}", "ok{END}") as talk:
        message = await ask(talk, [user("go")])
        assert message.content == "<think>hm</think>yes"
        await ask(talk, [user("go"), message, user("on")])
    assert talk.episode.header.metadata["roots_by_reason"] == roots
    assert talk.episode.header.metadata["roots"] == sum(roots.values())
    second = tokenizer.decode(talk.engine.log[1][0].prompt_ids.tolist())
    assert ("<think>" in second) == (template is None)
    assert talk.episode.segments.parent.tolist() == ([-1, 0, 1, 2] if template is None else [-1, 0, -1, 2])
    assert len(training_rows(talk.episode)) == sum(roots.values())


SHOWN = "('<think>\\n' if '</think>' in m.content else '') + m.content"
OPENING = TEMPLATE.replace("CONTENT", SHOWN).replace("\\n' }}{% endif %}", "\\n<think>\\n' }}{% endif %}")
"""Opens the thought of an answer in the prompt, and shows it again."""


async def test_a_template_that_opens_a_thought_goes_on_after_a_tool_and_calls_none_from_inside() -> None:
    tokenizer = make_tokenizer(OPENING)
    thought = f"maybe {CALLS[1]}, no</think>"
    async with talking(
        tokenizer, f"{thought}{CALLS[0]}{{END}}", f"{thought}It is 3.{{END}}", CALLS[0]
    ) as talk:
        messages: list[Any] = [user("1+2?")]
        message = await ask(talk, messages, tools=[TOOL])
        assert [call.function.arguments for call in message.tool_calls] == ['{"a":1,"b":2}']
        assert message.content == thought
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        message = await ask(talk, [*messages, message, answer], tools=[TOOL])
        assert (message.content, message.tool_calls) == (f"{thought}It is 3.", None)
        unclosed = await ask(talk, [user("other")], tools=[TOOL])
        assert (unclosed.content, unclosed.tool_calls) == (CALLS[0], None)
    assert talk.episode.segments.parent.tolist() == [-1, 0, 1, 2, -1, 4]
    assert talk.episode.header.metadata["roots_by_reason"] == {"new": 2}


async def test_a_history_that_the_agent_changed_makes_a_new_root(tokenizer: Any) -> None:
    async with talking(tokenizer, "yes{END}") as talk:
        message = await ask(talk, [user("go")])
        edited = {"role": "assistant", "content": message.content.upper()}
        await ask(talk, [user("go"), edited, user("on")])
        await ask(talk, [user("other"), message, user("on")])
        await ask(talk, [user("go"), message, user("on")])
        await ask(talk, [user("unrelated")])
    assert talk.episode.header.metadata["roots_by_reason"] == {"new": 2, "history": 2}
    assert talk.episode.segments.parent.tolist() == [-1, 0, -1, 2, -1, 4, 1, 6, -1, 8]


async def test_parallel_samples_of_one_prompt_are_branches(tokenizer: Any) -> None:
    script = ["one{END}", "two{END}", "two{END}", "four{END}", "five{END}", "six{END}"]
    async with talking(tokenizer, *script) as talk:
        reply = await talk.client.chat.completions.create(model="any", messages=[user("go")], n=3)
        assert [choice.message.content for choice in reply.choices] == ["one", "two", "two"]
        await asyncio.gather(*(ask(talk, [user("go")]) for _ in range(2)))
        await ask(talk, [user("go"), reply.choices[0].message, user("on")])
    assert talk.episode.segments.parent.tolist() == [-1, 0, 0, 0, 0, 0, 1, 6]
    assert talk.episode.header.metadata["roots"] == 1
    assert len(training_rows(talk.episode)) == 5
    assert len({call.sampling.seed for call in talk.episode.header.calls}) == 6


async def test_answers_that_read_the_same_are_told_apart_by_their_tool_calls(tokenizer: Any) -> None:
    async with talking(tokenizer, *[CALLS[0] + "{END}"] * 2) as talk:
        reply = await talk.client.chat.completions.create(
            model="any", messages=[user("go")], n=2, tools=[TOOL]
        )
        for choice in reply.choices:
            result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}
            await ask(talk, [user("go"), choice.message, result], tools=[TOOL])
    assert talk.episode.segments.parent.tolist() == [-1, 0, 0, 1, 3, 2, 5]


async def test_other_tools_are_another_conversation(tokenizer: Any) -> None:
    async with talking(tokenizer) as talk:
        message = await ask(talk, [user("go")], tools=[TOOL])
        await ask(talk, [user("go"), message, user("on")])
    assert talk.episode.header.metadata["roots_by_reason"] == {"new": 1, "history": 1}
