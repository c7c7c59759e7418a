"""The workflow of one question and one answer."""

from __future__ import annotations

from areal_async.rpc.schema import Task
from rollout_service.workflows.context import Context


async def single_turn(ctx: Context, task: Task) -> None:
    """Give the model the task's prompt, and take its answer as the episode's response."""
    await ctx.generate(task.prompt)
