"""Data types of calls, answers and refusals, and the parsing of JSON from agents and models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.base.errors import ArealError
from areal_async.trajectory.layout import FinishReason
from rollout_service.workflows.images import EpisodeImages
from rollout_service.workflows.turns import SampledText

Ids = npt.NDArray[np.int32]
Message = dict[str, Any]
"""A message for a chat template: `role`, `content` (text, or parts with images), and `tool_calls` with their
`arguments` as objects."""

ENDED = "the episode of this API key has ended"

# --- refusals ----------------------------------------------------------------------------------------


class GatewayError(ArealError):
    """The gateway cannot serve as configured."""


class ApiError(ArealError):
    """Error that refuses one call. `param` names the invalid field of the body."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the refusal."""
        server = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, server)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(param: str, message: str, *, code: str | None = None) -> ApiError:
    """Return the refusal of an invalid body, with the field to change."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return bad(param, f"{param} is not supported: {why}", code="unsupported_parameter")


# --- calls and answers -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and other inputs of the chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the template, such as `enable_thinking`."""
    images: EpisodeImages = field(default_factory=lambda: EpisodeImages({}))
    """Images of the messages."""


class SampledChoice(NamedTuple):
    """One answer: the content that the agent gets, and its sampled units."""

    content: str
    tool_calls: list[dict[str, Any]]
    """Tool calls in the format of OpenAI's API."""
    finish_reason: FinishReason
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]
    said: SampledText


# --- JSON from agents and models ----------------------------------------------------------------------------
#
# JSON is checked on reading, so that no later step can fail on it. Python's parser accepts more than JSON
# allows: NaN, numbers that become infinite, lone surrogates that UTF-8 cannot encode, and nesting up to its
# stack limit. All of these are rejected here.

MOST_LEVELS = 64  # Most nested objects and lists; a tool's schema has about twelve


def load_json(text: str) -> Any:
    """Return the parsed value. Raises `ValueError`."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise too_deep() from None
    check_json(value)
    return value


def decode_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins at `at`, and the position of its end. Raises `ValueError`."""
    try:
        value, end = _decoder.raw_decode(text, at)
    except RecursionError:
        raise too_deep() from None
    check_json(value)
    return value, end


def check_json(value: Any) -> None:
    """Raise `ValueError` if a decoded value is nested too deeply, or cannot be written as JSON in UTF-8."""
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


def encoded(data: Any) -> bytes:
    """Return JSON of `data`, which has no NaN."""
    return msgspec.json.encode(data)
