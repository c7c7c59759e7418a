"""What a call asks for and what it gives, free of any API's wording; and how a body is read."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from areal_async.trajectory.layout import FinishReason
from rollout_service.gateway.errors import ApiError, bad, unsupported

Ids = npt.NDArray[np.int32]
Message = dict[str, Any]
"""As a chat template takes it: role, content (text), and tool_calls with `arguments` as an object."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """Sampling parameters that the caller named; None leaves the job's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and what else the chat template is given."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the template (`enable_thinking` …)."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One call. `prompt` is a conversation, or plain text or ids of `/v1/completions`."""

    prompt: Conversation | str | tuple[int, ...]
    overrides: SamplingOverrides = SamplingOverrides()
    n: int = 1
    parse_tools: bool = True
    """False: what looks like a tool call is text."""
    tool_id_prefix: str = "call_"
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    """Id of the answer, without the prefix that an API gives it."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class SampledChoice:
    """One answer: what the agent is told, and the units it stands for."""

    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    stop_sequence: str | None
    """The stop text that ended the answer, None when an end token or the length did."""
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """The answers to one request."""

    id: str
    created_s: int
    prompt_tokens: int
    choices: tuple[SampledChoice, ...]

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


class WireFormat(Protocol):
    """One call in the words of one API: its body as requests, and the completions as its reply or as the
    events of its stream. Of a stream `begin` comes first, then `delta` for text on the way, then `finish`
    with what each answer's text has beyond its deltas."""

    requests: list[CompletionRequest]
    stream: bool

    def reply(self, completions: Sequence[CompletionResult]) -> dict[str, Any]: ...

    def begin(self, id: str, created_s: int, prompt_tokens: int) -> Iterator[bytes]: ...

    def delta(self, index: int, text: str) -> Iterator[bytes]: ...

    def finish(self, completions: Sequence[CompletionResult], rests: Sequence[str]) -> Iterator[bytes]: ...


# --- reading a body ----------------------------------------------------------------------------------

MAX_STOPS = 16
Positive = Annotated[int, Meta(ge=1)]
Temperature = Annotated[float, Meta(ge=0)]
TopP = Annotated[float, Meta(gt=0, le=1)]
StopText = Annotated[str, Meta(min_length=1)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
ToolChoice = Literal["auto", "none"]
PATH = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
NAMED = re.compile(r"Object (?:missing required|contains unknown) field `(?P<name>\w+)`")


def read(
    body: Mapping[str, Any],
    kind: type[T],
    *,
    harmless: Collection[str] = (),
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> T:
    """`body` as a `kind` of msgspec. A field that is null is not there; those of `harmless` say nothing about
    the answer; those of `neutral` may have these values, which ask for nothing. Raises `ApiError` with the
    field that is to blame."""
    kept = {}
    for name, value in body.items():
        if value is None or name in harmless:
            continue
        if neutral is not None and name in neutral:
            check_neutral(name, value, neutral[name])
            continue
        kept[name] = value
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [_without_nulls(message) for message in messages]
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


def check_neutral(name: str, value: Any, options: Sequence[Any]) -> None:
    """Raises `ApiError` for a value that is not one of `options`."""
    # True == 1 in Python, but not in JSON.
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in options):
        allowed = " or ".join(json.dumps(one) for one in options)
        raise unsupported(name, f"leave it out, or set it to {allowed}" if allowed else "leave it out")


def _without_nulls(message: Any) -> Any:
    """Clients send every field of an answer back to us, most of them null."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _refusal(error: str) -> ApiError:
    found = PATH.fullmatch(error)
    assert found is not None
    problem, path = found["problem"], re.sub(r"^\[\.\.\.\]", "", found["path"] or "")
    code = None
    if named := NAMED.match(problem):
        path = f"{path}.{named['name']}".lstrip(".")
        if "unknown" in problem:
            code, problem = "unknown_parameter", f"unknown field {path}"
    elif "Invalid" in problem:
        code, problem = "unsupported_parameter", f"{path} is not supported: {problem}"
    return bad(path.partition("[")[0] if path.startswith("stop") else path, problem, code=code)


def joined(content: str | Sequence[TextPart] | None) -> str:
    """Content that is text, or a list of text parts, which are joined by newlines. None is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A part of a message; other kinds are refused."""

    text: str


def stops(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return (given,) if isinstance(given, str) else None if given is None else tuple(given)


def name_result(message: Message, names: Mapping[str, str]) -> None:
    """A tool's answer carries the tool's name: some templates show it."""
    if (name := names.get(message["tool_call_id"])) is not None:
        message.setdefault("name", name)


# --- writing events ----------------------------------------------------------------------------------


def encoded(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def server_sent(data: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event; Anthropic's have a name."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + encoded(data) + b"\n\n"
