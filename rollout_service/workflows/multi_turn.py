"""`multi_turn`: the policy acts in an environment, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from areal_async.config.base import Section
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.rpc.schema import Task
from areal_async.trajectory import SegmentKind
from rollout_service.environments import load_environment
from rollout_service.workflows.context import Context, WorkflowResources
from rollout_service.workflows.turns import Rewritten
from rollout_service.workflows.world import World, check_format, environment_mistakes, opening


class MultiTurn:
    """Shows what the environment shows and takes each reply as an action, until it is over, `max_turns` are
    made, or the path has no room left. Each turn's reward is its reply's segment's; the episode's is their
    sum, or the last one's."""

    class Arguments(Section):
        """`multi_turn`: a policy in an environment."""

        environment: str
        """A built-in environment, that of an installed package, or `path.py:Class` of one of your own."""
        environment_args: dict[str, Any] = Field(default_factory=dict)
        """Arguments of the environment."""
        max_turns: int = Field(default=16, ge=1)
        """Replies after which the episode ends, whatever the environment says."""
        reward: Literal["sum", "final"] = "sum"
        """The episode's reward: the sum of the turns' rewards, or that of the last turn."""
        first: str = "{prompt}{observation}"
        """What the model sees first, where the task's prompt is text."""
        turn: str = "{observation}"
        """What it sees after each reply."""
        stop: tuple[str, ...] = ()
        """Texts that end a reply, beside those of `rollout.sampling.stop`."""
        timeout_s: float = Field(default=30.0, gt=0)
        """Deadline of one call of the environment; past it the episode fails."""
        rewritten: Rewritten = "root"
        """Where the chat template renders earlier turns anew: begin a new root, or fail the episode."""

        @field_validator("first")
        @classmethod
        def _first(cls, text: str) -> str:
            return check_format(text, "prompt", "observation")

        @field_validator("turn")
        @classmethod
        def _turn(cls, text: str) -> str:
            return check_format(text, "observation")

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
            first = opening(task.prompt, observation, arguments.first)
            segment = ctx.observe(SegmentKind.PROMPT, first, parent=None)
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
                segment = ctx.observe(
                    SegmentKind.ENVIRONMENT,
                    ctx.as_user(text, reply.segment),
                    parent=reply.segment,
                    turn=turn + 1,
                    rewritten=arguments.rewritten,
                )
            total = sum(rewards) if arguments.reward == "sum" else (rewards or [0.0])[-1]
            ctx.reward(total)
            ctx.builder.meta(turns=len(rewards), done=done, info=info)
