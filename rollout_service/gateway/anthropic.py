"""Anthropic's `/v1/messages`: its body into a request, a completion into its reply or its events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollout_service.gateway.requests import (
    ApiError,
    CompletionRequest,
    CompletionResult,
    Conversation,
    Message,
    Positive,
    SampledChoice,
    SamplingOverrides,
    StopTexts,
    Temperature,
    TextPart,
    ToolChoice,
    TopP,
    bad,
    joined,
    name_result,
    read,
    server_sent,
    stops,
    unsupported,
)
from rollout_service.gateway.template import ChatTemplate

HARMLESS = frozenset(("metadata", "service_tier", "cache_control"))
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "betas": ([],),
    **dict.fromkeys(("container", "context_management", "output_config", "output_format"), ()),
}


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag="tool_result", tag_field="type"):
    tool_use_id: str
    content: str | list[TextPart] | None = None


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[TextPart | ToolUseBlock | ToolResultBlock]


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    """Other types run on Anthropic's servers."""
    cache_control: Any = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct):
    type: ToolChoice
    """The model cannot be forced to call a tool."""
    disable_parallel_tool_use: bool = False


class MessagesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    model: str
    max_tokens: Positive | None = None
    system: str | list[TextPart] | None = None
    tools: list[AnthropicTool] = []
    tool_choice: AnthropicToolChoice | None = None
    stop_sequences: StopTexts | None = None
    stream: bool = False
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None


class MessagesFormat:
    """See `server.WireFormat`. A stream has Anthropic's order: message_start, per block start, deltas
    and stop, then message_delta and message_stop."""

    def __init__(
        self, given: dict[str, Any], template: ChatTemplate, most: int, *, counting: bool = False
    ) -> None:
        """Without `max_tokens` only where tokens are counted. Raises `ApiError`."""
        try:
            body = read(given, MessagesBody, harmless=HARMLESS, neutral=NEUTRAL)
            request = _request(body, counting=counting)
        except ApiError as error:
            # Anthropic writes the place of an item with dots.
            error.param = error.param and error.param.replace("[", ".").replace("]", "")
            raise
        self.request = request
        self.stream = body.stream
        self._model = body.model
        self._text_open = False

    def reply(self, completion: CompletionResult) -> dict[str, Any]:
        choice = completion.choices[0]
        blocks: list[dict[str, Any]] = []
        if choice.content or not choice.tool_calls:
            blocks.append({"type": "text", "text": choice.content})
        for call in choice.tool_calls:
            given = json.loads(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        message = self._message(blocks, completion.prompt_tokens)
        return {**message, **_ending(choice), "usage": _usage(completion)}

    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        yield _event("message_start", message=self._message([], prompt_tokens))

    def delta(self, index: int, text: str) -> Iterator[bytes]:
        if not self._text_open:
            self._text_open = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def finish(self, completion: CompletionResult, rests: Sequence[str]) -> Iterator[bytes]:
        choice = completion.choices[0]
        if rests[0] or not (self._text_open or choice.tool_calls):
            yield from self.delta(0, rests[0])
        if self._text_open:
            yield _event("content_block_stop", index=0)
        for index, call in enumerate(choice.tool_calls, int(self._text_open)):
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield _event("content_block_start", index=index, content_block=block)
            part = {"type": "input_json_delta", "partial_json": call.arguments}
            yield _event("content_block_delta", index=index, delta=part)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_ending(choice), usage=_usage(completion))
        yield _event("message_stop")

    def _message(self, blocks: list[dict[str, Any]], prompt_tokens: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }


def _request(body: MessagesBody, *, counting: bool) -> CompletionRequest:
    if body.max_tokens is None and not counting:
        raise bad("max_tokens", "this field is required")
    choice = body.tool_choice
    if choice is not None and choice.disable_parallel_tool_use:
        raise unsupported("tool_choice.disable_parallel_tool_use", "the model may call several tools")
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in body.tools
    ]
    return CompletionRequest(
        Conversation(_messages(body), tools),
        SamplingOverrides(
            body.temperature, body.top_p, body.top_k, body.max_tokens, stops(body.stop_sequences)
        ),
        parse_tools=choice is None or choice.type == "auto",
        tool_id_prefix="toolu_",
    )


def _messages(body: MessagesBody) -> list[Message]:
    made: list[Message] = []
    if system := joined(body.system):
        made.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    for i, message in enumerate(body.messages):
        content = message.content
        blocks = [TextPart(content)] if isinstance(content, str) else content
        convert = _assistant if message.role == "assistant" else _user
        made += convert(blocks, f"messages[{i}].content", names)
    if made[-1]["role"] == "assistant":
        raise unsupported("messages", "a last message of the assistant, to be gone on with, is not")
    return made


def _assistant(blocks: list[Any], where: str, names: dict[str, str]) -> list[Message]:
    for at, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            raise unsupported(f"{where}[{at}]", "the assistant has no tool_result")
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    names |= {use.id: use.name for use in uses}
    text = "\n".join(block.text for block in blocks if isinstance(block, TextPart))
    made: Message = {"role": "assistant", "content": text}
    if uses:
        made["tool_calls"] = [
            {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.input}}
            for use in uses
        ]
    return [made]


def _user(blocks: list[Any], where: str, names: dict[str, str]) -> list[Message]:
    """Tools' answers become messages of their own; the text around them stays in its place."""
    made: list[Message] = []
    for at, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            raise unsupported(f"{where}[{at}]", "only the assistant uses tools")
        if isinstance(block, ToolResultBlock):
            result = {
                "role": "tool",
                "content": joined(block.content),
                "tool_call_id": block.tool_use_id,
            }
            name_result(result, names)
            made.append(result)
        elif made and made[-1]["role"] == "user":
            made[-1]["content"] += f"\n{block.text}"
        else:
            made.append({"role": "user", "content": block.text})
    if not made:
        raise bad(where, "must not be empty")
    return made


def _usage(completion: CompletionResult) -> dict[str, int]:
    return {"input_tokens": completion.prompt_tokens, "output_tokens": completion.completion_tokens}


def _ending(choice: SampledChoice) -> dict[str, str | None]:
    reason = "end_turn" if choice.stop_sequence is None else "stop_sequence"
    if choice.tool_calls:
        reason = "tool_use"
    elif choice.finish_reason == "length":
        reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": choice.stop_sequence}


def _event(name: str, **data: Any) -> bytes:
    return server_sent({"type": name, **data}, name)
