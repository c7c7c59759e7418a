from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.gateway.template import ChatTemplate, StreamedText
from rollout_service.gateway.toolcalls import MARKERS, ParsedCall, ParsedText, format_of, parse
from tests.unit.gateway.fakes import CALLS, KEEPING, encoded, make_tokenizer

TABLE = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}}
TOOLS: Any = [{"function": {"name": "f", "parameters": {"properties": PROPERTIES}}}]


@pytest.mark.parametrize(("template", "family"), [*TABLE["families"], (KEEPING, "hermes")])
def test_the_family_is_read_off_the_template(template: str, family: str) -> None:
    assert format_of(template) == family


@pytest.mark.parametrize(("family", "text", "shown", "calls"), TABLE["answers"])
def test_calls_are_parsed_and_malformed_ones_are_text(family: Any, text: str, shown: str, calls: Any) -> None:
    assert parse(text, family, TOOLS) == ParsedText(shown, tuple(ParsedCall(*call) for call in calls))


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
def test_what_is_streamed_is_a_beginning_of_what_is_said(parts, cuts, stops, tools):
    template = chat_template()
    ids = np.asarray(encoded(template.tokenizer, "".join(parts)), np.int32)
    stop = ("##",) if stops else ()
    body = template.text(ids.tolist())
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
