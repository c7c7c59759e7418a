"""OpenAI's `/v1/chat/completions`: parsing of request bodies, and construction of replies and stream
events."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from areal_async.data.images import ImageError
from areal_async.data.task_images import image_sources
from rollout_service.gateway.requests import (
    ApiError,
    Conversation,
    Message,
    SampledChoice,
    bad,
    check_json,
    encoded,
    load_json,
    unsupported,
)
from rollout_service.gateway.template import ChatTemplate
from rollout_service.workflows.images import Content, EpisodeImages

HARMLESS = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier")) | frozenset(
    ("prompt_cache_key", "prompt_cache_retention")
)
"""Fields that do not affect the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    **dict.fromkeys(("functions", "function_call", "audio", "prediction"), ()),
    **dict.fromkeys(("reasoning_effort", "verbosity", "web_search_options"), ()),
}
TEMPLATE_OWN = frozenset(
    ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template")
)


MAX_STOPS = 16
Positive = Annotated[int, Meta(ge=1)]
StopText = Annotated[str, Meta(min_length=1)]
PATH = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
NAMED = re.compile(r"Object (?:missing required|contains unknown) field `(?P<name>\w+)`")


class TextPart(msgspec.Struct, tag="text", tag_field="type"):
    """A text part of a message."""

    text: str


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"
    """Ignored, because `rollout.images` of the job sets the size of images."""


class ImagePart(msgspec.Struct, tag="image_url", tag_field="type"):
    """An image of a message. Parts of other kinds are refused."""

    image_url: ImageUrl


Parts = str | list[TextPart | ImagePart] | None
"""Content of a message."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Request that arguments must match their schema. The field is ignored, because the agent must see the
    model's own text."""


class DeclaredTool(msgspec.Struct):
    type: Literal["function"]
    function: ToolFunction


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts = None
    name: str | None = None
    tool_calls: list[MessageToolCall] = []
    tool_call_id: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] = []


class ChatBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    n: Positive = 1
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 and -1 both mean no limit, as in the inference servers."""
    max_tokens: Positive | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[DeclaredTool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    """The model cannot be forced to call a tool."""
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def has_images(self) -> bool:
        parts = (message.content for message in self.messages if isinstance(message.content, list))
        return any(isinstance(part, ImagePart) for some in parts for part in some)


class ChatCall:
    """One call. It parses the body of the request, and formats the answers as a reply or as events of a
    stream."""

    def __init__(self, body: ChatBody, template: ChatTemplate, most: int) -> None:
        """Raises `ApiError` if the call is invalid, or requests more than `most` answers."""
        self.body = body
        if body.n > most:
            raise bad("n", f"n must be an integer from 1 to {most}")
        if clash := TEMPLATE_OWN.intersection(body.chat_template_kwargs):
            raise bad("chat_template_kwargs", f"{sorted(clash)[0]} is not for the caller to set")
        tools = [_declared(tool.function) for tool in body.tools]
        images = EpisodeImages({})
        messages = _messages(body.messages, images)
        self.prompt = Conversation(messages, tools, body.chat_template_kwargs, images)
        named = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        self.sampling = {name: value for name, value in named.items() if value is not None}
        if body.top_k is not None:
            self.sampling["top_k"] = max(0, body.top_k)
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        self.stop = None if stop is None else tuple(stop)
        self.max_tokens = body.max_completion_tokens or body.max_tokens
        self.parse_tools = body.tool_choice == "auto"
        self._template = template
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created_s = int(time.time())

    def reply(self, prompt_tokens: int, choices: Sequence[SampledChoice]) -> bytes:
        shown = [self._choice(index, choice) for index, choice in enumerate(choices)]
        heading = self._heading("chat.completion")
        return encoded({**heading, "choices": shown, "usage": usage(prompt_tokens, choices)})

    def events(self, prompt_tokens: int, choices: Sequence[SampledChoice]) -> bytes:
        """Return all events before `DONE`."""
        events = []
        for index, choice in enumerate(choices):
            opening = {"role": "assistant", "content": choice.content, "refusal": None}
            events.append(self._chunk(_delta(index, opening)))
            for i, call in enumerate(choice.tool_calls):
                events.append(self._chunk(_delta(index, {"tool_calls": [{"index": i, **call}]})))
            ending = {"finish_reason": _finish_reason(choice), "logprobs": self._token_logprobs(choice)}
            events.append(self._chunk(_delta(index, {}) | ending))
        if self.body.stream_options.include_usage:
            heading = self._heading("chat.completion.chunk")
            events.append(server_sent({**heading, "choices": [], "usage": usage(prompt_tokens, choices)}))
        return b"".join(events)

    def _heading(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created_s, "model": self.body.model}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return server_sent({**self._heading("chat.completion.chunk"), "choices": [choice]})

    def _choice(self, index: int, choice: SampledChoice) -> dict[str, Any]:
        content = choice.content if choice.content or not choice.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        logprobs, reason = self._token_logprobs(choice), _finish_reason(choice)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _token_logprobs(self, choice: SampledChoice) -> dict[str, Any] | None:
        """Return the log-probs of every sampled token, including the end token. The log-probs of other tokens
        at the same place are not known."""
        if not self.body.logprobs:
            return None
        if not np.isfinite(choice.logprobs).all():
            raise ValueError("a log-prob is no number in JSON")
        content = []
        for token, logprob in zip(choice.token_ids.tolist(), choice.logprobs.tolist(), strict=True):
            shown = self._template.raw([token])
            content.append(
                {"token": shown, "logprob": logprob, "bytes": list(shown.encode()), "top_logprobs": []}
            )
        return {"content": content, "refusal": None}


def plain(raw: bytes) -> ChatBody | None:
    """Return the parsed body if `ChatBody` alone can read it. Return None for any other body, also for an
    invalid one. Most bodies are plain, and this takes a third of the time of `read`."""
    try:
        body = _plain.decode(raw)
        if body.tools or body.chat_template_kwargs:
            # At the same depth as in the body, whose other fields have a fixed depth.
            check_json([[[[tool.function.parameters for tool in body.tools]]], body.chat_template_kwargs])
    except (ValueError, RecursionError):
        return None
    return body


_plain = msgspec.json.Decoder(ChatBody)


def read(given: Mapping[str, Any]) -> ChatBody:
    """Return the parsed body. A null field counts as missing. Fields of `HARMLESS` are ignored. Fields of
    `NEUTRAL` may only have the values listed there, which have no effect. Raises `ApiError` with the invalid
    field."""
    kept = {}
    for name, value in given.items():
        if value is None or name in HARMLESS:
            continue
        options = NEUTRAL.get(name)
        if options is None:
            kept[name] = value
        # True == 1 in Python, but not in JSON.
        elif not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in options):
            allowed = " or ".join(json.dumps(one) for one in options)
            raise unsupported(name, f"leave it out, or set it to {allowed}" if allowed else "leave it out")
    if isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [_without_nulls(message) for message in messages]
    try:
        return msgspec.convert(kept, ChatBody)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


def _without_nulls(message: Any) -> Any:
    """Return a message without its null fields. Null fields occur because clients send back every field of an
    answer, and most of these are null."""
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


def _declared(function: ToolFunction) -> dict[str, Any]:
    """Return a tool in the form that chat templates take."""
    parameters = function.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    shown = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": shown}


def _messages(given: list[ChatMessage], images: EpisodeImages) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}
    for i, message in enumerate(given):
        role = "system" if message.role == "developer" else message.role
        if message.content is None and role != "assistant":
            raise bad(f"messages[{i}].content", f"a message of role {role!r} must have content")
        made: Message = {"role": role, "content": _content(message.content, f"messages[{i}].content", images)}
        if message.name is not None:
            made["name"] = message.name
        if role == "assistant" and message.tool_calls:
            made["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        elif role == "tool":
            if message.tool_call_id is None:
                raise bad(f"messages[{i}].tool_call_id", "the answer of a tool must have a tool_call_id")
            made["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                made.setdefault("name", names[message.tool_call_id])  # some templates use it
        messages.append(made)
    return messages


def _content(content: Parts, where: str, images: EpisodeImages) -> Content:
    """Return the content of a message for a chat template. Its images are added to `images`."""
    if content is None or isinstance(content, str):
        return content or ""
    if not any(isinstance(part, ImagePart) for part in content):
        return "\n".join(part.text for part in content if isinstance(part, TextPart))
    parts: list[Any] = []
    for number, part in enumerate(content):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append({"type": "image", "image": _image(part, f"{where}[{number}].image_url.url")})
    try:
        return images.content(parts)
    except ImageError as error:
        raise bad(where, f"an image cannot be used: {error}") from error


def _image(part: ImagePart, where: str) -> bytes:
    url = part.image_url.url
    if url[:5].lower() != "data:":
        raise unsupported(where, "nothing is fetched. Give the image as a data URL (data:image/png;base64,…)")
    try:
        (data,) = image_sources([url], Path())
    except ImageError as error:
        raise bad(where, f"the image cannot be used: {error}. {error.fix}") from error
    assert isinstance(data, bytes)
    return data


def _tool_call(call: MessageToolCall) -> dict[str, Any]:
    """Return a tool call in the form that chat templates take, with its arguments as an object. Arguments
    that are not valid JSON stay text."""
    arguments = call.function.arguments
    try:
        value = load_json(arguments)
    except ValueError:
        value = None
    function = {"name": call.function.name, "arguments": value if isinstance(value, dict) else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _finish_reason(choice: SampledChoice) -> str:
    return "tool_calls" if choice.tool_calls else choice.finish_reason


def usage(prompt: int, choices: Sequence[SampledChoice]) -> dict[str, int]:
    sampled = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


DONE = b"data: [DONE]\n\n"  # The event after the last one of a stream


def server_sent(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encoded(data) + b"\n\n"
