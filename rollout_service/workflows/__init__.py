"""Workflows, which make the episodes: the built-in ones, and the loading of any.

    async def workflow(ctx, task):
        reply = await ctx.generate(task.prompt)

A workflow builds its episode through `ctx`; when it returns, the episode is complete. An error that it raises
ends the episode: once the model has answered, the fault is its answers', and the episode is stored with what
was sampled and scored `reward.on_fault.score`, unless the error is known to come from something else
(`rollout_service/worker/failures.py`); then the sample is handed back, and nothing of it is stored.

A workflow is such a coroutine function, with `rollout.workflow_args` as its further parameters, or a class
that is made once a process with its arguments, and whose instances are called as that function is:

    class Workflow:
        class Arguments(Section): ...
        def __init__(self, arguments, resources): ...
        async def __call__(self, ctx, task): ...

A class may have `check_job(job, arguments, field)`, which yields mistakes of a job, and
`records_reward(arguments)`: whether its episodes record a reward for `reward.name: environment`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from areal_async.base.errors import ArealError
from areal_async.base.records import Task
from areal_async.config.job import JobConfig
from areal_async.config.registry import TOOLS, WORKFLOWS, PartError, section_mistakes
from areal_async.data.examples import tools_of
from rollout_service.workflows.context import Context, EpisodeAborted, PolicyEngine, WorkflowResources
from rollout_service.workflows.tools import load_tools, tool
from rollout_service.workflows.turns import Renderer, Reply, TemplateRewrites, TurnError, is_chat

BUILT_IN = {
    "single_turn": "rollout_service.workflows:single_turn",
    "multi_turn": "rollout_service.workflows.multi_turn:MultiTurn",
    "tool_use": "rollout_service.workflows.tool_use:ToolUse",
    "agent": "rollout_service.workflows.agent:AgentWorkflow",
}
"""Name → coroutine function or class; found by `areal_async.config.registry.WORKFLOWS`."""

__all__ = ["BUILT_IN", "Context", "EpisodeAborted", "PolicyEngine", "Renderer", "Reply", "TemplateRewrites"]
__all__ += ["TurnError", "Workflow", "WorkflowError", "load_workflow", "tool", "workflow", "workflow_of"]

Workflow = Callable[[Context, Task], Awaitable[None]]
FIELD = "rollout.workflow_args"


class WorkflowError(ArealError):
    """A workflow cannot be loaded, or cannot make episodes. The text names the missing thing and the
    remedy."""


F = TypeVar("F", bound=Callable[..., Awaitable[None]])


def workflow(function: F) -> F:
    """Mark `async def name(ctx, task, *, …)` as a workflow. Raises `WorkflowError` where it is no coroutine
    function."""
    is_coroutine: bool = inspect.iscoroutinefunction(function)
    if is_coroutine:
        return function
    name = getattr(function, "__name__", function)
    raise WorkflowError(f"the workflow {name!r} is no coroutine function: write `async def`.")


async def single_turn(ctx: Context, task: Task) -> None:
    """Give the model the task's prompt, and take its answer as the episode's response. Schemas of tools in
    the task's `extra_info.tools` go to the chat template: a call is the answer, which the reward judges."""
    tools = tools_of({"extra_info": task.extra_info}, f"task {task.task_id}") if is_chat(task.prompt) else ()
    await ctx.generate(task.prompt, tools=tools)


single_turn.records_reward = lambda arguments: False  # type: ignore[attr-defined]


def workflow_of(job: JobConfig) -> Workflow:
    """Return the job's workflow. Raises `WorkflowError`, and the errors of its tools, environment or
    verifier."""
    section = job.rollout
    return load_workflow(section.workflow, section.workflow_args, max_model_len=section.max_model_len)


def load_workflow(
    name: str, arguments: Mapping[str, Any] | None = None, *, max_model_len: int | None = None
) -> Workflow:
    """Return the workflow called `name` (`areal_async.config.registry`) with its arguments. Runs the code of
    a user's file.

    Raises `WorkflowError`."""
    given = dict(arguments or {})
    try:
        part = WORKFLOWS.find(name)
    except PartError as error:
        raise WorkflowError(str(error)) from error
    resources = WorkflowResources(load_tools(tuple(TOOLS.built_in)), max_model_len=max_model_len)
    make = _made if inspect.isclass(part) else _checked
    workflow = make(part, name, given, resources)

    async def equipped(ctx: Context, task: Task) -> None:
        ctx.resources = resources
        await workflow(ctx, task)

    return equipped


def _made(part: Any, name: str, given: Mapping[str, Any], resources: WorkflowResources) -> Workflow:
    section = getattr(part, "Arguments", None)
    if section is None:
        raise WorkflowError(f"the workflow {name!r} is a class without `Arguments`: give it that section")
    if mistakes := [*section_mistakes(FIELD, section, given, name)]:
        raise WorkflowError(f"{FIELD} of {name}: {'; '.join(mistake.problem for mistake in mistakes)}")
    workflow: Workflow = part(section.model_validate(given), resources)
    return workflow


def _checked(part: Any, name: str, given: Mapping[str, Any], resources: WorkflowResources) -> Workflow:
    """Return a function with its arguments. Raises `WorkflowError` if it is no workflow, or does not take
    them."""
    attribute = name.rpartition(":")[2]
    if not inspect.iscoroutinefunction(part):
        raise WorkflowError(
            f"the workflow {name!r}: {attribute!r} is not an `async def` function: write "
            f"`async def {attribute}(ctx, task):`"
        )
    parameters = list(inspect.signature(part).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if (len(positional) < 2 and not any_number) or any(p.default is p.empty for p in positional[2:]):
        raise WorkflowError(
            f"the workflow {name!r} must take two arguments: write `async def {attribute}(ctx, task):`"
        )
    try:
        inspect.signature(part).bind(None, None, **given)
        return functools.partial(part, **given)
    except TypeError as error:
        takes = ", ".join(p.name for p in parameters[2:]) or "none"
        raise WorkflowError(
            f"{FIELD} of {name!r}: {error}. The function's own arguments are: {takes}."
        ) from None
