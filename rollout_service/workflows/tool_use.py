"""`tool_use`: the policy may call tools before it answers.

Calls have one of two formats. Parsing them runs no code.

    plain   `name(text)` at the very end of a reply; the tool gets the text unchanged. A reply ends at the
            first `)` that closes every bracket, so the stop string is `)`.
    json    one or more `<tool_call>{"name": "…", "arguments": {…}}</tool_call>` anywhere in a reply, the
            format of the chat templates of Qwen and Hermes models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from areal_async.base.mistakes import Mistake
from areal_async.base.records import Task
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.config.registry import TOOLS
from areal_async.models.answers import spoken
from areal_async.trajectory import SegmentKind
from rollout_service.environments import EnvironmentFactory, load_environment
from rollout_service.gateway.toolcalls import (
    CLOSE,
    OPEN,
    Found,
    ScannedText,
    aside,
    json_block,
    outside_thoughts,
)
from rollout_service.workflows.context import Context, WorkflowResources
from rollout_service.workflows.images import NO_CHAT, Content
from rollout_service.workflows.multi_turn import World, environment_mistakes, opening
from rollout_service.workflows.tools import ToolAnswer, load_tools
from rollout_service.workflows.turns import Reply, Rewritten, TurnError

PLAIN_STOP = ")"


class ToolUse:
    """Loop that runs the tool calls in a reply and shows the model their answers. The loop ends at a reply
    without a call, after `max_calls`, or when the path has no room left. The last reply is the response of
    the episode, and the action for the environment if there is one."""

    class Arguments(Section):
        """`tool_use`: a policy that may call tools before it answers."""

        tools: tuple[str, ...] = Field(min_length=1)
        """Tools: `path.py:name` of functions marked `@tool`, or names of tools in installed packages."""
        format: Literal["plain", "json"] = "plain"
        """Format of calls. `plain`: `name(text)` ends a reply; `json`: `<tool_call>{"name": …,
        "arguments": {…}}</tool_call>`."""
        max_calls: int = Field(default=8, ge=0)
        """Largest number of calls in one episode. The reply after the last call is the answer."""
        answer: str = "={answer}\n"
        """Format of a tool's answer in the plain format."""
        error: str = "error: {error}"
        """Format of the answer of a tool that failed."""
        timeout_s: float = Field(default=10.0, gt=0)
        """Deadline in seconds of one call of a tool or of the environment. If a tool call passes it, the
        model reads an error."""
        output_chars: int = Field(default=2000, ge=1)
        """Largest number of characters of a tool's answer. Longer answers are truncated."""
        environment: str | None = None
        """Environment that asks the question and scores the final answer. None: the question is the task's
        prompt, and `reward.name` scores the answer."""
        environment_args: dict[str, Any] = Field(default_factory=dict)
        """Arguments of the environment."""
        rewritten: Rewritten = "root"
        """Action if the chat template renders earlier turns differently: begin a new root, or fail the
        episode."""

        @field_validator("answer", "error")
        @classmethod
        def _format(cls, text: str, info: ValidationInfo) -> str:
            """Return `text` unchanged. Raises `ValueError` if `str.format` does not accept it with the
            field's name."""
            try:
                text.format(**{str(info.field_name): ""})
            except (KeyError, IndexError, ValueError, AttributeError):
                allowed = f"{{{info.field_name}}}"
                raise ValueError(
                    f"{text!r} may hold {allowed}, and other braces doubled ({{{{ and }}}})"
                ) from None
            return text

    @staticmethod
    def records_reward(arguments: Mapping[str, Any]) -> bool:
        """Return whether the workflow records a reward for its episodes, which it does if it has an
        environment."""
        return bool(arguments.get("environment"))

    def __init__(self, arguments: Arguments, resources: WorkflowResources) -> None:
        self._arguments = arguments
        self._environment: EnvironmentFactory | None = None
        if arguments.environment is not None:
            self._environment = load_environment(arguments.environment, arguments.environment_args)
        resources.tools = load_tools(arguments.tools)
        resources.timeout_s, resources.output_chars = arguments.timeout_s, arguments.output_chars

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        yield from environment_mistakes(arguments, field)
        for name in arguments.get("tools", ()):
            if ".py:" not in name:
                yield from TOOLS.mistakes(name, None, field=f"{field}.tools", args_field="")

    async def __call__(self, ctx: Context, task: Task) -> None:
        arguments = self._arguments
        async with AsyncExitStack() as stack:
            prompt, world = task.prompt, None
            if self._environment is not None:
                world = await stack.enter_async_context(World(self._environment, arguments.timeout_s, ctx))
                prompt = opening(prompt, await world.reset(task))
            tools = ctx.resources.tools.values() if arguments.format == "json" else ()
            schemas = [tool.schema for tool in tools]
            segment = await ctx.observed(SegmentKind.PROMPT, prompt, parent=None, tools=schemas)
            left, turn, answer, opened = arguments.max_calls, 0, "", False
            while ctx.room(segment) >= 1:
                plain = arguments.format == "plain" and left > 0
                opened = ctx.opens_thought(segment)
                reply, answer = await _generate(ctx, segment, turn, plain=plain, opened=opened)
                calls = (await aside(self._calls, answer, opened))[:left]
                if not calls:
                    break
                left -= len(calls)
                turn += 1
                segment = await self._answer(ctx, reply.segment, calls, turn)
            # The whole reply, because an answer may end in the bracket that stopped it.
            ctx.builder.text(response=answer)
            ctx.builder.meta(turns=turn + 1)
            if world is not None:
                ctx.reward((await world.step(spoken(answer, opened=opened))).reward)

    def _calls(self, text: str, opened: bool) -> list[RequestedCall]:
        if self._arguments.format == "json":
            return json_calls(text, opened=opened)
        call = plain_call(spoken(text, opened=opened))
        return [call] if call else []

    async def _answer(self, ctx: Context, parent: int, calls: list[RequestedCall], turn: int) -> int:
        """Run the calls in order and add their answers as one TOOL segment."""
        arguments = self._arguments
        texts: list[Content] = []
        for call in calls:
            given = ToolAnswer("", call.problem)
            if not call.problem:
                given = await ctx.call_tool(call.name, call.arguments)
            shown = arguments.error.format(error=given.error) if given.error else given.text
            texts.append([*given.parts] or shown)
            if given.parts and not ctx.is_chat(parent):
                raise TurnError(NO_CHAT)
        content: Any = "".join(arguments.answer.format(answer=text) for text in texts)
        if ctx.is_chat(parent):
            named = zip(calls, texts, strict=True)
            content = [{"role": "tool", "name": call.name, "content": text} for call, text in named]
        how: Any = {"turn": turn, "rewritten": arguments.rewritten}
        return await ctx.observed(SegmentKind.TOOL, content, parent=parent, **how)


async def _generate(ctx: Context, segment: int, turn: int, *, plain: bool, opened: bool) -> tuple[Reply, str]:
    """Return a reply and its text. If a plain reply was stopped at a bracket that does not complete a call,
    sampling continues until the reply is a complete call or ends."""
    left = ctx.sampling.max_new_tokens
    stop = (*ctx.sampling.stop, PLAIN_STOP) if plain else ctx.sampling.stop
    reply = await ctx.generate(parent=segment, turn=turn, stop=stop)
    text = ctx.decoded(reply.token_ids)
    while plain and reply.finish_reason == "stop" and text.endswith(PLAIN_STOP):
        left -= len(reply.token_ids)
        said = spoken(text, opened=opened)
        if (plain_call(said) and not open_brackets(said)) or min(left, ctx.room(reply.segment)) < 1:
            break
        reply = await ctx.generate(parent=reply.segment, turn=turn, stop=stop, max_new_tokens=left)
        text += ctx.decoded(reply.token_ids)
    return reply, text


@dataclass(frozen=True)
class RequestedCall:
    """A tool call in a reply. `problem` is the reason if the call cannot be made."""

    name: str
    arguments: str | Mapping[str, Any]
    problem: str = ""


def open_brackets(text: str) -> int:
    """Return the number of open brackets; never below 0."""
    depth = 0
    for character in text:
        depth = depth + 1 if character == "(" else max(0, depth - (character == ")"))
    return depth


def plain_call(text: str) -> RequestedCall | None:
    """Return the call at the end of `text`, or None."""
    text = text.rstrip()
    if not text.endswith(")"):
        return None
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] == ")") - (text[at] == "(")
        if depth == 0:
            name = re.search(r"[A-Za-z_][A-Za-z0-9_]*\Z", text[:at])
            return RequestedCall(name[0], text[at + 1 : -1]) if name else None
    return None


def json_calls(text: str, *, opened: bool = False) -> list[RequestedCall]:
    """Return every call in `text` outside of thoughts, in order. A call with invalid JSON has a `problem`.
    `opened` means that the prompt has opened a thought."""
    source = ScannedText(text)

    def read(at: int, begin: int) -> Found:
        value, problem, end = json_block(source, at)
        if (value is None and not problem) or not text.startswith(CLOSE, end - len(CLOSE)):
            return Found(at, end)  # only a mention of the tag, or not closed
        call = RequestedCall("", {}, f"the call is not JSON: {problem}") if problem else _json_call(value)
        return Found(at, end, [call])

    return [each.calls[0] for each in outside_thoughts(text, (OPEN,), read, opened=opened)]


def _json_call(value: Any) -> RequestedCall:
    given = value if isinstance(value, dict) else {}
    name, arguments = given.get("name"), given.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return RequestedCall("", {}, 'a call is {"name": "…", "arguments": {…}}')
    return RequestedCall(name, arguments)
