"""Parsing of the tool calls in a model's text, by the family of its chat template.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>            Hermes, Qwen2.5, Qwen3
    xml       <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>   Qwen3-Coder
    llama     {"name": …, "parameters": {…}}, after <|python_tag|> or alone   Llama 3.1 and later

Calls inside a thought do not count (`areal_async/models/answers.py`). If one call is malformed, the text has
no tool calls. The agent then gets the model's whole text as content. Nothing is corrected. A call is
malformed if its arguments are under another key, if a parameter is not closed, or if its arguments cannot be
part of a reply (`requests.load_json`). If a tag begins no call and is not closed before the next tag, it is
only a mention of the tag, not a call. The time is linear in the length of the text.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

from areal_async.models.answers import spoken_parts
from rollout_service.gateway.requests import decode_json, load_json

Format = Literal["hermes", "xml", "llama", "none"]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call by the model."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Text and tool calls of an answer: `text` ends before the first call."""

    text: str
    calls: tuple[ParsedCall, ...] = ()


Tools = Sequence[dict[str, Any]]
T = TypeVar("T")
ASIDE_CHARS = 4096
"""Longest text that is parsed on the event loop. Longer texts are parsed in a thread. For shorter texts, the
switch to a thread takes longer than the parsing."""


async def aside(parser: Callable[..., T], text: str, *given: Any, **named: Any) -> T:
    """Return `parser(text, …)`. For a long text, run it in a thread, so that it does not block the event
    loop."""
    if len(text) <= ASIDE_CHARS:
        return parser(text, *given, **named)
    return await asyncio.to_thread(parser, text, *given, **named)


def format_of(chat_template: str) -> Format:
    """Return the family of a chat template, or `none` if it has no tools."""
    if not re.search(r"\btools\b", chat_template):
        return "none"
    if "<function=" in chat_template:
        return "xml"
    if "<tool_call>" in chat_template:
        return "hermes"
    if "<|python_tag|>" in chat_template or '"parameters": ' in chat_template:
        return "llama"
    return "none"


MARKERS: dict[Format, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "xml": ("<tool_call>", "<function="),
    "llama": ("<|python_tag|>", "{"),
    "none": (),
}
"""Beginnings of tool calls."""


def parse(text: str, family: Format, tools: Tools = (), *, opened: bool = False) -> ParsedText:
    """Return the model's text and its tool calls. `tools` has the types of `xml` parameters. `opened` means
    that the prompt has opened a thought."""
    if family == "none":
        return ParsedText(text)
    read = partial(_READERS[family], ScannedText(text), tools)
    found = outside_thoughts(text, MARKERS[family], read, opened=opened)
    calls = [call for each in found for call in each.calls]
    if not calls or any(each.problem for each in found):
        return ParsedText(text)
    return ParsedText(text[: found[0].start], tuple(calls))


class Found(NamedTuple):
    """Calls that begin at one place of a text. If there are no calls and no problem, the tag at that place is
    only a mention."""

    start: int
    end: int
    calls: Sequence[Any] = ()
    problem: str = ""


Reader = Callable[[int, int], Found]
"""Function that parses the text at a marker. Its second argument is the position where the present part
outside of thoughts begins."""


def outside_thoughts(text: str, markers: Sequence[str], read: Reader, *, opened: bool = False) -> list[Found]:
    """Return all calls outside of thoughts, well formed or not, in order."""
    every: list[Found] = []

    def skip(at: int, begin: int) -> int:
        found = read(at, begin)
        if found.calls or found.problem:
            every.append(found)
        return found.end

    parts = spoken_parts(text, opened=opened, marks=markers, skip=skip)
    starts = [start for start, _ in parts]

    def said(found: Found) -> bool:
        part = bisect_right(starts, found.start) - 1
        return part >= 0 and found.start < parts[part][1]

    return [found for found in every if said(found)]


class ScannedText:
    """A text that is searched from front to back in linear time. The next position of a tag is cached until
    the search has passed it. After `MOST_FAILED` invalid JSON values, no more values are parsed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._known: dict[str, int] = {}
        self._failed = 0
        self.first = cache(self.past_blanks)

    def find(self, tag: str, at: int) -> int:
        """Return the first place of `tag` from `at` on, or the text's length."""
        if (known := self._known.get(tag, -1)) < at:
            place = self.text.find(tag, at)
            known = self._known[tag] = place if place >= 0 else len(self.text)
        return known

    def decode(self, at: int) -> tuple[Any, int]:
        """Return the JSON value after blanks, and the position after the value and the blanks that follow it.
        Raises `ValueError`."""
        if self._failed > MOST_FAILED:
            raise ValueError("too many calls are malformed")
        try:
            value, end = decode_json(self.text, self.past_blanks(at))
        except ValueError:
            self._failed += 1
            raise
        return value, self.past_blanks(end)

    def past_blanks(self, at: int) -> int:
        found = _BLANKS.match(self.text, at)
        return found.end() if found else at


_BLANKS = re.compile(r"\s*")
MOST_FAILED = 64
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def json_block(source: ScannedText, at: int) -> tuple[Any, str, int]:
    """Return the value of the `<tool_call>` block at `at`, its problem, and its end. If there is neither a
    value nor a problem, the tag is only a mention. A block at the end of the text need not be closed."""
    text, body = source.text, at + len(OPEN)
    begin, end = source.past_blanks(body), source.find(CLOSE, body)
    if not text.startswith("{", begin) and end >= source.find(OPEN, body) and begin < len(text):
        return None, "", body
    try:
        value, after = source.decode(begin)
        closed = text.startswith(CLOSE, after)  # the first closing tag may be part of an argument
        if closed or after == len(text):
            return value, "" if value is not None else "it is null", after + len(CLOSE) * closed
    except ValueError:
        pass
    if end == len(text):
        return None, "it is not closed", body
    problem = "there is something behind its value"
    try:
        load_json(text[body:end])
    except ValueError as error:
        problem = str(error)
    return None, problem, end + len(CLOSE)


BESIDE = frozenset({"name", "id", "type"})
"""Keys that a call may have besides its arguments."""


def _called(value: Any, key: str) -> ParsedCall | None:
    """Return the call in a JSON object that has `name`, and its arguments under `key`. Return None for any
    other object, for example one with arguments under another key."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    others = [value[each] for each in value.keys() - BESIDE - {key}]
    if others and (key not in value or any(isinstance(each, dict) for each in others)):
        return None
    arguments = value.get(key, {})
    return ParsedCall(value["name"], arguments) if isinstance(arguments, dict) else None


def _found(start: int, end: int, values: Sequence[Any], key: str) -> Found:
    calls = [call for value in values if (call := _called(value, key)) is not None]
    return Found(start, end, calls, "" if calls and len(calls) == len(values) else "a call is malformed")


def _hermes(source: ScannedText, tools: Tools, at: int, begin: int) -> Found:
    value, problem, end = json_block(source, at)
    if value is None:
        return Found(at, end, problem=problem)
    return _found(at, end, [value], "arguments")


FUNCTION = re.compile(r"<function=([^>\n]{1,256})>")
PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>\n?")
FUNCTION_BEGIN, FUNCTION_END = "<function=", "</function>"
PARAMETER_BEGIN, PARAMETER_END = "<parameter=", "</parameter>"


def _xml(source: ScannedText, tools: Tools, at: int, begin: int) -> Found:
    text = source.text
    wrapped = text.startswith(OPEN, at)
    place = source.past_blanks(at + len(OPEN)) if wrapped else at
    function = FUNCTION.match(text, place)
    if function is None:
        return Found(at, at + 1)
    name, values = function[1].strip(), dict[str, Any]()
    declared = {tool["function"]["name"]: tool["function"] for tool in tools}.get(name, {})
    schema, place = declared.get("parameters") or {}, source.past_blanks(function.end())
    while (parameter := PARAMETER.match(text, place)) is not None:
        key, end = parameter[1].strip(), source.find(PARAMETER_END, parameter.end())
        if key in values or source.find(PARAMETER_BEGIN, parameter.end()) < end or end == len(text):
            return Found(at, parameter.end(), problem=f"the parameter {key} is not closed, or given twice")
        value = text[parameter.end() : end].removesuffix("\n")
        values[key] = _typed(value, _inside(schema, "properties", key), schema)
        place = source.past_blanks(end + len(PARAMETER_END))
    if not text.startswith(FUNCTION_END, place):
        if not values and source.find(FUNCTION_BEGIN, place) < source.find(FUNCTION_END, place):
            return Found(at, function.end())
        return Found(at, place, problem="there is something else than parameters in it")
    place += len(FUNCTION_END)
    if wrapped and text.startswith(CLOSE, after := source.past_blanks(place)):
        place = after + len(CLOSE)
    return Found(at, place, [ParsedCall(name, values)])


def _typed(text: str, declared: Any, schema: Any) -> Any:
    """Return the value of an XML parameter, whose text does not show its type. The value stays text if the
    tool takes text for this parameter. Otherwise it is parsed as JSON if possible. Templates write null as
    `null` or `None`, and booleans as Python does."""
    if text in ("null", "None") and _takes(declared, schema, "null", type(None)):
        return None
    if _takes(declared, schema, "string", str):
        return text
    if text in ("True", "False") and _takes(declared, schema, "boolean", bool):
        return text == "True"
    try:
        return load_json(text)
    except ValueError:
        return text


def _takes(declared: Any, schema: Any, name: str, kind: type) -> bool:
    """Return whether `declared`, a part of `schema`, allows a type anywhere."""
    left, seen = [declared], set[int]()
    while left:
        if not isinstance(way := left.pop(), dict) or id(way) in seen:
            continue
        seen.add(id(way))
        types, named = [*_list(way.get("type")), way.get("type")], "type" in way
        values = [*_list(way.get("enum")), *([way["const"]] if "const" in way else ())]
        if name in types or (name == "null" and way.get("nullable") is True):
            return True
        if not named and any(isinstance(value, kind) for value in values):
            return True
        left += [each for key in ("anyOf", "oneOf", "allOf") for each in _list(way.get(key))]
        if isinstance(link := way.get("$ref"), str) and link.startswith("#/"):
            left.append(_inside(schema, *link[2:].split("/")))
    return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _inside(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _llama(source: ScannedText, tools: Tools, at: int, begin: int) -> Found:
    text = source.text
    tagged = text.startswith("<|python_tag|>", at)
    if not tagged and at > source.first(begin):
        return Found(at, at + 1)
    # Several calls follow each other, separated by semicolons.
    place, values = source.past_blanks(at + len("<|python_tag|>") if tagged else at), list[Any]()
    while place < len(text):
        try:
            value, place = source.decode(place)
        except ValueError as error:
            return Found(at, at + 1, problem=str(error))
        values.append(value)
        if text.startswith(";", place):
            place = source.past_blanks(place + 1)
    whole = all(isinstance(value, dict) and "parameters" in value for value in values)
    return _found(at, place, values if whole else (), "parameters")


_READERS: dict[Format, Callable[[ScannedText, Tools, int, int], Found]]
_READERS = {"hermes": _hermes, "xml": _xml, "llama": _llama}
