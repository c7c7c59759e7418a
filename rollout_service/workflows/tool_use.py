"""`tool_use`: the policy may call tools before it answers."""

from __future__ import annotations

from contextlib import AsyncExitStack

from areal_async.config.workflow import ToolUseArguments
from areal_async.rpc.messages import Task
from areal_async.trajectory import SegmentKind
from rollout_service.environments import Factory
from rollout_service.workflows.calls import PLAIN_STOP, ToolCall, json_calls, open_brackets, plain_call
from rollout_service.workflows.context import Context
from rollout_service.workflows.multi_turn import opening
from rollout_service.workflows.render import Reply
from rollout_service.workflows.world import World


async def tool_use(
    ctx: Context, task: Task, arguments: ToolUseArguments, environment: Factory | None = None
) -> None:
    """Run the calls that end a reply and show their answers, until a reply has none, `max_calls` are made, or
    the path has no room left. That reply is the episode's response, and the environment's action."""
    async with AsyncExitStack() as stack:
        prompt, world = task.prompt, None
        if environment is not None:
            world = await stack.enter_async_context(World(environment, arguments.timeout_s, ctx))
            prompt = opening(prompt, await world.reset(task))
        schemas = [tool.schema for tool in ctx.kit.tools.values()] if arguments.format == "json" else []
        segment = ctx.observe(SegmentKind.PROMPT, prompt, parent=None, tools=schemas)
        left, turn, answer = arguments.max_calls, 0, ""
        while ctx.room(segment) >= 1:
            reply, answer = await _speak(ctx, segment, turn, plain=arguments.format == "plain" and left > 0)
            calls = _calls(answer, arguments)[:left]
            if not calls:
                break
            left -= len(calls)
            turn += 1
            segment = await _answer(ctx, reply.segment, calls, turn, arguments)
        # The whole reply: an answer may end in the bracket that stopped it.
        ctx.builder.text(response=answer)
        ctx.builder.meta(turns=turn + 1)
        if world is not None:
            ctx.reward((await world.step(answer)).reward)


async def _speak(ctx: Context, segment: int, turn: int, *, plain: bool) -> tuple[Reply, str]:
    """A reply and its text. A plain one that a bracket stopped goes on, unless it is a call by then."""
    left = ctx.sampling.max_new_tokens
    stop = (*ctx.sampling.stop, PLAIN_STOP) if plain else ctx.sampling.stop
    reply = await ctx.generate(parent=segment, turn=turn, stop=stop)
    text = ctx.decoded(reply.token_ids)
    while plain and reply.finish_reason == "stop" and text.endswith(PLAIN_STOP):
        left -= len(reply.token_ids)
        call = plain_call(text)
        if (call is not None and not open_brackets(text)) or left < 1 or ctx.room(reply.segment) < 1:
            break
        reply = await ctx.generate(parent=reply.segment, turn=turn, stop=stop, max_new_tokens=left)
        text += ctx.decoded(reply.token_ids)
    return reply, text


def _calls(text: str, arguments: ToolUseArguments) -> list[ToolCall]:
    if arguments.format == "json":
        return json_calls(text)
    call = plain_call(text)
    return [call] if call else []


async def _answer(
    ctx: Context, parent: int, calls: list[ToolCall], turn: int, arguments: ToolUseArguments
) -> int:
    """Run the calls in order and add their answers as one TOOL segment."""
    texts = []
    for call in calls:
        if call.problem:
            error, text = call.problem, ""
        else:
            given = await ctx.call_tool(call.name, call.arguments, timeout_s=arguments.timeout_s)
            error, text = given.error, given.text
        texts.append(arguments.error.format(error=error) if error else text)
    if ctx.is_chat(parent):
        content = [
            {"role": "tool", "name": call.name, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return ctx.observe(SegmentKind.TOOL, content, parent=parent, turn=turn, rewritten=arguments.rewritten)
    shown = "".join(arguments.answer.format(answer=text) for text in texts)
    return ctx.observe(SegmentKind.TOOL, shown, parent=parent, turn=turn)
