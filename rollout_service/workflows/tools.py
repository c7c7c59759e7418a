"""Tools: functions that a policy may call.

    @tool
    def look_up(word: str) -> str:
        "The meaning of a word."
        return MEANINGS[word]

Promise: a call returns one text of bounded length within its deadline, whatever the function does. An error
is counted, and becomes a text that the model reads. A sync function runs in a thread, and an async function
on the event loop. With `@tool(inline=True)`, a sync function runs on the event loop too, which is faster for
calls that take only microseconds.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints, overload

from areal_async.base.errors import ArealError, InfrastructureFault
from areal_async.config.registry import TOOLS, PartError
from areal_async.models.prompts import content_text
from rollout_service import metrics
from rollout_service.workflows.images import Content, Part, has_images

T = TypeVar("T")

LIMIT = 64


class CallTimeout(ArealError):
    """A call did not return in time."""


class CallsBusy(CallTimeout):
    """A call was not started, because other calls hang or the host starts no more threads."""


class BlockingCalls:
    """Runner of the user's blocking code. Each call runs in a thread and has a deadline. The runner belongs
    to one event loop.

    A call past its deadline raises `CallTimeout` and blocks no other work. At most `limit` calls run at once.
    A thread cannot be ended, so a hanging call counts until it returns. If no place becomes free within a
    call's deadline, the call fails with `CallsBusy`."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._places = asyncio.Semaphore(limit)

    async def __call__(self, function: Callable[..., T], *arguments: Any, timeout_s: float) -> T:
        """Return `function(*arguments)`, or raise its error. Raises `CallTimeout` after `timeout_s`
        seconds."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._places.acquire()
        except TimeoutError:
            raise CallsBusy(
                f"all {self._limit} threads for blocking calls were busy for {timeout_s:g} s: "
                "what they run hangs"
            ) from None
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()

        def run() -> None:
            try:
                outcome.set_result(function(*arguments))
            except Exception as raised:
                # A future cannot carry a StopIteration.
                stop = isinstance(raised, StopIteration)
                outcome.set_exception(RuntimeError("StopIteration") if stop else raised)
            except BaseException as raised:  # SystemExit in a tool must not end the worker
                outcome.set_exception(RuntimeError(f"{type(raised).__name__}: {raised}"))
            with suppress(RuntimeError):  # the loop was closed meanwhile, so nobody waits
                loop.call_soon_threadsafe(self._places.release)

        try:
            threading.Thread(target=run, name="blocking-call", daemon=True).start()
        except RuntimeError as error:
            self._places.release()
            raise CallsBusy(f"this host starts no thread: {error}") from error
        try:
            async with asyncio.timeout_at(deadline_s):
                return await asyncio.wrap_future(outcome)
        except TimeoutError:
            if outcome.done():
                return outcome.result()  # it finished at the deadline, or raised this itself
            raise CallTimeout(f"not back within {timeout_s:g} s") from None


async def contained(work: Awaitable[T]) -> T:
    """Await the user's `work`. An exception that would end this process, or cancel a task although no
    cancellation was requested, is raised as a RuntimeError. Without this, an answer of the model could end
    this process or cancel a task."""
    task = asyncio.current_task()
    try:
        return await work
    except (Exception, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as raised:
        if isinstance(raised, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{type(raised).__name__}: {raised}") from raised


BUILT_IN: dict[str, str] = {}
"""Name → tool. `areal_async.config.registry.TOOLS` reads it."""

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class ToolError(ArealError):
    """A tool cannot be loaded or does not exist. The text says what to do."""


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call by `name`."""

    name: str
    function: Callable[..., Any]
    description: str
    parameters: dict[str, Any]
    """JSON schema of the tool's arguments."""
    inline: bool = False

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function directly, for example in tests."""
        return self.function(*arguments, **named)

    @property
    def schema(self) -> dict[str, Any]:
        """Return the description of the tool for chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolAnswer:
    """Result of a call. `error` is the error text, or empty."""

    text: str
    error: str = ""
    parts: tuple[dict[str, Any], ...] = ()
    """Content with images (`images.py`), if the tool returned any. `text` has its texts."""


@dataclass(frozen=True)
class ToolReply:
    """Answer of a tool in the episode: its segment, the text that the model reads, and the error text or
    ""."""

    segment: int
    text: str
    error: str = ""


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str = "", inline: bool = False) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, *, name: str = "", inline: bool = False) -> Any:
    """Make a function a tool. A chat model gets its docstring and type hints as the description of the
    tool."""

    def mark(marked: Callable[..., Any]) -> Tool:
        if not callable(marked):
            raise TypeError(f"@tool marks a function, not {type(marked).__name__}")
        return Tool(
            name=name or marked.__name__,
            function=marked,
            description=inspect.cleandoc(marked.__doc__ or ""),
            parameters=_parameters(marked),
            inline=inline,
        )

    return mark if function is None else mark(function)


def load_tools(names: Iterable[str]) -> dict[str, Tool]:
    """Load tools (`areal_async.config.registry`) and return them by their own names. Raises `ToolError`."""
    tools: dict[str, Tool] = {}
    for name in names:
        try:
            found = TOOLS.find(name)
        except PartError as error:
            raise ToolError(str(error)) from error
        if not isinstance(found, Tool):
            raise ToolError(f"the tool {name!r} is not marked @tool: mark the function")
        if found.name in tools:
            raise ToolError(f"there are two tools called {found.name!r}: give one @tool(name=…)")
        tools[found.name] = found
    return tools


@dataclass
class WorkflowResources:
    """Tools and limits shared by a worker's episodes, created once when the workflow is loaded."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    """The job's tools, by the names that `ctx.tool` takes."""
    max_model_len: int | None = None
    """Largest number of tokens of a path."""
    timeout_s: float = 10.0
    """Deadline in seconds of one call of a tool."""
    output_chars: int = 2000
    """Largest number of characters of a tool's answer. Longer answers are truncated."""
    blocking: BlockingCalls = field(default_factory=BlockingCalls)


Arguments = str | Mapping[str, Any]


async def run_tool(
    resources: WorkflowResources,
    name: str | Tool,
    arguments: Arguments,
    timeout_s: float | None = None,
    content: Callable[[Any], Content] | None = None,
) -> ToolAnswer:
    """Call a tool, by default with the deadline in `resources`. A text as `arguments` is the tool's only
    argument; a mapping has the arguments by name. `content` takes over the images of a result; without it, a
    result with images is written as JSON. Errors of the tool become its answer, except that
    `InfrastructureFault` and `CallsBusy` are raised."""
    tools, timeout_s = resources.tools, resources.timeout_s if timeout_s is None else timeout_s
    output_chars = resources.output_chars
    called = name if isinstance(name, Tool) else tools.get(name)
    if called is None:
        metrics.TOOL_CALLS.labels("unknown", "error").inc()
        return ToolAnswer("", f"there is no tool {name!r:.100}. There are: {', '.join(tools)}")
    given, named = ((arguments,), {}) if isinstance(arguments, str) else ((), dict(arguments))
    try:
        result = await contained(_call(called, given, named, resources.blocking, timeout_s))
        parts: Content = []
        if content is not None and has_images(result):
            parts = await asyncio.to_thread(content, result)
            result = content_text({"content": parts})
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        answer = ToolAnswer(cut(text, output_chars), parts=tuple(shortened(parts, output_chars)))
        outcome = "ok"
    except (CallsBusy, InfrastructureFault):  # not caused by the model, so not its answer
        metrics.TOOL_CALLS.labels(called.name, "let_down").inc()
        raise
    except (CallTimeout, TimeoutError) as error:
        answer = ToolAnswer("", cut(str(error) or f"not back within {timeout_s:g} s", output_chars))
        outcome = "timeout"
    except Exception as error:  # the tool may be the user's, so the model reads the error
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        answer = ToolAnswer("", cut(text, output_chars))
        outcome = "error"
    metrics.TOOL_CALLS.labels(called.name, outcome).inc()
    return answer


def shortened(parts: Content, limit: int) -> list[Part]:
    """Return parts with at most `limit` characters of text."""
    kept = []
    for part in parts:
        assert isinstance(part, dict)
        if part["type"] == "text":
            part = {**part, "text": cut(part["text"], limit)}
            limit = max(0, limit - len(part["text"]))
        kept.append(part)
    return kept


def cut(text: str, limit: int) -> str:
    """Return the first `limit` characters of `text`, with a note if the rest was cut off."""
    return text if len(text) <= limit else f"{text[:limit]}… (cut: {limit} of {len(text)} characters)"


async def _call(
    called: Tool, given: tuple[Any, ...], named: dict[str, Any], blocking: BlockingCalls, timeout_s: float
) -> Any:
    if inspect.iscoroutinefunction(called.function):
        async with asyncio.timeout(timeout_s):
            return await called.function(*given, **named)
    if called.inline:
        return called.function(*given, **named)
    return await blocking(lambda: called.function(*given, **named), timeout_s=timeout_s)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints.get(parameter.name, str)
        properties[parameter.name] = {"type": JSON_TYPES.get(getattr(kind, "__origin__", kind), "string")}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required}
