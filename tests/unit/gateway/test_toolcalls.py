from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.gateway.template import ChatTemplate, StreamedText
from rollout_service.gateway.toolcalls import MARKERS, ParsedCall, ParsedText, format_of, parse
from tests.unit.gateway.fakes import CALLS, KEEPING, encoded, make_tokenizer

ADD = ParsedCall("add", {"a": 1})
TOOLS: Any = [
    {
        "function": {
            "name": "f",
            "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}},
        }
    }
]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ messages }}", "none"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=x>{% endif %}", "xml"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}', "llama"),
        (KEEPING, "hermes"),
    ],
)
def test_the_family_is_read_off_the_template(template: str, family: str) -> None:
    assert format_of(template) == family


@pytest.mark.parametrize(
    ("family", "text", "parsed"),
    [
        ("hermes", "hi", ParsedText("hi")),
        (
            "hermes",
            'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>{"name": "b"}</tool_call>',
            ParsedText("so ", (ADD, ParsedCall("b", {}))),
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', ParsedText("", (ADD,))),
        ("hermes", '<tool_call>{"name": "add", "argu', ParsedText('<tool_call>{"name": "add", "argu')),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', ParsedText('<tool_call>{"name": 1}</tool_call>')),
        (
            "hermes",
            f"{CALLS[0]}<tool_call>[]</tool_call>",
            ParsedText(f"{CALLS[0]}<tool_call>[]</tool_call>"),
        ),
        ("hermes", "<tool_call>[]</tool_call>", ParsedText("<tool_call>[]</tool_call>")),
        (
            "xml",
            "ok\n<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
            "</function>\n</tool_call>",
            ParsedText("ok\n", (ParsedCall("f", {"s": "12", "n": 12}),)),
        ),
        ("xml", "<tool_call><function=f>", ParsedText("<tool_call><function=f>")),
        ("mistral", 'a[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', ParsedText("a", (ADD,))),
        ("mistral", "[TOOL_CALLS] nothing", ParsedText("[TOOL_CALLS] nothing")),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ParsedText("", (ADD,))),
        (
            "llama",
            '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
            ParsedText("", (ADD, ADD)),
        ),
        ("llama", '{"answer": 3}', ParsedText('{"answer": 3}')),
        ("none", "<tool_call>{}</tool_call>", ParsedText("<tool_call>{}</tool_call>")),
    ],
)
def test_calls_are_parsed_and_malformed_ones_are_text(family: Any, text: str, parsed: ParsedText) -> None:
    assert parse(text, family, TOOLS) == parsed


PARTS = ["a", "é", " ", "\n", "#", "##", "<", "<tool", "<tool_call>", *CALLS, "<|im_start|>", "x y"]


@functools.cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(make_tokenizer())


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(PARTS), max_size=12),
    st.lists(st.integers(1, 5), max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_what_is_streamed_is_a_beginning_of_what_is_said(
    parts: list[str], cuts: list[int], stops: bool, tools: bool
) -> None:
    template = chat_template()
    ids = np.asarray(encoded(template.tokenizer, "".join(parts)), np.int32)
    stop = ("##",) if stops else ()
    body = template.body(ids)
    if stops:
        body = body.partition("##")[0]
    parsed = parse(body, "hermes") if tools else ParsedText(body)
    content = parsed.text if parsed.text.strip() or not parsed.calls else ""
    growing, told, at = StreamedText(template, stop, MARKERS["hermes"] if tools else ()), "", 0
    for size in [*cuts, len(ids)]:
        told += growing.grow(ids[at : at + size])
        at += size
        assert content.startswith(told)
    assert told + growing.rest(content) == content
