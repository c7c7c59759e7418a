"""`self_correction`: the policy answers again after a verifier has said that it is wrong."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from areal_async.config.workflow import SelfCorrectionArguments
from areal_async.errors import ArealError
from areal_async.rpc.messages import Task
from areal_async.rpc.verdicts import Abstain, Score
from areal_async.trajectory import SegmentKind
from reward_service.sdk import RewardFunction, RewardInput
from rollout_service.workflows.context import Context


class VerifierError(ArealError):
    """The verifier gave no score, so it is not known whether to try again."""


async def self_correction(
    ctx: Context, task: Task, arguments: SelfCorrectionArguments, verifier: RewardFunction
) -> None:
    """Answer, and after each wrong answer read `retry` and answer again. The last answer is the episode's
    response; its score, times `discount` for every retry, is the episode's own reward."""
    reply = await ctx.generate(task.prompt)
    retries = 0
    while True:
        score = await _score(ctx, verifier, task, reply.text, arguments.timeout_s)
        ctx.reward(score, segment=reply.segment)
        over = score >= arguments.right_from or retries + 1 >= arguments.attempts
        if over or ctx.room(reply.segment) < 1:
            break
        retries += 1
        retry: Any = arguments.retry
        if ctx.is_chat(reply.segment):
            retry = [{"role": "user", "content": arguments.retry.strip()}]
        segment = ctx.observe(
            SegmentKind.ENVIRONMENT,
            retry,
            parent=reply.segment,
            turn=retries,
            rewritten=arguments.rewritten,
        )
        if ctx.room(segment) < 1:
            break
        reply = await ctx.generate(parent=segment, turn=retries)
    ctx.reward(score * arguments.discount**retries)
    ctx.builder.meta(retries=retries, first_try=retries == 0)


async def _score(
    ctx: Context, verifier: RewardFunction, task: Task, response: str, timeout_s: float
) -> float:
    """Raises `VerifierError` for what is no score, and what the verifier raises."""
    given = RewardInput(
        prompt=task.prompt if isinstance(task.prompt, str) else str(task.prompt[-1]["content"]),
        response=response,
        ground_truth=task.ground_truth,
        data_source=task.data_source,
        extra_info=task.extra_info,
    )
    result: Any
    if inspect.iscoroutinefunction(verifier):
        async with asyncio.timeout(timeout_s):
            result = await verifier(given)
    else:
        result = await ctx.kit.blocking(verifier, given, timeout_s=timeout_s)
    if isinstance(result, Abstain):
        raise VerifierError(f"the verifier of self_correction abstains: {result.reason}")
    return float(result.value if isinstance(result, Score) else result)
