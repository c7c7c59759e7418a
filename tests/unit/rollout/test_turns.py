"""Turns of a chat: ids of the template's continuation, and templates that change their past."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from areal_async.base.records import Task
from areal_async.base.versions import VersionTag
from areal_async.trajectory import EpisodeBuilder, Sampling, SegmentKind, training_rows
from rollout_service.engines.base import GenerateResult
from rollout_service.workflows import Context, PolicyEngine, Renderer, TemplateRewrites, TurnError
from rollout_service.workflows.turns import Chat, continuation
from tests.unit.rollout.fakes import said
from tests.unit.rollout.recited import byte_tokenizer
from tests.unit.rollout.scripted import EOS, Letters, assert_rows_are_exact, play, texts

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\x03\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS_THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[1] }}{% else %}{{ m.content }}{% endif %}\x03\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""As Qwen3 does: what was thought before the last question is dropped, what was thought since stays."""
TRIMS = PLAIN.replace("m.content", "m.content | trim")
ASK = Task("h:0:0", [{"role": "user", "content": "A"}])


def turns(*more: list[dict[str, Any]], rewritten: str = "error") -> Any:
    async def flow(ctx: Context, task: Task) -> None:
        reply = await ctx.generate(task.prompt)
        for turn, messages in enumerate(more, start=1):
            how: Any = rewritten
            reply = await ctx.generate(messages, parent=reply.segment, turn=turn, rewritten=how)

    return flow


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("template", [PLAIN, TRIMS])
def test_the_next_turn_is_the_ids_of_the_templates_continuation(template: str) -> None:
    replies = iter(["b ", "c", "d"])
    flow = turns(user("B"), [{"role": "tool", "content": "T"}])
    episode, engine = play(flow, lambda path: next(replies), ASK, template=template)
    assert "".join(texts(episode)) == (
        "<user>A\x03\n<assistant>b \x03\n<user>B\x03\n<assistant>c\x03\n<tool>T\x03\n<assistant>d\x03"
    )
    assert_rows_are_exact(episode, engine)
    assert len(training_rows(episode)) == 1


def test_a_reply_that_was_cut_short_gets_the_end_of_its_turn() -> None:
    episode, _ = play(turns(user("B")), lambda path: "long", ASK, template=PLAIN, max_new_tokens=2)
    assert texts(episode)[1:3] == ["lo", "\x03\n<user>B\x03\n<assistant>"]


def test_a_template_that_changes_its_past_is_an_error_or_begins_a_new_root() -> None:
    def thinker(path: str) -> str:
        return "<think>hm</think>x"

    with pytest.raises(TemplateRewrites, match="rewritten"):
        play(turns(user("B")), thinker, ASK, template=FORGETS_THINKING)
    episode, engine = play(
        turns([{"role": "tool", "content": "T"}], user("B"), rewritten="root"),
        thinker,
        ASK,
        template=FORGETS_THINKING,
    )
    # A tool's answer keeps the thinking, the next question drops it.
    assert episode.segments.parent.tolist() == [-1, 0, 1, 2, -1, 4]
    assert episode.segments.kind[4] == SegmentKind.PROMPT
    assert texts(episode)[4] == (
        "<user>A\x03\n<assistant>x\x03\n<tool>T\x03\n<assistant>x\x03\n<user>B\x03\n<assistant>"
    )
    assert texts(episode)[5] == "<think>hm</think>x" + EOS
    assert_rows_are_exact(episode, engine)
    assert len(training_rows(episode)) == 2


def test_without_a_template_the_contents_follow_as_text() -> None:
    episode, engine = play(turns([*user("B"), *user("C")]), lambda path: "x", ASK)
    assert texts(episode) == ["A", "x\x03", "B\nC", "x\x03"]
    assert_rows_are_exact(episode, engine)


def test_what_cannot_be_continued_says_why() -> None:
    async def from_text(ctx: Context, task: Task) -> None:
        reply = await ctx.generate("text")
        await ctx.generate(user("B"), parent=reply.segment)

    with pytest.raises(TurnError, match="began with messages"):
        play(from_text, lambda path: "x", template=PLAIN)
    chat = Chat(({"role": "user", "content": "A"}, {"role": "assistant", "content": "x"}))
    twice: Any = Letters(PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"))
    assert continuation(twice, chat, user("B")) == ("", True)
    plain: Any = Letters(PLAIN)
    with pytest.raises(TurnError, match="follow a reply"):
        continuation(plain, chat.then(user("B")), user("C"))


@pytest.mark.parametrize("end", [EOS, ""])
def test_a_path_goes_on_where_the_template_shows_a_chat_only_with_the_next_reply_opened(end: str) -> None:
    opened = PLAIN + "{% if not add_generation_prompt %}{{ 1 / 0 }}{% endif %}"
    chat = Chat(tuple(user("A"))).said("b", end)
    tokenizer: Any = Letters(opened)
    after = "\n<user>B\x03\n<assistant>"
    assert continuation(tokenizer, chat, user("B")) == (after if end else f"{EOS}{after}", False)


def test_a_reply_in_pieces_is_one_message() -> None:
    async def flow(ctx: Context, task: Task) -> None:
        first = await ctx.generate(task.prompt, stop=("!",))
        more = await ctx.generate(parent=first.segment)
        await ctx.generate(user("B"), parent=more.segment, turn=1)

    episode, engine = play(flow, lambda path: "a!b" if path.endswith(">") else "c", ASK, template=PLAIN)
    assert texts(episode) == [
        "<user>A\x03\n<assistant>",
        "a!",
        "c\x03",
        "\n<user>B\x03\n<assistant>",
        "a!b\x03",
    ]
    assert_rows_are_exact(episode, engine)


def test_a_tokenizer_that_begins_sequences_with_a_token_does_so_only_at_roots() -> None:
    vocabulary = {token: index for index, token in enumerate(["<bos>", "<end>", *"AB<>user:\nxy"])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    backend.decoder = decoders.Fuse()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<end>")
    tokenizer.chat_template = "<bos>{% for m in messages %}{{ m.content }}<end>{% endfor %}"

    async def generate(request: Any) -> GenerateResult:
        return said([vocabulary["x"], 1], VersionTag("policy", 0, 7), "x")

    engine: Any = SimpleNamespace(generate=generate)

    def made(flow: Any) -> list[str]:
        builder = EpisodeBuilder("job", "t", "t#0", 0)
        lead = PolicyEngine(engine, Renderer(tokenizer), Sampling(max_new_tokens=8))
        ctx = Context({"policy": lead}, builder, episode_id="e", seed=1)
        asyncio.run(flow(ctx))
        episode = builder.build()
        starts, lengths = episode.segments.offset.tolist(), episode.segments.length.tolist()
        units = episode.units.token_id.tolist()
        return [tokenizer.decode(units[s : s + n]) for s, n in zip(starts, lengths, strict=True)]

    async def text(ctx: Context) -> None:
        reply = await ctx.generate("AB")
        await ctx.generate("BA", parent=reply.segment)

    async def chat(ctx: Context) -> None:
        reply = await ctx.generate(user("A"))
        await ctx.generate(user("B"), parent=reply.segment)

    assert made(text) == ["<bos>AB", "x<end>", "BA", "x<end>"]
    assert made(chat) == ["<bos>A<end>", "x<end>", "B<end>", "x<end>"]


# --- templates of models that think --------------------------------------------------------------------

# Thoughts since the last question stay, tool answers stand in one turn of the user, HEADER opens an answer.
THINKS = """
{%- set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}
{%- set ns.last = messages.index(m) %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{% set thought, text = '', m.content %}
{%- if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1] | trim %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ text + '<|im_end|>\\n' }}
{%- else %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + HEADER }}{% endif %}"""
FORGETS = THINKS.replace("loop.index0 > ns.last and ", "loop.last and ")
TOOL = {"role": "tool", "content": "42"}
END = "<|im_end|>"
OPENS, CLOSED, NONE = "'<think>\\n'", "'<think>\\n\\n</think>\\n\\n'", "''"


@pytest.mark.parametrize(
    ("template", "header", "reply", "new", "goes_on"),
    [
        (THINKS, OPENS, "hm\n</think>\n\ncall", [TOOL], True),
        (THINKS, OPENS, "hm</think>call", [TOOL, TOOL], True),
        (THINKS, OPENS, "hm\n</think>\n\nyes", user("B"), False),
        (THINKS, OPENS, "hm, and so on", [TOOL], False),
        (THINKS, NONE, "<think>\nhm\n</think>\n\ncall", [TOOL], True),
        (THINKS, NONE, "<think>\nhm\n</think>\n\nyes", user("B"), False),
        (THINKS, NONE, "call", [TOOL], True),
        (THINKS, NONE, " call \n", [TOOL], True),
        (THINKS, CLOSED, "call", [TOOL], False),
        (FORGETS, OPENS, "hm\n</think>\n\ncall", [TOOL], False),
        (FORGETS, NONE, "call", [TOOL], True),
    ],
)
@pytest.mark.parametrize("end", [END, "", "<|endoftext|>"])
def test_a_path_goes_on_where_the_template_shows_what_was_thought(template, header, reply, new, goes_on, end):
    tokenizer = byte_tokenizer(template.replace("HEADER", header))
    chat = Chat(tuple(user("A"))).said(reply, end)
    text, changed = continuation(tokenizer, chat, new)
    assert changed is not goes_on
    if goes_on:
        closing = "" if end == END else END
        assert text.startswith(f"{closing}\n<|im_start|>user")
        assert text.count("<|im_start|>user") == 1
        shown, opened = chat.then(new).render(tokenizer), Chat(tuple(user("A"))).render(tokenizer)
        assert shown.endswith(text.removeprefix(closing))
        whole = opened + reply + (END if end == END else "") + text
        assert "".join(whole.split()) == "".join(shown.split())
