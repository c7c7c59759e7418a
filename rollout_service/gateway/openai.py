"""OpenAI's `/v1/chat/completions` and `/v1/completions`: bodies into requests, completions into replies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollout_service.gateway import jsontext
from rollout_service.gateway.errors import bad
from rollout_service.gateway.requests import (
    CompletionRequest,
    CompletionResult,
    Conversation,
    Message,
    Positive,
    SampledChoice,
    SamplingOverrides,
    StopText,
    StopTexts,
    Temperature,
    TextPart,
    ToolChoice,
    TopP,
    joined,
    name_result,
    read,
    server_sent,
    stops,
)
from rollout_service.gateway.template import ChatTemplate

HARMLESS = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ]
)
"""Fields that say nothing about the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    **dict.fromkeys(("functions", "function_call", "audio", "prediction"), ()),
    **dict.fromkeys(("reasoning_effort", "verbosity", "web_search_options"), ()),
}
NEUTRAL_TEXT: dict[str, tuple[Any, ...]] = {**NEUTRAL, "echo": (False,), "suffix": ("",)}
TEMPLATE_OWN = frozenset(
    ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template")
)
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class OpenAIBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both APIs have."""

    model: str
    n: Positive = 1
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 and -1 both mean all, as the inference servers have it."""
    max_tokens: Positive | None = None
    stop: StopText | StopTexts | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)

    def overrides(self, max_tokens: int | None) -> SamplingOverrides:
        top_k = None if self.top_k is None else max(0, self.top_k)
        return SamplingOverrides(self.temperature, self.top_p, top_k, max_tokens, stops(self.stop), self.seed)


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Asks the provider for valid arguments: here the agent sees what the model wrote."""


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
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] = []
    tool_call_id: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] = []


class ChatBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[DeclaredTool] = []
    tool_choice: ToolChoice = "auto"
    """The model cannot be forced to call a tool."""
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class TextBody(OpenAIBody, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    best_of: Positive | None = None
    logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    """OpenAI counts the sampled token beside so many alternatives; alternatives are not known here."""


class _OpenAIFormat:
    """What both APIs write alike; see `WireFormat`."""

    id_prefix = ""
    kind = chunk_kind = ""

    def __init__(self, body: OpenAIBody, requests: list[CompletionRequest], *, logprobs: bool) -> None:
        self.requests = requests
        self.stream = body.stream
        self._model = body.model
        self._include_usage = body.stream_options.include_usage
        self._logprobs = logprobs
        self._head: dict[str, Any] = {}

    def reply(self, completions: Sequence[CompletionResult]) -> dict[str, Any]:
        head = self._heading(completions[0].id, completions[0].created_s, self.kind)
        choices = [self._choice(index, choice) for index, choice in enumerate(_choices(completions))]
        return {**head, "choices": choices, "usage": usage(completions)}

    def begin(self, id: str, created_s: int, prompt_tokens: int) -> Iterator[bytes]:
        self._head = self._heading(id, created_s, self.chunk_kind)
        return iter(())

    def delta(self, index: int, text: str) -> Iterator[bytes]:
        yield self._chunk(self._text_delta(index, text))

    def finish(self, completions: Sequence[CompletionResult], rests: Sequence[str]) -> Iterator[bytes]:
        for index, (choice, rest) in enumerate(zip(_choices(completions), rests, strict=True)):
            for last in self._last(index, choice, rest):
                yield self._chunk(last)
        if self._include_usage:
            yield server_sent({**self._head, "choices": [], "usage": usage(completions)})
        yield b"data: [DONE]\n\n"

    def _heading(self, id: str, created_s: int, kind: str) -> dict[str, Any]:
        return {"id": self.id_prefix + id, "object": kind, "created": created_s, "model": self._model}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return server_sent({**self._head, "choices": [choice]})

    def _choice(self, index: int, choice: SampledChoice) -> dict[str, Any]:
        """One answer of a whole reply."""
        raise NotImplementedError

    def _text_delta(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _last(self, index: int, choice: SampledChoice, rest: str) -> Iterator[dict[str, Any]]:
        """What ends one answer of a stream."""
        raise NotImplementedError


class ChatFormat(_OpenAIFormat):
    id_prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, given: dict[str, Any], template: ChatTemplate, most: int) -> None:
        """At most `most` answers may be asked for. Raises `ApiError`."""
        body = read(given, ChatBody, harmless=HARMLESS, neutral=NEUTRAL_CHAT)
        _check_count("n", body.n, most)
        if clash := TEMPLATE_OWN & set(body.chat_template_kwargs):
            raise bad("chat_template_kwargs", f"{sorted(clash)[0]} is not for the caller to set")
        tools = [_declared(tool.function) for tool in body.tools]
        request = CompletionRequest(
            Conversation(_messages(body.messages), tools, body.chat_template_kwargs),
            body.overrides(body.max_completion_tokens or body.max_tokens),
            n=body.n,
            parse_tools=body.tool_choice == "auto",
        )
        super().__init__(body, [request], logprobs=body.logprobs)
        self._template = template

    def begin(self, id: str, created_s: int, prompt_tokens: int) -> Iterator[bytes]:
        yield from super().begin(id, created_s, prompt_tokens)
        for index in range(self.requests[0].n):
            yield self._chunk(_delta(index, {"role": "assistant", "content": "", "refusal": None}))

    def _choice(self, index: int, choice: SampledChoice) -> dict[str, Any]:
        content = choice.content if choice.content or not choice.tool_calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.tool_calls:
            message["tool_calls"] = _called(choice)
        logprobs, reason = self._token_logprobs(choice), _finish_reason(choice)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _text_delta(self, index: int, text: str) -> dict[str, Any]:
        return _delta(index, {"content": text})

    def _last(self, index: int, choice: SampledChoice, rest: str) -> Iterator[dict[str, Any]]:
        if rest:
            yield self._text_delta(index, rest)
        for i, call in enumerate(_called(choice)):
            yield _delta(index, {"tool_calls": [{"index": i, **call}]})
        reason = _finish_reason(choice)
        yield _delta(index, {}) | {"finish_reason": reason, "logprobs": self._token_logprobs(choice)}

    def _token_logprobs(self, choice: SampledChoice) -> dict[str, Any] | None:
        """Log-probs of every sampled token, the end token among them; alternatives are not known."""
        if not self._logprobs:
            return None
        content = []
        for token, logprob in zip(choice.token_ids.tolist(), choice.logprobs.tolist(), strict=True):
            shown = self._template.decode([token])
            content.append(
                {"token": shown, "logprob": logprob, "bytes": list(shown.encode()), "top_logprobs": []}
            )
        return {"content": content, "refusal": None}


class TextFormat(_OpenAIFormat):
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(self, given: dict[str, Any], template: ChatTemplate, most: int) -> None:
        """One request a prompt; at most `most` answers may be asked for. Raises `ApiError`."""
        body = read(given, TextBody, harmless=HARMLESS, neutral=NEUTRAL_TEXT)
        _check_count("n", body.n, most)
        if body.best_of not in (None, body.n):
            raise bad("best_of", "best_of must equal n: every sample is returned")
        prompts = _prompts(body.prompt)
        if len(prompts) * body.n > most:
            problem = f"{len(prompts)} prompts with n = {body.n} are more than {most} answers at once"
            raise bad("prompt", problem)
        overrides = body.overrides(body.max_tokens)
        requests = [CompletionRequest(prompt, overrides, n=body.n) for prompt in prompts]
        super().__init__(body, requests, logprobs=body.logprobs is not None)
        self._template = template

    def _choice(self, index: int, choice: SampledChoice) -> dict[str, Any]:
        return next(self._last(index, choice, choice.content))

    def _text_delta(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _last(self, index: int, choice: SampledChoice, rest: str) -> Iterator[dict[str, Any]]:
        logprobs = None
        if self._logprobs:
            tokens = [self._template.decode([token]) for token in choice.token_ids.tolist()]
            offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": choice.logprobs.tolist(),
                "top_logprobs": None,
                "text_offset": offsets,
            }
        yield {"index": index, "text": rest, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise bad(name, f"{name} must be an integer from 1 to {most}")


def _declared(function: ToolFunction) -> dict[str, Any]:
    """A tool as chat templates take it."""
    parameters = function.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    shown = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": shown}


def _messages(given: list[ChatMessage]) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}
    for i, message in enumerate(given):
        role = "system" if message.role == "developer" else message.role
        if message.content is None and role != "assistant":
            raise bad(f"messages[{i}].content", f"a message of role {role!r} must have content")
        made: Message = {"role": role, "content": joined(message.content)}
        if message.name is not None:
            made["name"] = message.name
        if role == "assistant" and message.tool_calls:
            made["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        elif role == "tool":
            if message.tool_call_id is None:
                raise bad(f"messages[{i}].tool_call_id", "the answer of a tool must have a tool_call_id")
            made["tool_call_id"] = message.tool_call_id
            name_result(made, names)
        messages.append(made)
    return messages


def _tool_call(call: MessageToolCall) -> dict[str, Any]:
    """Templates take arguments as an object; text that is none stays text."""
    arguments: Any = call.function.arguments
    try:
        value = jsontext.loads(arguments)
    except ValueError:
        value = None
    function = {
        "name": call.function.name,
        "arguments": value if isinstance(value, dict) else arguments,
    }
    return {"id": call.id, "type": "function", "function": function}


def _prompts(given: str | list[Any]) -> list[str | tuple[int, ...]]:
    """Text, ids, or a list of either; none of them empty."""
    several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    prompts: list[str | tuple[int, ...]] = []
    for one in several:
        try:
            if isinstance(one, str):
                prompts.append(msgspec.convert(one, StopText))
            else:
                prompts.append(tuple(msgspec.convert(one, Annotated[list[TokenId], Meta(min_length=1)])))
        except msgspec.ValidationError:
            raise bad(
                "prompt",
                "prompt must be a string, a list of token ids, or a list of one or the other, none empty",
            ) from None
    return prompts


def _choices(completions: Sequence[CompletionResult]) -> list[SampledChoice]:
    return [choice for completion in completions for choice in completion.choices]


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _called(choice: SampledChoice) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.tool_calls
    ]


def _finish_reason(choice: SampledChoice) -> str:
    return "tool_calls" if choice.tool_calls else choice.finish_reason


def usage(completions: Sequence[CompletionResult]) -> dict[str, Any]:
    prompt = sum(completion.prompt_tokens for completion in completions)
    sampled = sum(completion.completion_tokens for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
