"""`multi_turn`: the policy acts in an environment, turn by turn. `World` is an environment for workflows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from areal_async.base.mistakes import Mistake
from areal_async.base.records import Task
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.config.registry import ENVIRONMENTS
from areal_async.data.images import ImageError
from areal_async.trajectory import SegmentKind
from rollout_service.environments import (
    EnvironmentFactory,
    EnvironmentFailure,
    Step,
    group_seed,
    load_environment,
)
from rollout_service.workflows.context import Context, WorkflowResources
from rollout_service.workflows.images import Content, has_images
from rollout_service.workflows.tools import CallTimeout
from rollout_service.workflows.turns import Rewritten


@dataclass(eq=False)
class World:
    """One environment for one episode: `async with World(factory, timeout_s, ctx) as world`.

    An environment without `blocking = False` is created and called in threads, and each call has a deadline.
    Raises `EnvironmentFailure` if a call passes its deadline, or returns a value that the protocol does not
    allow.
    """

    factory: EnvironmentFactory
    timeout_s: float
    ctx: Context
    _environment: Any = None
    _late: bool = False

    async def __aenter__(self) -> World:
        self._environment = await self._call("being made", self.factory)
        return self

    async def __aexit__(self, *_: object) -> None:
        close = getattr(self._environment, "close", None)
        # A call that hangs keeps its thread.
        if callable(close) and not self._late:
            await self._call("close", close)

    async def reset(self, task: Task) -> Content:
        seed = group_seed(self.ctx.seed, task.task_id)
        observation = await self._call("reset", self._environment.reset, seed, task)
        if not (isinstance(observation, str) or has_images(observation)):
            raise EnvironmentFailure(f"reset() of the environment returned {observation!r:.80}, not a text")
        return await self._content(observation)

    async def step(self, action: str) -> Step:
        result = await self._call("step", self._environment.step, action)
        try:
            step = Step(*result)
            if not (isinstance(step.observation, str) or has_images(step.observation)):
                raise TypeError
            step = step._replace(observation=await self._content(step.observation))
            return Step(step.observation, float(step.reward), bool(step.done), dict(step.info))
        except (TypeError, ValueError):
            raise EnvironmentFailure(
                f"step() of the environment returned {result!r:.80}, not (text, reward, done, info)"
            ) from None

    async def _content(self, observation: Any) -> Content:
        if isinstance(observation, str):
            return observation
        try:
            return await asyncio.to_thread(self.ctx.content, observation)
        except ImageError as error:
            raise EnvironmentFailure(f"an image of the environment cannot be used: {error}") from error

    def state(self) -> str | None:
        state = getattr(self._environment, "state", None)
        return str(state()) if callable(state) else None

    async def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        if not self.factory.blocking:
            return function(*arguments)
        try:
            return await self.ctx.resources.blocking(function, *arguments, timeout_s=self.timeout_s)
        except CallTimeout as error:
            self._late = True
            raise EnvironmentFailure(f"the environment's {what}: {error}") from error


def opening(prompt: str | Sequence[dict[str, Any]], observation: Content) -> str | list[dict[str, Any]]:
    """Return the task's prompt with the first observation. In a chat, the observation is appended to the last
    message if that message is from the user. Otherwise it becomes a new user message."""
    if isinstance(prompt, str):
        if isinstance(observation, str):
            return prompt + observation
        prompt = [{"role": "user", "content": prompt}]
    if not observation:
        return list(prompt)
    *before, last = prompt
    if last["role"] != "user":
        return [*prompt, {"role": "user", "content": observation}]
    return [*before, {**last, "content": _joined(last["content"], observation)}]


def _joined(first: Content, second: Content) -> Content:
    """Return two contents with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(text for text in (first, second) if text)
    if not first or not second:
        return first or second
    given: list[Content] = [first, "\n\n", second]
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in given]
    return [part for each in parts for part in each]


def environment_mistakes(arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
    """Yield mistakes in `environment` and `environment_args` of `arguments`. Files are checked elsewhere."""
    name = arguments.get("environment")
    if name is not None and ".py:" not in name:
        given, field = arguments.get("environment_args", {}), f"{field}.environment"
        yield from ENVIRONMENTS.mistakes(name, given, field=field, args_field=f"{field}_args")


class MultiTurn:
    """Loop in which the policy reads an observation and its reply becomes the next action. The loop ends when
    the environment is done, after `max_turns`, or when the path has no room left. A turn's reward is recorded
    for the segment of its reply. The episode's reward is the sum of the turns' rewards, or the last one."""

    class Arguments(Section):
        """`multi_turn`: a policy in an environment."""

        environment: str
        """A built-in environment, an environment of an installed package, or `path.py:Class`."""
        environment_args: dict[str, Any] = Field(default_factory=dict)
        """Arguments of the environment."""
        max_turns: int = Field(default=16, ge=1)
        """Largest number of replies in an episode, even if the environment is not done."""
        reward: Literal["sum", "final"] = "sum"
        """The episode's reward: the sum of the turns' rewards, or the last turn's reward."""
        stop: tuple[str, ...] = ()
        """Texts that end a reply, in addition to `rollout.sampling.stop`."""
        timeout_s: float = Field(default=30.0, gt=0)
        """Deadline in seconds of one call of the environment. A call that passes it ends the episode. If the
        call had an action of the model, the score is `reward.on_fault.score`."""
        rewritten: Rewritten = "root"
        """Action if the chat template renders earlier turns differently: begin a new root, or fail the
        episode."""

    def __init__(self, arguments: Arguments, resources: WorkflowResources) -> None:
        self._arguments = arguments
        self._environment = load_environment(arguments.environment, arguments.environment_args)

    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        return environment_mistakes(arguments, field)

    async def __call__(self, ctx: Context, task: Task) -> None:
        arguments = self._arguments
        async with World(self._environment, arguments.timeout_s, ctx) as world:
            observation = await world.reset(task)
            first = opening(task.prompt, observation)
            segment = await ctx.observed(SegmentKind.PROMPT, first, parent=None)
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
                step = await world.step(ctx.spoken(ctx.decoded(reply.token_ids), segment))
                rewards.append(float(step.reward))
                ctx.reward(rewards[-1], segment=reply.segment)
                info, done = dict(step.info), step.done
                if done or turn + 1 == arguments.max_turns:
                    break
                user = ctx.as_user(step.observation, reply.segment)
                how: Any = {"parent": reply.segment, "turn": turn + 1, "rewritten": arguments.rewritten}
                segment = await ctx.observed(SegmentKind.ENVIRONMENT, user, **how)
            total = sum(rewards) if arguments.reward == "sum" else (rewards or [0.0])[-1]
            ctx.reward(total)
            ctx.builder.meta(turns=len(rewards), done=done, info=info)
