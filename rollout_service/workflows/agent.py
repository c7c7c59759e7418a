"""The workflow for an existing agent. The agent calls the policy over HTTP, and the policy is trained on the
answers that it gave the agent.

Promises: the agent has access only while its episode runs. A command runs in its own process group. The whole
group is killed when the command has ended or passed its deadline, or the episode is cancelled.

If an agent fails, prints too much or passes its deadline, the model's answers are at fault (`fault_of`),
except in three cases: the agent has not received any answer yet, it reports another cause by
`InfrastructureFault` or exit status 75, or it was waiting for an engine that did not answer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Self

import msgspec
from pydantic import Field, model_validator

from areal_async.base.addresses import LOOPBACK
from areal_async.base.errors import ArealError, InfrastructureFault
from areal_async.base.records import Task
from areal_async.config.base import Section
from areal_async.config.user_file import run_user_file
from rollout_service.workflows.context import Context, WorkflowResources
from rollout_service.workflows.images import with_data_urls

if TYPE_CHECKING:
    from rollout_service.gateway import Session

MAX_OUTPUT_BYTES = 1 << 20  # Most bytes of a command's output
LET_DOWN = os.EX_TEMPFAIL  # Exit status of a command that failed for another reason than its answers
LONG_WAIT_SHARE = 0.5
"""Share of an agent's time limit. If the agent spent more than this share waiting for one missing answer, the
engine counts as the cause of the timeout."""
MAX_COMPLAINTS_BYTES = 16 << 20
LOOK_S = 0.1  # Seconds between two checks of a command's output size
SHOWN = ("task_id", "prompt", "data_source", "ability", "extra_info")
"""Fields of the task that a command gets as JSON. The solution is not among them."""
TOLD_CHARS = 2000  # Most characters of a failed command's stderr in its error

Agent = Callable[["Session", Task], Awaitable[Any]]


class AgentError(ArealError):
    """An agent failed, passed its deadline, or cannot be loaded."""


class AgentWorkflow:
    """Runner of the agent. The returned or printed text is the episode's response."""

    class Arguments(Section):
        """`agent`: an existing agent that reaches the policy over HTTP. Exactly one of `agent` and `command`
        must be given."""

        agent: str | None = Field(default=None, pattern=r"^.+\.py:.+$")
        """`path.py:name` of an `async def agent(session, task)`, which runs in the worker's process. Its
        result is the episode's response. Images of the task's prompt are data URLs, as in OpenAI's API."""
        command: tuple[str, ...] | None = Field(default=None, min_length=1)
        """A program and its arguments, started once per episode. Its output is the episode's response."""
        cwd: Path | None = None
        """Folder in which `command` runs. The default is the worker's folder."""
        timeout_s: float = Field(default=600.0, gt=0)
        """Deadline of one episode in seconds. After it, the agent is ended, and the score of the episode is
        `reward.on_fault.score`. But if the agent spent half of this time or more waiting for a single answer
        of the engine, the engine is at fault, and the episode gets no score."""

        @model_validator(mode="after")
        def _one_of_them(self) -> Self:
            if (self.agent is None) == (self.command is None):
                raise ValueError(
                    "give either agent (path.py:name) or command (a list of words), and not both"
                )
            return self

    def __init__(self, arguments: Arguments, resources: WorkflowResources) -> None:
        """Raises `AgentError`."""
        self._timeout_s = arguments.timeout_s
        self._run = _command(arguments) if arguments.agent is None else _load(arguments.agent)

    async def __call__(self, ctx: Context, task: Task) -> None:
        async with ctx.gateway() as session:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    answer = await self._run(session, with_data_urls(task))
            except TimeoutError:
                if not limit.expired():
                    raise  # the agent's own error
                blamed = ctx.waited_s >= LONG_WAIT_SHARE * self._timeout_s
                raise (InfrastructureFault if blamed else AgentError)(
                    f"the agent was not done after {self._timeout_s:g} s (rollout.workflow_args.timeout_s)"
                ) from None
            if not session.calls:
                raise AgentError(
                    "the agent ended without a call to the model. Does it use session.openai_base_url "
                    "(a command: OPENAI_BASE_URL)?"
                )
        if answer is not None:
            ctx.builder.text(response=answer if isinstance(answer, str) else json.dumps(answer, default=str))


def _load(name: str) -> Agent:
    path, _, attribute = name.rpartition(":")
    module = run_user_file(Path(path), kind="agent", name=name, error=AgentError)
    found = getattr(module, attribute, None)
    if not inspect.iscoroutinefunction(found):
        raise AgentError(
            f"the agent {name!r}: {path} has no `async def {attribute}(session, task)`. A function that "
            "blocks would stop the gateway it calls: write it as `async def`, or run it as a `command`."
        )
    agent: Agent = found
    return agent


def environment_of(session: Session) -> dict[str, str]:
    """Return the environment variables of this process, plus address and key under the names that clients
    read."""
    # A proxy for external hosts must not be used for this machine.
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), LOOPBACK, "::1", "localhost")))
    return {
        **os.environ,
        "OPENAI_BASE_URL": session.openai_base_url,
        "OPENAI_API_BASE": session.openai_base_url,
        "OPENAI_API_KEY": session.api_key,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _command(arguments: AgentWorkflow.Arguments) -> Agent:
    assert arguments.command is not None
    command, cwd = arguments.command, arguments.cwd

    async def run(session: Session, task: Task) -> str:
        # Files, not pipes: processes that the command leaves behind may keep pipes open, and nobody waits for
        # them.
        with TemporaryFile() as given, TemporaryFile() as answer, TemporaryFile() as complaints:
            given.write(msgspec.json.encode({name: getattr(task, name) for name in SHOWN}))
            given.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=given,
                    stdout=answer,
                    stderr=complaints,
                    cwd=cwd,
                    env=environment_of(session),
                    start_new_session=True,
                )
            except OSError as error:
                raise AgentError(f"the agent's command cannot be started: {error}") from error
            try:
                while process.returncode is None:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), LOOK_S)
                    for file, most in ((answer, MAX_OUTPUT_BYTES), (complaints, MAX_COMPLAINTS_BYTES)):
                        if os.fstat(file.fileno()).st_size > most:
                            raise AgentError(f"the agent's command printed more than {most} bytes")
            finally:
                # Including all processes that it started and left behind.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                status = await process.wait()
            if status != 0:
                how = f"status {status}" if status > 0 else signal.Signals(-status).name
                said = _text(complaints)[-TOLD_CHARS:].strip() or "it said nothing"
                kind = InfrastructureFault if status == LET_DOWN else AgentError
                raise kind(f"the agent's command ended with {how}: {said}")
            return _text(answer).strip()

    return run


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
