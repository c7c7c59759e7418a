"""Workflows, which generate the episodes: the built-in workflows, and the loading of any workflow.

    async def workflow(ctx, task):
        reply = await ctx.generate(task.prompt)

A workflow builds its episode through `ctx`. When it returns, the episode is complete. An error of the
workflow ends the episode early. If the model has answered before, its answers count as the cause: the episode
is stored with the units sampled so far, and its score is `reward.on_fault.score`. If the error is known to
have another cause (`rollout_service/worker/failures.py`), nothing is stored, and the sample is returned to
the buffer.

A workflow is either a coroutine function as above, with `rollout.workflow_args` as further parameters, or a
class. A class is instantiated once per process with its arguments, and the instance is called like the
function:

    class Workflow:
        class Arguments(Section): ...
        def __init__(self, arguments, resources): ...
        async def __call__(self, ctx, task): ...

A workflow whose episodes are exactly one call, `ctx.generate(prompt, tools=tools)`, may have the attribute
`only_call(task)`, which returns the pair `(prompt, tools)`. The worker then runs whole groups without calling
the workflow, which takes less time.

A class may have `check_job(job, arguments, field)`, which yields mistakes in a job. It may also have
`records_reward(arguments)`, which returns whether its episodes record the reward that `reward.name:
environment` needs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from areal_async.base.errors import ArealError
from areal_async.base.records import Task
from areal_async.config.job import JobConfig
from areal_async.config.registry import TOOLS, WORKFLOWS, PartError, section_mistakes
from areal_async.data.examples import tools_of
from rollout_service.workflows.context import Context, EpisodeAborted, PolicyEngine, WorkflowResources
from rollout_service.workflows.tools import load_tools, tool
from rollout_service.workflows.turns import Prompt, Renderer, Reply, TemplateRewrites, TurnError, is_chat

BUILT_IN = {
    "single_turn": "rollout_service.workflows:single_turn",
    "multi_turn": "rollout_service.workflows.multi_turn:MultiTurn",
    "tool_use": "rollout_service.workflows.tool_use:ToolUse",
    "agent": "rollout_service.workflows.agent:AgentWorkflow",
}
"""Name → coroutine function or class. `areal_async.config.registry.WORKFLOWS` reads it."""

__all__ = ["BUILT_IN", "Context", "EpisodeAborted", "PolicyEngine", "Renderer", "Reply", "TemplateRewrites"]
__all__ += ["TurnError", "Workflow", "WorkflowError", "load_workflow", "tool", "workflow", "workflow_of"]

Workflow = Callable[[Context, Task], Awaitable[None]]
FIELD = "rollout.workflow_args"


class WorkflowError(ArealError):
    """A workflow cannot be loaded, or all its episodes fail. The text says what is missing and what to do."""


F = TypeVar("F", bound=Callable[..., Awaitable[None]])


def workflow(function: F) -> F:
    """Mark `async def name(ctx, task, *, …)` as a workflow. Raises `WorkflowError` if it is not a coroutine
    function."""
    is_coroutine: bool = inspect.iscoroutinefunction(function)
    if is_coroutine:
        return function
    name = getattr(function, "__name__", function)
    raise WorkflowError(f"the workflow {name!r} is no coroutine function: write `async def`.")


async def single_turn(ctx: Context, task: Task) -> None:
    """Give the model the task's prompt, and use its answer as the episode's response. Tool schemas in the
    task's `extra_info.tools` are passed to the chat template. A tool call in the answer is not executed, but
    judged by the reward."""
    prompt, tools = _only_call(task)
    await ctx.generate(prompt, tools=tools)


def _only_call(task: Task) -> tuple[Prompt, Sequence[Mapping[str, Any]]]:
    tools = tools_of({"extra_info": task.extra_info}, f"task {task.task_id}") if is_chat(task.prompt) else ()
    return task.prompt, tools


single_turn.only_call = _only_call  # type: ignore[attr-defined]
single_turn.records_reward = lambda arguments: False  # type: ignore[attr-defined]


def workflow_of(job: JobConfig) -> Workflow:
    """Return the job's workflow. Raises `WorkflowError`, and errors of its tools, environment or verifier."""
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

    if only_call := getattr(part, "only_call", None):
        equipped.only_call = only_call  # type: ignore[attr-defined]
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
    """Return a function with its arguments. Raises `WorkflowError` if it is not a workflow, or does not
    accept them."""
    attribute = name.rpartition(":")[2]
    if not inspect.iscoroutinefunction(part):
        raise WorkflowError(
            f"the workflow {name!r}: {attribute!r} is not an `async def` function: write "
            f"`async def {attribute}(ctx, task):`"
        )
    signature = inspect.signature(part)
    try:
        signature.bind(None, None, **given)
        return functools.partial(part, **given)
    except TypeError as error:
        raise WorkflowError(
            f"{FIELD} of {name!r}: {error}. It is called as {attribute}(ctx, task, …) and takes {signature}."
        ) from None
