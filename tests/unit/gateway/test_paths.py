"""Recorded paths go on after the sampled ids, or end: never anything between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pytest

from areal_async.trajectory import SegmentKind, training_rows
from tests.unit.gateway.fakes import (
    CALLS,
    EOS,
    FORGETFUL,
    SHORTENING,
    Scripted,
    assert_recorded_is_what_the_engine_said,
    make_tokenizer,
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


def talk(
    script: list[str],
    body: Callable[[openai.AsyncOpenAI, Any], Coroutine[Any, Any, None]],
    tokenizer: Any,
    **how: Any,
) -> tuple[Any, Scripted]:
    """The episode that `body` makes with an OpenAI client, and the engine."""
    engine = Scripted(tokenizer, script)

    async def main() -> Any:
        async with serving(engine, tokenizer, **how) as (_, ctx, session):
            client = openai.AsyncOpenAI(
                base_url=session.openai_base_url, api_key=session.api_key, max_retries=0
            )
            async with client:
                await body(client, session)
        return ctx.builder.build()

    episode = asyncio.run(main())
    assert_recorded_is_what_the_engine_said(episode, engine.log)
    return episode, engine


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    reply = await client.chat.completions.create(model="any", messages=messages, **more)
    return reply.choices[0].message


async def three_turns(client: openai.AsyncOpenAI, session: Any, **more: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": "Add."}, user("1+2?")]
    for n in range(3):
        message = await ask(client, messages, tools=[TOOL], **more)
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls or []
        ] or [user(f"and {n}?")]


def test_a_conversation_is_one_path_of_the_sampled_ids(tokenizer: Any) -> None:
    script = [f"Let me see. {CALLS[0]}{{END}}", "It is 3.{END}", f"{CALLS[1]}"]
    episode, _ = talk(script, three_turns, tokenizer)
    assert len(training_rows(episode)) == 1
    assert [SegmentKind(k).name for k in episode.segments.kind] == [
        "PROMPT",
        "SAMPLED",
        "TOOL",
        "SAMPLED",
        "ENVIRONMENT",
        "SAMPLED",
    ]
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


def test_an_answer_cut_by_length_is_closed_as_the_template_closes(tokenizer: Any) -> None:
    async def body(client: openai.AsyncOpenAI, session: Any) -> None:
        message = await ask(client, [user("go")], max_tokens=4)
        assert message.content == "abcd"
        await ask(client, [user("go"), message, user("on")])

    episode, _ = talk(["abcdefgh{END}", "ok{END}"], body, tokenizer)
    assert "abcd<|im_end|>\n<|im_start|>user\non<|im_end|>" in tokenizer.decode(
        episode.units.token_id.tolist()
    )
    assert (episode.units.token_id == EOS).sum() == 4
    assert episode.header.metadata["roots"] == 1


def test_a_stop_text_stays_in_the_path_though_the_agent_does_not_see_it(tokenizer: Any) -> None:
    async def body(client: openai.AsyncOpenAI, session: Any) -> None:
        message = await ask(client, [user("go")], stop=["Obs:"])
        assert message.content == "Act. "
        await ask(client, [user("go"), {"role": "assistant", "content": "Act."}, user("4")])

    episode, engine = talk(["Act. Obs:", "ok{END}"], body, tokenizer)
    assert "Act. Obs:<|im_end|>\n<|im_start|>user\n4" in tokenizer.decode(
        engine.log[1][0].prompt_ids.tolist()
    )
    assert episode.header.metadata["roots"] == 1


@pytest.mark.parametrize(
    ("template", "roots"),
    [(None, {"new": 1}), (FORGETFUL, {"new": 1, "template": 1}), (SHORTENING, {"new": 1, "template": 1})],
)
def test_a_template_that_drops_text_makes_a_new_root_and_is_counted(
    template: str | None, roots: dict[str, int], tokenizer: Any
) -> None:
    tokenizer = tokenizer if template is None else make_tokenizer(template)

    async def body(client: openai.AsyncOpenAI, session: Any) -> None:
        message = await ask(client, [user("go")])
        assert message.content == "<think>hm</think>yes"
        await ask(client, [user("go"), message, user("on")])

    episode, engine = talk(["<think>hm</think>yes{END}", "ok{END}"], body, tokenizer)
    assert episode.header.metadata["roots_by_reason"] == roots
    assert episode.header.metadata["roots"] == sum(roots.values())
    second = tokenizer.decode(engine.log[1][0].prompt_ids.tolist())
    assert ("<think>" in second) == (template is None)
    assert episode.segments.parent.tolist() == ([-1, 0, 1, 2] if template is None else [-1, 0, -1, 2])
    assert len(training_rows(episode)) == sum(roots.values())


def test_a_history_that_the_agent_changed_makes_a_new_root(tokenizer: Any) -> None:
    async def body(client: openai.AsyncOpenAI, session: Any) -> None:
        message = await ask(client, [user("go")])
        edited = {"role": "assistant", "content": message.content.upper()}
        await ask(client, [user("go"), edited, user("on")])
        await ask(client, [user("other"), message, user("on")])
        await ask(client, [user("go"), message, user("on")])
        await ask(client, [user("unrelated")])

    episode, _ = talk(["yes{END}"], body, tokenizer)
    assert episode.header.metadata["roots_by_reason"] == {"new": 2, "history": 2}
    assert episode.segments.parent.tolist() == [-1, 0, -1, 2, -1, 4, 1, 6, -1, 8]


def test_parallel_samples_of_one_prompt_are_branches(tokenizer: Any) -> None:
    async def body(client: openai.AsyncOpenAI, session: Any) -> None:
        reply = await client.chat.completions.create(model="any", messages=[user("go")], n=3)
        assert [choice.message.content for choice in reply.choices] == ["one", "two", "two"]
        await asyncio.gather(*(ask(client, [user("go")]) for _ in range(2)))
        await ask(client, [user("go"), reply.choices[0].message, user("on")])

    script = ["one{END}", "two{END}", "two{END}", "four{END}", "five{END}", "six{END}"]
    episode, _ = talk(script, body, tokenizer)
    assert episode.segments.parent.tolist() == [-1, 0, 0, 0, 0, 0, 1, 6]
    assert episode.header.metadata["roots"] == 1
    assert len(training_rows(episode)) == 5
    assert len({call.sampling.seed for call in episode.header.calls}) == 6


def test_answers_that_read_the_same_are_told_apart_by_their_tool_calls(tokenizer: Any) -> None:
    async def body(client: openai.AsyncOpenAI, session: Any) -> None:
        reply = await client.chat.completions.create(model="any", messages=[user("go")], n=2, tools=[TOOL])
        for choice in reply.choices:
            result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "3"}
            await ask(client, [user("go"), choice.message, result], tools=[TOOL])

    episode, _ = talk([CALLS[0] + "{END}"] * 2, body, tokenizer)
    assert episode.segments.parent.tolist() == [-1, 0, 0, 1, 3, 2, 5]


def test_other_tools_are_another_conversation(tokenizer: Any) -> None:
    async def body(client: openai.AsyncOpenAI, session: Any) -> None:
        message = await ask(client, [user("go")], tools=[TOOL])
        await ask(client, [user("go"), message, user("on")])

    episode, _ = talk([], body, tokenizer)
    assert episode.header.metadata["roots_by_reason"] == {"new": 1, "history": 1}


def test_an_end_token_that_is_not_the_templates_leaves_the_turn_to_be_closed(tokenizer: Any) -> None:
    async def body(client: openai.AsyncOpenAI, session: Any) -> None:
        message = await ask(client, [user("go")])
        await ask(client, [user("go"), message, user("on")])

    episode, engine = talk(["yes<pad>", "ok{END}"], body, tokenizer)
    assert episode.header.metadata["roots"] == 1
    assert "yes<pad><|im_end|>\n<|im_start|>user" in tokenizer.decode(engine.log[1][0].prompt_ids.tolist())
