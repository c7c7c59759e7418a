"""`self_correction`: the policy answers again after a verifier has said that it is wrong."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from areal_async.config.base import Section
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.config.rewardcheck import part_of, runs_in_pool, scopes_of
from areal_async.errors import ArealError
from areal_async.registry import REWARDS
from areal_async.rpc.schema import Task
from areal_async.rpc.verdicts import Abstain, Score
from areal_async.trajectory import SegmentKind
from reward_service.sdk import RewardInput, load_reward
from rollout_service.workflows.context import Context, WorkflowResources
from rollout_service.workflows.turns import Rewritten


class VerifierError(ArealError):
    """The verifier gave no score, so it is not known whether to try again."""


class SelfCorrection:
    """Answers, and after each wrong answer reads `retry` and answers again. The last answer is the episode's
    response; its score, times `discount` for every retry, is the episode's own reward."""

    class Arguments(Section):
        """`self_correction`: the policy answers again after a verifier has said that it is wrong."""

        verifier: str
        """A built-in reward, or `path.py:name` of a function marked `@reward`."""
        verifier_args: dict[str, Any] = Field(default_factory=dict)
        """What the verifier takes, by name."""
        attempts: int = Field(default=2, ge=1)
        """Answers in one episode."""
        retry: str = "\nThat is wrong. Try again.\n"
        """What the model reads after a wrong answer."""
        right_from: float = 1.0
        """A score from which on the answer counts as right."""
        discount: float = Field(default=1.0, gt=0, le=1)
        """The episode's own reward is the last score times this for every retry."""
        timeout_s: float = Field(default=10.0, gt=0)
        """Deadline of one call of the verifier; past it the episode fails."""
        rewritten: Rewritten = "root"
        """Where the chat template renders earlier turns anew: begin a new root, or fail the episode."""

    def __init__(self, arguments: Arguments, resources: WorkflowResources) -> None:
        self._arguments = arguments
        function = load_reward(arguments.verifier)
        if arguments.verifier_args:
            self._verifier: Any = functools.partial(function, **arguments.verifier_args)
        else:
            self._verifier = function

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        """A built-in reward runs in the worker, which the ones that are servers cannot."""
        name, given = arguments["verifier"], arguments.get("verifier_args", {})
        part, verifier_field = part_of(name), f"{field}.verifier"
        if part is not None and not runs_in_pool(part):
            problem = f"`{name}` is a server of its own, and the verifier runs in the worker"
            fix = "Use a verifier, or path.py:name of a function of your own"
            yield Mistake(verifier_field, problem, fix)
        elif part is not None and "episode" not in scopes_of(part):
            problem = f"`{name}` judges whole groups"
            yield Mistake(verifier_field, problem, "Use one that judges an episode")
        elif ".py:" not in name:
            args_field = f"{field}.verifier_args"
            yield from REWARDS.mistakes(name, given, field=verifier_field, args_field=args_field)

    async def __call__(self, ctx: Context, task: Task) -> None:
        arguments = self._arguments
        reply = await ctx.generate(task.prompt)
        retries = 0
        while True:
            score = await self._score(ctx, task, reply.text)
            ctx.reward(score, segment=reply.segment)
            over = score >= arguments.right_from or retries + 1 >= arguments.attempts
            if over or ctx.room(reply.segment) < 1:
                break
            retries += 1
            retry = arguments.retry.strip() if ctx.is_chat(reply.segment) else arguments.retry
            segment = ctx.observe(
                SegmentKind.ENVIRONMENT,
                ctx.as_user(retry, reply.segment),
                parent=reply.segment,
                turn=retries,
                rewritten=arguments.rewritten,
            )
            if ctx.room(segment) < 1:
                break
            reply = await ctx.generate(parent=segment, turn=retries)
        ctx.reward(score * arguments.discount**retries)
        ctx.builder.meta(retries=retries, first_try=retries == 0)

    async def _score(self, ctx: Context, task: Task, response: str) -> float:
        """Raises `VerifierError` for what is no score, and what the verifier raises."""
        given = RewardInput(
            prompt=task.prompt if isinstance(task.prompt, str) else str(task.prompt[-1]["content"]),
            response=response,
            ground_truth=task.ground_truth,
            data_source=task.data_source,
            extra_info=task.extra_info,
        )
        timeout_s = self._arguments.timeout_s
        result: Any
        if inspect.iscoroutinefunction(self._verifier):
            async with asyncio.timeout(timeout_s):
                result = await self._verifier(given)
        else:
            result = await ctx.resources.blocking(self._verifier, given, timeout_s=timeout_s)
        if isinstance(result, Abstain):
            raise VerifierError(f"the verifier of self_correction abstains: {result.reason}")
        return float(result.value if isinstance(result, Score) else result)
