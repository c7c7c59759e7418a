"""Workflows: what an episode does, as one coroutine function.

    async def workflow(ctx, task):
        reply = await ctx.generate(task.prompt)

A workflow builds its episode through `ctx`; when it returns, the episode is complete. What it raises makes
the episode fail: the sample is handed back, and nothing of it is stored. `rollout.workflow_args` are its
keyword arguments: `async def workflow(ctx, task, *, max_turns=4)`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal_async.config.agent import AgentArguments
from areal_async.config.job import JobConfig
from areal_async.config.workflow import (
    MultiTurnArguments,
    SelfCorrectionArguments,
    SingleTurnArguments,
    ToolUseArguments,
)
from areal_async.config.workflowcheck import argument_mistakes
from areal_async.errors import ArealError
from areal_async.rpc.messages import Task
from areal_async.usercode import run_user_file
from reward_service.sdk import load_reward
from rollout_service.environments import load_environment
from rollout_service.workflows.agent import agent_workflow
from rollout_service.workflows.calculator import BUILT_IN_TOOLS
from rollout_service.workflows.context import Context, Kit
from rollout_service.workflows.multi_turn import multi_turn
from rollout_service.workflows.self_correction import self_correction
from rollout_service.workflows.single_turn import single_turn
from rollout_service.workflows.tool_use import tool_use
from rollout_service.workflows.tools import load_tools

Workflow = Callable[[Context, Task], Awaitable[None]]


class WorkflowError(ArealError):
    """A workflow cannot be loaded, or makes no episodes: the text says what is missing and what to do."""


def _single_turn(arguments: SingleTurnArguments, kit: Kit) -> Workflow:
    return single_turn


def _multi_turn(arguments: MultiTurnArguments, kit: Kit) -> Workflow:
    environment = load_environment(arguments.environment, arguments.environment_args)
    return lambda ctx, task: multi_turn(ctx, task, arguments, environment)


def _tool_use(arguments: ToolUseArguments, kit: Kit) -> Workflow:
    kit.tools = load_tools(arguments.tools, BUILT_IN_TOOLS)
    kit.timeout_s, kit.output_chars = arguments.timeout_s, arguments.output_chars
    environment = None
    if arguments.environment is not None:
        environment = load_environment(arguments.environment, arguments.environment_args)
    return lambda ctx, task: tool_use(ctx, task, arguments, environment)


def _self_correction(arguments: SelfCorrectionArguments, kit: Kit) -> Workflow:
    function = load_reward(arguments.verifier)
    verifier = functools.partial(function, **arguments.verifier_args) if arguments.verifier_args else function
    return lambda ctx, task: self_correction(ctx, task, arguments, verifier)


def _agent(arguments: AgentArguments, kit: Kit) -> Workflow:
    return agent_workflow(arguments)


BUILT_IN: dict[str, tuple[Any, Callable[[Any, Kit], Workflow]]] = {
    "single_turn": (SingleTurnArguments, _single_turn),
    "multi_turn": (MultiTurnArguments, _multi_turn),
    "tool_use": (ToolUseArguments, _tool_use),
    "self_correction": (SelfCorrectionArguments, _self_correction),
    "agent": (AgentArguments, _agent),
}
"""Name → its arguments, and what makes it of them."""


def workflow_of(job: JobConfig) -> Workflow:
    """The job's workflow. Raises `WorkflowError`, and what its tools, environment or verifier raise."""
    section = job.rollout
    return load_workflow(section.workflow, section.workflow_args, max_model_len=section.max_model_len)


def load_workflow(
    name: str, arguments: Mapping[str, Any] | None = None, *, max_model_len: int | None = None
) -> Workflow:
    """The workflow called `name` with its arguments: a built-in one, or `path.py:function`. Runs the file's
    own code.

    The file's folder is put on the import path, so it may import its neighbours. Raises `WorkflowError`."""
    given = dict(arguments or {})
    kit = Kit(tools=BUILT_IN_TOOLS, max_model_len=max_model_len)
    if name in BUILT_IN:
        kind, make = BUILT_IN[name]
        try:
            workflow = make(kind.model_validate(given), kit)
        except ValidationError:
            problems = "; ".join(mistake.problem for mistake in argument_mistakes(name, given))
            raise WorkflowError(f"rollout.workflow_args of {name}: {problems}") from None
    else:
        workflow = _own(name, given)

    async def equipped(ctx: Context, task: Task) -> None:
        ctx.kit = kit
        await workflow(ctx, task)

    return equipped


def _own(name: str, arguments: dict[str, Any]) -> Workflow:
    path_text, _, attribute = name.rpartition(":")
    if not path_text.endswith(".py") or not attribute:
        raise WorkflowError(
            f"there is no built-in workflow {name!r}. Set rollout.workflow to one of "
            f"{', '.join(sorted(BUILT_IN))}, or to path.py:function for one of your own."
        )
    module = run_user_file(Path(path_text), kind="workflow", name=name, error=WorkflowError)
    found = getattr(module, attribute, None)
    if found is None:
        own = [k for k, v in vars(module).items() if inspect.iscoroutinefunction(v)]
        choice = f"It has: {', '.join(own)}." if own else "It has no `async def` function."
        raise WorkflowError(f"the workflow {name!r}: {path_text} defines no {attribute!r}. {choice}")
    if not inspect.iscoroutinefunction(found):
        raise WorkflowError(
            f"the workflow {name!r}: {attribute!r} is not an `async def` function: write "
            f"`async def {attribute}(ctx, task):`"
        )
    signature = inspect.signature(found)
    try:
        signature.bind_partial(None, None)
        positional = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        if sum(p.default is p.empty for p in positional if p.kind is not p.VAR_KEYWORD) > 2:
            raise TypeError
    except TypeError:
        raise WorkflowError(
            f"the workflow {name!r} must take two arguments: write `async def {attribute}(ctx, task):`"
        ) from None
    try:
        signature.bind(None, None, **arguments)
    except TypeError as error:
        takes = ", ".join(p.name for p in list(signature.parameters.values())[2:]) or "none"
        raise WorkflowError(
            f"rollout.workflow_args of {name!r}: {error}. The function's own arguments are: {takes}."
        ) from None
    return lambda ctx, task: found(ctx, task, **arguments)
