"""What a call asks for and what it gives, free of any API's wording; and how a body is read."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from areal_async.errors import ArealError
from areal_async.trajectory.layout import FinishReason

Ids = npt.NDArray[np.int32]
Message = dict[str, Any]
"""As a chat template takes it: role, content (text), and tool_calls with `arguments` as an object."""
T = TypeVar("T")

# --- refusals ----------------------------------------------------------------------------------------

Style = Literal["openai", "anthropic"]

_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_OVERLOADED = 529


class GatewayError(ArealError):
    """The gateway cannot serve as configured."""


class ApiError(ArealError):
    """One call is refused. `param` names the field of the body that is to blame.

    status   OpenAI `type`, `code`                      Anthropic `type`
    400      invalid_request_error                      invalid_request_error
    401      authentication_error, invalid_api_key      authentication_error
    404      invalid_request_error, not_found           not_found_error
    413      invalid_request_error, too_large           request_too_large
    429      rate_limit_error                           rate_limit_error
    500      server_error                               api_error
    503      server_error, engine_unavailable           overloaded_error (sent as 529, as Anthropic does)
    504      server_error, timeout                      timeout_error
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def status_in(self, style: Style) -> int:
        return ANTHROPIC_OVERLOADED if style == "anthropic" and self.status == 503 else self.status

    def body(self, style: Style) -> dict[str, Any]:
        """The JSON body of the refusal."""
        if style == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            message = self.message if self.param is None else f"{self.param}: {self.message}"
            return {"type": "error", "error": {"type": kind, "message": message}}
        server = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _OPENAI_TYPES.get(self.status, server)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


def bad(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A body that cannot be served, with the field to change."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return bad(param, f"{param} is not supported: {why}", code="unsupported_parameter")


# --- calls and answers -------------------------------------------------------------------------------


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
    """One call."""

    prompt: Conversation
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

    prompt_tokens: int
    choices: tuple[SampledChoice, ...]

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


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


# --- JSON that agents and models wrote ---------------------------------------------------------------
#
# It is read so that whatever is made of it afterwards cannot fail. Python's reader takes more than JSON has
# (NaN, numbers that become infinite, halves of surrogate pairs, which no UTF-8 can carry), and nesting until
# its stack ends. What has any of that is no JSON here.

MOST_LEVELS = 64
"""Most objects and lists within one another; a tool's schema has a dozen."""


def load_json(text: str) -> Any:
    """Raises `ValueError`."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise too_deep() from None
    check_json(value)
    return value


def decode_json(text: str) -> tuple[Any, int]:
    """The value that `text` begins with, and where it ends. Raises `ValueError`."""
    try:
        value, end = _decoder.raw_decode(text)
    except RecursionError:
        raise too_deep() from None
    check_json(value)
    return value, end


def check_json(value: Any) -> None:
    """Raises `ValueError` for a decoded value that is too deep, or that has no JSON in UTF-8."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _check_text(one)
            elif isinstance(one, dict):
                for key in one:
                    _check_text(key)
                inner += one.values()
            elif isinstance(one, list):
                inner += one
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError("a number is too large")
        if not inner:
            return
        level = inner
    raise too_deep()


def too_deep() -> ValueError:
    return ValueError(f"nested more than {MOST_LEVELS} levels deep")


def _check_text(text: str) -> None:
    if not text.isascii():
        text.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


# --- writing events ----------------------------------------------------------------------------------


def encoded(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def server_sent(data: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event; Anthropic's have a name."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + encoded(data) + b"\n\n"
