"""`/v1/chat/completions` of OpenAI: its body into an `Ask`, an `Answer` into its reply or its chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollout_service.gateway import jsontext
from rollout_service.gateway.calls import Answer, Ask, Choice, Conversation, Message, Wishes
from rollout_service.gateway.errors import bad, unsupported
from rollout_service.gateway.fields import (
    MAX_STOPS,
    STREAM_OPTIONS,
    Body,
    flag,
    joined,
    listed,
    mapping,
    number,
    only,
    text,
    texts,
    whole,
)
from rollout_service.gateway.template import ChatTemplate

HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )
)
"""Fields that say nothing about the answer."""
READ = frozenset(
    (
        "messages",
        "model",
        "tools",
        "tool_choice",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "chat_template_kwargs",
    )
)
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
    "functions": (),
    "function_call": (),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_TEMPLATE_OWN = frozenset(
    ("messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template")
)
_MESSAGE = frozenset(("role", "content", "name", "tool_calls", "tool_call_id"))
_ROLES = {"developer": "system"}


def parse_ask(body: Body, *, most: int) -> Ask:
    """Raises `ApiError`. `most` answers may be asked for."""
    only(body, READ | HARMLESS, NEUTRAL)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed(body, "tools"))]
    messages = parse_messages(listed(body, "messages"))
    template = mapping(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if clash := _TEMPLATE_OWN & set(template):
        raise bad("chat_template_kwargs", f"{sorted(clash)[0]} is not for the caller to set")
    return Ask(
        Conversation(messages, tools, dict(template)),
        wishes(body, "max_completion_tokens", "max_tokens"),
        n=whole(body, "n", low=1, high=most) or 1,
        model=text(body, "model"),
        parse_tools=_choice_of_tools(body.get("tool_choice")),
    )


def wishes(body: Body, *limits: str) -> Wishes:
    """Sampling parameters; the first of `limits` that is there counts."""
    most = [value for name in limits if (value := whole(body, name, low=1)) is not None]
    return Wishes(
        temperature=number(body, "temperature", low=0),
        top_p=number(body, "top_p", low=1e-6, high=1),
        top_k=_top_k(body),
        max_tokens=most[0] if most else None,
        stop=texts(body, "stop", most=MAX_STOPS),
        seed=whole(body, "seed", low=-(2**63), high=2**63 - 1),
    )


def _top_k(body: Body) -> int | None:
    """0 and -1 both mean all, as the inference servers have it."""
    value = whole(body, "top_k", low=-1)
    return None if value is None else max(0, value)


def streaming(body: Body) -> tuple[bool, bool]:
    """Whether to stream, and whether with usage at the end."""
    options = mapping(body.get("stream_options") or {}, "stream_options")
    only(options, STREAM_OPTIONS, {}, "stream_options.")
    return flag(body, "stream"), bool(options.get("include_usage"))


def _choice_of_tools(value: Any) -> bool:
    if value is None or value == "auto":
        return True
    if value == "none":
        return False
    raise unsupported("tool_choice", "only 'auto' and 'none' are, the model cannot be forced to call a tool")


def _tool(tool: Any, where: str) -> dict[str, Any]:
    tool = mapping(tool, where)
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", "only 'function' is")
    function = mapping(tool.get("function"), f"{where}.function")
    # `strict` asks the provider for valid arguments: here the agent sees what the model wrote.
    only(function, ("name", "description", "parameters", "strict"), {}, f"{where}.function.")
    text(function, "name", f"{where}.function.")
    kept = {k: v for k, v in function.items() if k in ("name", "description", "parameters") and v is not None}
    kept.setdefault("description", "")
    kept.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": kept}


def parse_messages(given: list[Any]) -> list[Message]:
    if not given:
        raise bad("messages", "messages must have at least one message")
    messages: list[Message] = []
    names: dict[str, str] = {}
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        message = mapping(message, where)
        role = text(message, "role", f"{where}.")
        role = _ROLES.get(role, role)
        if role not in ("system", "user", "assistant", "tool"):
            raise bad(f"{where}.role", f"the role {role!r} is unknown")
        only(message, _MESSAGE, {"annotations": ([],)}, f"{where}.")
        content = joined(message.get("content"), f"{where}.content")
        if message.get("content") is None and role != "assistant":
            raise bad(f"{where}.content", f"a message of role {role!r} must have content")
        made: Message = {"role": role, "content": content}
        if message.get("name") is not None:
            made["name"] = text(message, "name", f"{where}.")
        if role == "assistant":
            calls = listed(message, "tool_calls", f"{where}.")
            if calls:
                made["tool_calls"] = [
                    _tool_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(calls)
                ]
                names |= {call["id"]: call["function"]["name"] for call in made["tool_calls"]}
        elif role == "tool":
            made["tool_call_id"] = text(message, "tool_call_id", f"{where}.")
            name_result(made, names)
        messages.append(made)
    return messages


def name_result(message: Message, names: dict[str, str]) -> None:
    """A tool's answer carries the tool's name: some templates show it."""
    if (name := names.get(message["tool_call_id"])) is not None:
        message.setdefault("name", name)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    call = mapping(call, where)
    if call.get("type", "function") != "function":
        raise unsupported(f"{where}.type", "only 'function' is")
    function = mapping(call.get("function"), f"{where}.function")
    arguments = text(function, "arguments", f"{where}.function.")
    return {
        "id": text(call, "id", f"{where}."),
        "type": "function",
        "function": {
            "name": text(function, "name", f"{where}.function."),
            "arguments": _loaded(arguments),
        },
    }


def _loaded(arguments: str) -> Any:
    """Templates take arguments as an object; text that is none stays text."""
    try:
        value = jsontext.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


# --- replies -----------------------------------------------------------------------------------------


def reply(ask: Ask, answer: Answer, template: ChatTemplate, *, logprobs: bool) -> dict[str, Any]:
    choices = []
    for index, choice in enumerate(answer.choices):
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.content if choice.content or not choice.tool_calls else None,
            "refusal": None,
        }
        if choice.tool_calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in choice.tool_calls]
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": token_logprobs(choice, template) if logprobs else None,
                "finish_reason": finish_reason(choice),
            }
        )
    return {
        **_head(ask, answer.id, answer.created_s, "chat.completion"),
        "choices": choices,
        "usage": usage(answer),
    }


class Chunks:
    """One streamed reply. `delta` gives text on the way, `finish` the rest."""

    def __init__(self, ask: Ask, id: str, created_s: int) -> None:
        self._ask = ask
        self._head = _head(ask, id, created_s, "chat.completion.chunk")

    def begin(self) -> Iterator[dict[str, Any]]:
        for index in range(self._ask.n):
            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def delta(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(index, {"content": text})

    def finish(
        self, answer: Answer, rests: list[str], template: ChatTemplate, *, logprobs: bool, with_usage: bool
    ) -> Iterator[dict[str, Any]]:
        """`rests` is what each answer's text has beyond its deltas."""
        for index, (choice, rest) in enumerate(zip(answer.choices, rests, strict=True)):
            if rest:
                yield self.delta(index, rest)
            for i, call in enumerate(choice.tool_calls):
                made = {"index": i, **_call(call.id, call.name, call.arguments)}
                yield self._chunk(index, {"tool_calls": [made]})
            last = self._chunk(index, {}, finish_reason(choice))
            if logprobs:
                last["choices"][0]["logprobs"] = token_logprobs(choice, template)
            yield last
        if with_usage:
            yield {**self._head, "choices": [], "usage": usage(answer)}

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head, "choices": [choice]}


def _head(ask: Ask, id: str, created_s: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": created_s, "model": ask.model}


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def finish_reason(choice: Choice) -> str:
    return "tool_calls" if choice.tool_calls else choice.finish_reason


def usage(*answers: Answer) -> dict[str, Any]:
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def token_logprobs(choice: Choice, template: ChatTemplate) -> dict[str, Any]:
    """Of every sampled token, the end token among them; alternatives are not known."""
    content = []
    for token, logprob in zip(choice.token_ids.tolist(), choice.logprobs.tolist(), strict=True):
        shown = template.decode([token])
        content.append(
            {"token": shown, "logprob": logprob, "bytes": list(shown.encode()), "top_logprobs": []}
        )
    return {"content": content, "refusal": None}
