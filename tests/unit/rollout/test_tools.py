from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from expressions import ExpressionError, calc
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.base.errors import InfrastructureFault
from rollout_service.workflows import tool
from rollout_service.workflows.tool_use import RequestedCall, json_calls, open_brackets, plain_call
from rollout_service.workflows.tools import (
    BlockingCalls,
    CallsBusy,
    CallTimeout,
    Tool,
    ToolAnswer,
    ToolError,
    WorkflowResources,
    load_tools,
    run_tool,
)
from tests.waiting import LIMIT_S


def call(function: Any, arguments: Any = "x", *, timeout_s: float = 5.0) -> ToolAnswer:
    async def main() -> ToolAnswer:
        called = tool(function) if callable(function) and not isinstance(function, Tool) else function
        how: Any = {"blocking": BlockingCalls(), "timeout_s": timeout_s, "output_chars": 100}
        return await run_tool(WorkflowResources({"calc": calc}, **how), called, arguments)

    return asyncio.run(main())


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 999)), min_size=1, max_size=6),
    st.integers(0, 99),
)
def test_expressions_are_worth_what_python_says(parts: list[tuple[str, int]], first: int) -> None:
    text = str(first) + "".join(f"{sign}{number}" for sign, number in parts)
    assert calc(text) == str(eval(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/4", "0.25"), ("0.1+0.2", "0.3"), ("-(2-5)", "3"), ("2÷3", "0.6666666667"), ("6/3", "2")],
)
def test_values_are_exact_and_written_short(text: str, value: str) -> None:
    assert calc(text) == value


@pytest.mark.parametrize(
    "text", ["", "1+", "2**9", "a", "1 2", "1/0", "1;2", "f(1)", "True", "(" * 150, "9" * 99, "'a'*9"]
)
def test_what_has_no_value_says_so(text: str) -> None:
    with pytest.raises(ExpressionError):
        calc(text)


def test_a_tool_may_be_sync_or_async_and_answer_with_anything_json_can_hold() -> None:
    async def later(text: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"said": text, "n": [1, 2]}

    seen: list[str] = []

    def blocking(text: str) -> str:
        seen.append(threading.current_thread().name)
        return text

    def long(text: str) -> str:
        return text * 1000

    assert call(long, "ab").text == "ab" * 50 + "… (cut: 100 of 2000 characters)"
    assert call("calc", {"expression": "1/3"}) == ToolAnswer("0.3333333333")
    assert call(later) == ToolAnswer('{"said": "x", "n": [1, 2]}')
    assert call(blocking) == ToolAnswer("x")
    assert seen == ["blocking-call"]


def test_whatever_a_tool_raises_is_an_answer() -> None:
    def ends(text: str) -> str:
        raise SystemExit(3)

    def stops(text: str) -> str:
        raise StopIteration

    async def breaks(text: str) -> str:
        raise KeyError("no")

    async def leaves(text: str) -> str:
        raise SystemExit(text)

    async def cancels(text: str) -> str:
        raise asyncio.CancelledError

    assert "division by zero" in call("calc", "1/0").error
    assert "There are: calc" in call("oven", "12").error
    assert "SystemExit: 3" in call(ends).error
    assert "StopIteration" in call(stops).error
    assert call(breaks).error == "KeyError: 'no'"
    assert "SystemExit: x" in call(leaves).error
    assert "CancelledError" in call(cancels).error
    assert "TypeError" in call(ends, {"wrong": 1}).error


@pytest.mark.parametrize("inline", [False, True])
def test_a_tool_that_says_something_else_is_to_blame_answers_nothing(inline: bool) -> None:
    def search(text: str) -> str:
        raise InfrastructureFault("the search service is down")

    with pytest.raises(InfrastructureFault, match="search service"):
        call(tool(inline=inline)(search))


def test_a_host_that_starts_no_thread_is_no_answer_of_a_tool(monkeypatch: Any) -> None:
    calls = BlockingCalls(limit=1)

    async def once() -> Any:
        how: Any = {"blocking": calls, "timeout_s": LIMIT_S, "output_chars": 100}
        return await run_tool(WorkflowResources({"calc": calc}, **how), tool(lambda text: text), "x")

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(CallsBusy, match="starts no thread"):
                await once()
        assert (await once()).text == "x", "the place is free again"

    def no_thread(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    asyncio.run(main())


def test_a_tool_past_its_deadline_is_an_error_that_says_so() -> None:
    held = threading.Event()

    def hangs(text: str) -> str:
        held.wait(LIMIT_S)
        return text

    async def sleeps(text: str) -> str:
        await asyncio.Event().wait()
        return text

    assert "not back within 0.05 s" in call(hangs, timeout_s=0.05).error
    assert "not back within 0.05 s" in call(sleeps, timeout_s=0.05).error
    held.set()


async def test_nothing_is_unbounded_hanging_calls_hold_at_most_their_places() -> None:
    held = threading.Event()
    started = threading.Semaphore(0)

    def hang() -> None:
        started.release()
        held.wait(LIMIT_S)

    blocking = BlockingCalls(limit=3)
    calls = [blocking(hang, timeout_s=0.05) for _ in range(10)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, CallTimeout) for outcome in outcomes)
    assert sum("all 3 threads" in str(outcome) for outcome in outcomes) == 7
    for _ in range(3):
        assert await asyncio.to_thread(started.acquire, timeout=LIMIT_S)
    assert not started.acquire(blocking=False)
    held.set()
    # A place is free again when what held it has ended.
    assert await blocking(lambda: 5, timeout_s=60.0) == 5


async def test_a_timeout_error_of_the_call_itself_is_its_own() -> None:
    def fails() -> None:
        raise TimeoutError("of the site it asked")

    with pytest.raises(TimeoutError, match="of the site"):
        await BlockingCalls()(fails, timeout_s=5.0)


async def test_an_answer_that_comes_together_with_its_deadline_is_the_answer() -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + 2.0

    held_up = threading.Event()

    def hold_up() -> None:
        held_up.set()
        time.sleep(max(0.0, deadline_s - loop.time()) + 0.1)

    def in_time() -> str:
        loop.call_soon_threadsafe(hold_up)  # until the deadline has passed too
        held_up.wait(LIMIT_S)
        return "in time"

    assert await BlockingCalls()(in_time, timeout_s=2.0) == "in time"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("calc(1+2)", ("calc", "1+2")), ("let me see: calc(2*(3+4))  \n", ("calc", "2*(3+4)")),
        ("f(a)(b)", None), ("calc()", ("calc", "")), ("calc (1)", None), ("(1+2)", None),
        ("calc(1+2) is 3", None), ("1+2)", None), ("", None), ("9x_1(y)", ("x_1", "y")),
    ],
)  # fmt: skip
def test_a_plain_call_is_a_name_and_brackets_at_the_very_end(text: str, found: Any) -> None:
    assert plain_call(text) == (RequestedCall(*found) if found else None)


@given(st.text("()ab", max_size=20))
def test_brackets_are_counted_as_a_stack_would(text: str) -> None:
    stack = 0
    for character in text:
        stack = stack + 1 if character == "(" else max(0, stack - 1) if character == ")" else stack
    assert open_brackets(text) == stack


@settings(max_examples=50)
@given(st.text(max_size=60))
def test_no_text_breaks_the_parsers(text: str) -> None:
    plain_call(text)
    json_calls(f"<tool_call>{text}</tool_call>")


def test_json_calls_are_read_in_order_and_mistakes_say_what_is_wrong() -> None:
    text = (
        'a<tool_call>\n{"name": "calc", "arguments": {"expression": "1"}}\n</tool_call>'
        '<tool_call>{"name": 3}</tool_call><tool_call>[]</tool_call><tool_call>{</tool_call>'
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'
    )
    calls = json_calls(text)
    assert calls[0] == RequestedCall("calc", {"expression": "1"})
    assert [bool(c.problem) for c in calls] == [False, True, True, True, False]
    assert calls[4] == RequestedCall("f", "x")


TOOL = "from rollout_service.workflows import tool\n@tool\ndef cook(x): ..."


@pytest.mark.parametrize(
    ("names", "source", "says"),
    [
        (["oven"], None, "no tool 'oven'.*path.py:name"),
        (["{}/t.py:bake"], "def bake(x): ...", "is not marked @tool"),
        (["{}/t.py:bake"], TOOL, "defines no 'bake'. It defines .*cook"),
        (["{}/t.py:cook", "{}/t.py:cook"], TOOL, "two tools called 'cook'"),
    ],
)
def test_tools_that_cannot_be_loaded_say_why(names, source, says, tmp_path):
    if source is not None:
        (tmp_path / "t.py").write_text(source)
    with pytest.raises(ToolError, match=says):
        load_tools([name.format(tmp_path) for name in names])
