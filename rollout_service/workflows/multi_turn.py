"""`multi_turn`: the policy acts in an environment, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_async.config.workflow import MultiTurnArguments
from areal_async.rpc.messages import Task
from areal_async.trajectory import SegmentKind
from rollout_service.environments import Factory
from rollout_service.workflows.context import Context
from rollout_service.workflows.world import World


async def multi_turn(ctx: Context, task: Task, arguments: MultiTurnArguments, environment: Factory) -> None:
    """Show what the environment shows, take each reply as an action, until it is over, `max_turns` are made,
    or the path has no room left. Each turn's reward is its reply's segment's; the episode's is their sum, or
    the last one's."""
    async with World(environment, arguments.timeout_s, ctx) as world:
        observation = await world.reset(task)
        segment = ctx.observe(
            SegmentKind.PROMPT, opening(task.prompt, observation, arguments.first), parent=None
        )
        rewards: list[float] = []
        info: dict[str, Any] = {}
        done = False
        stop = (*ctx.sampling.stop, *arguments.stop)
        for turn in range(arguments.max_turns):
            if ctx.room(segment) < 1:
                break
            if (state := world.state()) is not None:
                ctx.anchor(state)
            reply = await ctx.generate(parent=segment, turn=turn, stop=stop)
            step = await world.step(ctx.decoded(reply.token_ids))
            rewards.append(float(step.reward))
            ctx.reward(rewards[-1], segment=reply.segment)
            info, done = dict(step.info), step.done
            if done or turn + 1 == arguments.max_turns:
                break
            text = arguments.turn.format(observation=step.observation)
            content = [{"role": "user", "content": text}] if ctx.is_chat(segment) else text
            segment = ctx.observe(
                SegmentKind.ENVIRONMENT,
                content,
                parent=reply.segment,
                turn=turn + 1,
                rewritten=arguments.rewritten,
            )
        total = sum(rewards) if arguments.reward == "sum" else (rewards or [0.0])[-1]
        ctx.reward(total)
        ctx.builder.meta(turns=len(rewards), done=done, info=info)


def opening(
    prompt: str | Sequence[dict[str, Any]], observation: str, first: str = "{prompt}{observation}"
) -> str | list[dict[str, Any]]:
    """The task's prompt with what the environment shows first: joined as `first` says; or, of a chat, in its
    last message if that is the user's, else as a message of the user's own."""
    if isinstance(prompt, str):
        return first.format(prompt=prompt, observation=observation)
    if not observation:
        return list(prompt)
    *before, last = prompt
    if last["role"] != "user":
        return [*prompt, {"role": "user", "content": observation}]
    joined = "\n\n".join(text for text in (str(last["content"]), observation) if text)
    return [*before, {**last, "content": joined}]
