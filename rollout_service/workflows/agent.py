"""The workflow of an existing agent: it calls the policy over HTTP, and what is sampled for it is trained.

Promises: the agent has access only while its episode runs; a command runs in a process group of its own,
which is killed as a whole when the command has ended, is late, or the episode is cancelled. An agent that
fails makes its episode fail.
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
from typing import TYPE_CHECKING, Any, Self

import msgspec
from pydantic import Field, model_validator

from areal_async.config.base import Section
from areal_async.errors import ArealError
from areal_async.registry import run_user_file
from areal_async.rpc.schema import Task
from rollout_service.workflows.context import Context, WorkflowResources

if TYPE_CHECKING:
    from rollout_service.gateway import Session

MAX_OUTPUT_BYTES = 1 << 20
"""Most bytes of a command's answer, and of its complaints."""
PIPES_S = 5.0
"""How long the end of a killed command's pipes may take."""
TOLD_CHARS = 2000
"""How much of a failed command's complaints its error shows."""

Agent = Callable[["Session", Task], Awaitable[Any]]


class AgentError(ArealError):
    """An agent failed, was late, or cannot be loaded."""


class AgentWorkflow:
    """Runs the agent; what it returns or prints is the episode's response."""

    class Arguments(Section):
        """`agent`: an existing agent that reaches the policy over HTTP. One of `agent` and `command`."""

        agent: str | None = Field(default=None, pattern=r"^.+\.py:.+$")
        """`path.py:name` of an `async def agent(session, task)`, run in the worker's process; what it returns
        is the episode's response."""
        command: tuple[str, ...] | None = Field(default=None, min_length=1)
        """A program and its arguments, started once an episode; what it prints is the episode's response."""
        cwd: Path | None = None
        """Folder in which `command` runs; the worker's own when it is left out."""
        timeout_s: float = Field(default=600.0, gt=0)
        """Deadline of one episode; past it the agent is ended and the episode fails."""
        keyed_url: bool = False
        """Give `command` base URLs that hold the API key, for an agent whose key cannot be changed."""

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
                    answer = await self._run(session, task)
            except TimeoutError:
                if not limit.expired():
                    raise  # the agent's own
                raise AgentError(
                    f"the agent was not done after {self._timeout_s:g} s (rollout.workflow_args.timeout_s)"
                ) from None
            if not session.calls:
                raise AgentError(
                    "the agent ended without a call to the model. Does it use session.openai_base_url or "
                    "session.anthropic_base_url (a command: OPENAI_BASE_URL, ANTHROPIC_BASE_URL)?"
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


def environment_of(session: Session, *, keyed_url: bool = False) -> dict[str, str]:
    """Where clients of either API look for the address and the key, beside this process's own variables."""
    keyed = keyed_url
    openai = session.keyed_openai_base_url if keyed else session.openai_base_url
    # A proxy for the world outside must not be asked for this machine.
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1", "::1", "localhost")))
    return {
        **os.environ,
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,
        "OPENAI_API_KEY": session.api_key,
        "ANTHROPIC_BASE_URL": session.keyed_anthropic_base_url if keyed else session.anthropic_base_url,
        "ANTHROPIC_API_KEY": session.api_key,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _command(arguments: AgentWorkflow.Arguments) -> Agent:
    assert arguments.command is not None
    command, cwd, keyed = arguments.command, arguments.cwd, arguments.keyed_url

    async def run(session: Session, task: Task) -> str:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=cwd,
                env=environment_of(session, keyed_url=keyed),
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"the agent's command cannot be started: {error}") from error
        pipes = asyncio.gather(
            _write(process.stdin, task_json(task)), _all_of(process.stdout), _end_of(process.stderr)
        )
        ended = asyncio.ensure_future(_ended(process.pid))
        try:
            await asyncio.wait((pipes, ended), return_when=asyncio.FIRST_COMPLETED)
            if pipes.done():
                pipes.result()
            await ended
        finally:
            # With all that it has started and left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            ended.cancel()
            await asyncio.gather(pipes, ended, return_exceptions=True)
            status = await _status(process)
        _, answer, complaints = pipes.result()
        if status != 0:
            how = f"status {status}" if status > 0 else signal.Signals(-status).name
            raise AgentError(
                f"the agent's command ended with {how}: {complaints.strip() or 'it said nothing'}"
            )
        return answer.strip()

    return run


async def _status(process: asyncio.subprocess.Process) -> int:
    """The status of a process that was killed or has ended. asyncio tells it once the pipes are at their end,
    so what nobody has read is read here. Raises `AgentError`."""
    try:
        async with asyncio.timeout(PIPES_S):
            for pipe in (process.stdout, process.stderr):
                while pipe is not None and await pipe.read(1 << 16):
                    pass
            return await process.wait()
    except TimeoutError:
        raise AgentError(
            "the agent's command left a process behind that has its output open and is in no group of ours"
        ) from None


async def _ended(pid: int) -> None:
    """Returns when the process itself has ended. asyncio's own `wait` goes on until its pipes are closed, and
    those it may have left to others."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)


def task_json(task: Task) -> bytes:
    """What a command reads: the task without its solution."""
    shown = {
        "task_id": task.task_id,
        "prompt": task.prompt,
        "data_source": task.data_source,
        "ability": task.ability,
        "extra_info": task.extra_info,
    }
    return msgspec.json.encode(shown)


async def _write(pipe: asyncio.StreamWriter | None, data: bytes) -> None:
    assert pipe is not None
    # A command need not read its task.
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _all_of(pipe: asyncio.StreamReader | None) -> str:
    assert pipe is not None
    data = bytearray()
    while part := await pipe.read(1 << 16):
        data += part
        if len(data) > MAX_OUTPUT_BYTES:
            raise AgentError(f"the agent's command printed more than {MAX_OUTPUT_BYTES} bytes")
    return data.decode(errors="replace")


async def _end_of(pipe: asyncio.StreamReader | None) -> str:
    assert pipe is not None
    data = b""
    while part := await pipe.read(1 << 16):
        data = (data + part)[-4 * TOLD_CHARS :]
    return data.decode(errors="replace")[-TOLD_CHARS:]
