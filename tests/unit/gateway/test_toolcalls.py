from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from reward_service.verifiers import within
from rollout_service.gateway.toolcalls import (
    ASIDE_CHARS,
    ParsedCall,
    ParsedText,
    aside,
    format_of,
    parse,
)
from rollout_service.workflows.tool_use import json_calls
from tests.unit.gateway.fakes import CALLS, KEEPING

TABLE = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}}
WAYS = {
    "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "list": {"type": ["string", "null"]},
    "link": {"$ref": "#/$defs/Name"},
    "enum": {"enum": ["1", "2"]},
    "numbers": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "yes": {"type": "boolean"},
    "text": {"allOf": [{"type": "string"}]},
    "loop": {"$ref": "#/$defs/Loop"},
    "odd": {"enum": 3, "anyOf": "x", "type": {}, "$ref": "#/$defs/none/of/it"},
}
DEFINED = {
    "Name": {"anyOf": [{"$ref": "#/$defs/Name"}, {"const": "x"}]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"} for _ in range(50)]},
}
TOOLS: Any = [
    {"function": {"name": "f", "parameters": {"properties": PROPERTIES}}},
    {"function": {"name": "h", "parameters": {"properties": [1]}}},
    {"function": {"name": "g", "parameters": {"properties": WAYS, "$defs": DEFINED}}},
]


@pytest.mark.parametrize(("template", "family"), [*TABLE["families"], (KEEPING, "hermes")])
def test_the_family_is_read_off_the_template(template: str, family: str) -> None:
    assert format_of(template) == family


@pytest.mark.parametrize(("family", "text", "shown", "calls"), TABLE["answers"])
def test_calls_are_parsed_and_malformed_ones_are_text(family: Any, text: str, shown: str, calls: Any) -> None:
    assert parse(text, family, TOOLS) == ParsedText(shown, tuple(ParsedCall(*call) for call in calls))


CPU_LIMIT_S = 25

MANY = 1 << 15
HERMES = ("<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"a</tool_call>')
XML = ("<function=", "<function=f>", "<tool_call><function=f>", "<function=f><parameter=s>")
OTHERS = ("<think>", "</think>", '</think><tool_call>{"a', "<|python_tag|>{", "{")


@pytest.mark.parametrize("flood", [*HERMES, *XML, *OTHERS])
def test_no_text_is_read_again_and_again(flood: str) -> None:
    """Reading once takes a hundredth of the CPU time; a search to the end from each tag takes hours."""

    def read() -> None:
        for family in ("hermes", "xml", "llama"):
            parse(flood * MANY, family)
        json_calls(flood * MANY)

    within(CPU_LIMIT_S, read)


async def test_a_long_text_is_parsed_beside_the_event_loop() -> None:
    def where(text: str) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert [await aside(where, "x" * n) for n in (1, ASIDE_CHARS, ASIDE_CHARS + 1)] == [True, True, False]


def test_a_thought_that_the_prompt_has_opened_holds_no_calls() -> None:
    text = f"maybe {CALLS[0]}</think>{CALLS[1]}"
    calls = [parse(each, "hermes", opened=True).calls for each in (text, CALLS[0], f"no</think>{CALLS[1]}")]
    assert calls == [(ParsedCall("add", {"a": 3, "b": 4}),), (), (ParsedCall("add", {"a": 3, "b": 4}),)]
