"""Tool calls in a model's text, by the family of its chat template.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>            Hermes, Qwen2.5, Qwen3
    xml       <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>   Qwen3-Coder
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …]                  Mistral
    llama     {"name": …, "parameters": {…}}, after <|python_tag|> or alone   Llama 3.1 and later

Text of which one call is malformed is no tool call at all: the agent gets it as content, as the model wrote
it. Nothing is corrected. Arguments that no reply could carry (`requests.load_json`) are malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout_service.gateway.requests import decode_json, load_json

Format = Literal["hermes", "xml", "mistral", "llama", "none"]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call that the model wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What the model said: `text` is what stands before the first call; all of it when there is none."""

    text: str
    calls: tuple[ParsedCall, ...] = ()


Tools = Sequence[dict[str, Any]]
_Parser = Callable[[str, Tools], ParsedText | None]


def format_of(chat_template: str) -> Format:
    """The family that a chat template belongs to, `none` when it has no tools."""
    if not re.search(r"\btools\b", chat_template):
        return "none"
    if "<function=" in chat_template:
        return "xml"
    if "<tool_call>" in chat_template:
        return "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<|python_tag|>" in chat_template or '"parameters": ' in chat_template:
        return "llama"
    return "none"


MARKERS: dict[Format, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "xml": ("<tool_call>", "<function="),
    "mistral": ("[TOOL_CALLS]",),
    "llama": ("<|python_tag|>", "{"),
    "none": (),
}
"""Where a tool call begins: text from the first of these on is not streamed before it is complete."""


def parse(text: str, family: Format, tools: Tools = ()) -> ParsedText:
    """What the model said and which tools it called. `tools` give the types of `xml` parameters."""
    parser = _PARSERS.get(family)
    return (parser(text, tools) if parser else None) or ParsedText(text)


def _object(text: str, key: str) -> ParsedCall | None:
    """A call as a JSON object with `name` and, under `key`, its arguments."""
    try:
        value = load_json(text)
    except ValueError:
        return None
    return _called(value, key)


def _called(value: Any, key: str) -> ParsedCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key, {})
    return ParsedCall(value["name"], arguments) if isinstance(arguments, dict) else None


_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def _hermes(text: str, tools: Tools) -> ParsedText | None:
    blocks = _BLOCK.findall(text)
    calls = [_object(block, "arguments") for block in blocks]
    whole = [call for call in calls if call is not None]
    if not blocks or len(whole) < len(calls):
        return None
    return ParsedText(text[: text.find("<tool_call>")], tuple(whole))


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml(text: str, tools: Tools) -> ParsedText | None:
    found = _FUNCTION.findall(text)
    if not found or len(found) < text.count("<function="):
        return None
    types = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls = []
    for name, body in found:
        declared = types.get(name.strip(), {}).get("properties") or {}
        values = {
            key.strip(): _typed(value, declared.get(key.strip())) for key, value in _PARAMETER.findall(body)
        }
        calls.append(ParsedCall(name.strip(), values))
    start = min(at for marker in MARKERS["xml"] if (at := text.find(marker)) >= 0)
    return ParsedText(text[:start], tuple(calls))


def _typed(text: str, declared: Any) -> Any:
    """An XML parameter has no type of its own: text where the tool says string, else JSON where it is."""
    if isinstance(declared, dict) and declared.get("type") == "string":
        return text
    try:
        return load_json(text)
    except ValueError:
        return text


def _mistral(text: str, tools: Tools) -> ParsedText | None:
    before, marker, rest = text.partition("[TOOL_CALLS]")
    if not marker:
        return None
    try:
        value = load_json(rest)
    except ValueError:
        return None
    values = value if isinstance(value, list) else [value]
    calls = [call for item in values if (call := _called(item, "arguments")) is not None]
    return ParsedText(before, tuple(calls)) if values and len(calls) == len(values) else None


def _llama(text: str, tools: Tools) -> ParsedText | None:
    before, marker, rest = text.partition("<|python_tag|>")
    if not marker:
        before, rest = "", text
    # Several calls stand one after the other, separated by semicolons.
    calls = []
    rest = rest.strip()
    while rest:
        try:
            value, end = decode_json(rest)
        except ValueError:
            return None
        call = _called(value, "parameters") if isinstance(value, dict) and "parameters" in value else None
        if call is None:
            return None
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return ParsedText(before, tuple(calls)) if calls else None


_PARSERS: dict[Format, _Parser] = {"hermes": _hermes, "xml": _xml, "mistral": _mistral, "llama": _llama}
