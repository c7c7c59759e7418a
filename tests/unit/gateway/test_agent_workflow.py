"""The workflow `agent`: a function in the worker's process, or a command."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_async.base.errors import InfrastructureFault
from areal_async.base.mistakes import ConfigError
from areal_async.base.records import Task
from areal_async.config.load import load_job
from areal_async.trajectory import unpack
from rollout_service.engines.base import EngineError
from rollout_service.worker.failures import run_episode
from rollout_service.workflows import WorkflowError, load_workflow
from rollout_service.workflows.agent import AgentError
from tests.processes import is_gone
from tests.unit.gateway.fakes import (
    CHAT,
    ROUTE,
    Scripted,
    assert_recorded_is_what_the_engine_said,
    http_of,
    serving,
)
from tests.waiting import LIMIT_S, until

TASK = Task("t", "1+2?", ground_truth="3", extra_info={"level": 1})

FUNCTION = """
import openai

async def agent(session, task):
    async with openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=session.api_key) as client:
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": task.prompt}])
    return "answer: " + reply.choices[0].message.content

async def idle(session, task):
    return "I know"

async def failing(session, task):
    raise RuntimeError("no idea")

def blocking(session, task): ...
"""

COMMAND = """
import json, sys, urllib.request, os
task = json.load(sys.stdin)
assert "ground_truth" not in task, task
body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
reply = json.load(urllib.request.urlopen(request))
print("answer:", reply["choices"][0]["message"]["content"])
"""


async def run(arguments: dict[str, Any], tokenizer: Any) -> Any:
    engine = Scripted(tokenizer, ["three{END}"])
    workflow = load_workflow("agent", arguments)
    async with serving(engine, tokenizer) as (_, ctx, _session):
        await workflow(ctx, TASK)
        episode = ctx.builder.build()
    assert_recorded_is_what_the_engine_said(episode, engine.log)
    return episode


async def test_a_function_is_an_agent(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    episode = await run({"agent": f"{tmp_path}/mine.py:agent"}, tokenizer)
    assert episode.header.response_text == "answer: three"
    assert "1+2?" in episode.header.prompt_text


async def test_a_command_is_an_agent(tmp_path: Path, tokenizer: Any, monkeypatch: Any) -> None:
    # A proxy that would answer for everything must not be asked.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    (tmp_path / "mine.py").write_text(COMMAND)
    episode = await run({"command": [sys.executable, "mine.py"], "cwd": str(tmp_path)}, tokenizer)
    assert episode.header.response_text == "answer: three"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("idle", "without a call to the model"),
        ("failing", "no idea"),
        ("blocking", "async def"),
        ("no", "async def"),
    ],
)
async def test_an_agent_that_fails_makes_its_episode_fail(name, says, tmp_path, tokenizer):
    (tmp_path / "mine.py").write_text(FUNCTION)
    with pytest.raises((AgentError, RuntimeError), match=says):
        await run({"agent": f"{tmp_path}/mine.py:{name}"}, tokenizer)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no-such-program"], "cannot be started"),
        ([sys.executable, "-c", "import sys; sys.exit('bad luck')"], "status 1: bad luck"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "SIGKILL: it said nothing"),
        ([sys.executable, "-c", "print('x' * 3_000_000)"], "printed more than"),
        ([sys.executable, "-c", "print('hi')"], "without a call to the model"),
    ],
)
async def test_a_command_that_fails_says_how(words: list[str], says: str, tokenizer: Any) -> None:
    with pytest.raises(AgentError, match=says):
        await run({"command": words}, tokenizer)


CALLS = """
import json, os, sys, time, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
urllib.request.urlopen(request).read()
"""


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("json.loads('no JSON')", "JSONDecodeError"),
        ("json.loads('[' * 100_000)", "RecursionError"),
        ("sys.exit(3)", "status 3"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("print('x' * 3_000_000)", "printed more than"),
        ("sys.stderr.write('x' * 20_000_000)", "printed more than"),
    ],
)
async def test_a_command_that_fails_after_an_answer_is_at_fault_by_it(then, says, tokenizer):
    engine, command = Scripted(tokenizer), [sys.executable, "-c", CALLS + then]
    async with serving(engine, tokenizer) as (_, ctx, _session):
        episode, blob = await run_episode(ctx, load_workflow("agent", {"command": command})(ctx, TASK), None)
    assert says in episode.header.fault
    assert episode.n_sampled == len(engine.log[0][1].token_ids)
    assert unpack(blob).header.fault == episode.header.fault


async def test_a_command_says_that_something_else_is_to_blame(tokenizer):
    workflow = load_workflow("agent", {"command": [sys.executable, "-c", CALLS + "sys.exit(75)"]})
    async with serving(Scripted(tokenizer), tokenizer) as (_, ctx, _session):
        with pytest.raises(InfrastructureFault, match="status 75"):
            await run_episode(ctx, workflow(ctx, TASK), None)


OWN = """
import asyncio, httpx, json
from areal_async import InfrastructureFault

async def call(session):
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    headers = {"authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=None) as client:
        reply = await client.post(session.openai_base_url + "/chat/completions", json=body)
        reply.raise_for_status()

async def agent(session, task):
    await call(session)
    THEN
"""


@pytest.mark.parametrize(
    ("then", "fault"),
    [
        ("raise RuntimeError('no idea')", "RuntimeError: no idea"),
        ("json.loads('{')", "JSONDecodeError"),
        ("raise SystemExit('no such option')", "SystemExit: no such option"),
        ("raise asyncio.CancelledError", "CancelledError"),
        ("raise type('Odd', (BaseException,), {})('x')", "Odd: x"),
        ("return 'x' * (40 << 20)", "SizeError"),
        ("return chr(0xd800)", "CodecError"),
        ("raise InfrastructureFault('the search is down')", None),
        ("'broken'; await call(session)", None),
    ],
)
async def test_a_function_that_fails_after_an_answer_is_at_fault_by_it(then, fault, tmp_path, tokenizer):
    """Unless it says otherwise, or the engine fails."""
    (tmp_path / "mine.py").write_text(OWN.replace("THEN", then))
    engine = Scripted(tokenizer)

    async def gate(request):
        if "broken" in then and engine.log:
            raise EngineError("no kernel")

    engine.gate = gate
    workflow = load_workflow("agent", {"agent": f"{tmp_path}/mine.py:agent"})
    async with serving(engine, tokenizer) as (_, ctx, _session):
        if fault is None:
            with pytest.raises((InfrastructureFault, httpx.HTTPStatusError)):
                await run_episode(ctx, workflow(ctx, TASK), None)
            return
        episode, _ = await run_episode(ctx, workflow(ctx, TASK), None)
    assert fault in episode.header.fault
    assert episode.n_sampled


@pytest.mark.parametrize("answered", [True, False])
async def test_an_agent_that_is_late_is_at_fault_once_it_has_an_answer(answered, tmp_path, tokenizer):
    (tmp_path / "mine.py").write_text(
        "import asyncio\nasync def agent(session, task): await asyncio.Event().wait()"
    )
    workflow = load_workflow("agent", {"agent": f"{tmp_path}/mine.py:agent", "timeout_s": 0.05})
    async with serving(Scripted(tokenizer), tokenizer) as (_, ctx, _session):
        if not answered:
            with pytest.raises(AgentError, match="not done after"):
                await run_episode(ctx, workflow(ctx, TASK), None)
            return
        await ctx.generate("go")
        episode, _ = await run_episode(ctx, workflow(ctx, TASK), None)
    assert "not done after" in episode.header.fault


async def test_the_wait_for_an_answer_is_known_while_it_lasts_and_once_it_was_given_up(tokenizer):
    engine, reached = Scripted(tokenizer), asyncio.Event()

    async def gate(request):
        reached.set()
        await asyncio.Event().wait()

    engine.gate = gate
    async with serving(engine, tokenizer) as (_, ctx, session):
        assert ctx.waited_s == 0
        async with http_of(session) as client:
            asking = asyncio.ensure_future(client.post(ROUTE, json=CHAT))
            await reached.wait()
            first_s = ctx.waited_s
            assert ctx.waited_s > first_s > 0
            asking.cancel()
            await asyncio.wait([asking])
    assert ctx.waited_s >= first_s
    assert engine.cancelled == 1


@pytest.mark.parametrize("late", [True, False])
async def test_a_command_ends_with_all_it_has_started(late: bool, tmp_path: Path, tokenizer: Any) -> None:
    """One is late; the other has ended, and its child holds its pipes."""
    pid_file = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {shlex.quote(str(pid_file))}; sleep {300 if late else 0}"
    says = "not done after" if late else "without a call"
    with pytest.raises(AgentError, match=says):
        await run({"command": ["sh", "-c", script], "timeout_s": 3 if late else 200}, tokenizer)
    pid = int(pid_file.read_text())
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: is_gone(pid))


@pytest.mark.parametrize(
    "arguments", [{}, {"agent": "x.py:f", "command": ["x"]}, {"agent": "x"}, {"agents": 1}]
)
def test_arguments_that_name_no_agent_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(WorkflowError, match=r"rollout\.workflow_args"):
        load_workflow("agent", arguments)


async def test_the_example_of_the_page_runs(tmp_path: Path, tokenizer: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(example)
    episode = await run({"agent": f"{tmp_path}/mine.py:solve"}, tokenizer)
    assert episode.header.metadata["gateway_calls"] == 3
    assert episode.header.metadata["roots"] == 1
    assert episode.header.response_text == "fine"


def test_the_agent_of_a_job_file_is_looked_up_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    said = {}
    for name in ("mine.py:agent", "mine.py:blocking", "gone.py:agent"):
        rollout = {"workflow": "agent", "workflow_args": {"agent": name, "cwd": "."}}
        content = {"job": "test", "model": "m", "tasks": {"train": "t.jsonl"}, "rollout": rollout}
        with pytest.raises(ConfigError) as broken:
            load_job(content, source="job.yaml", base=tmp_path)
        said[name] = [m.problem for m in broken.value.mistakes if m.field == "rollout.workflow_args.agent"]
    assert said["mine.py:agent"] == []
    assert said["mine.py:blocking"] == [f"blocking in {tmp_path}/mine.py is not a coroutine"]
    assert said["gone.py:agent"] == [f"{tmp_path}/gone.py cannot be read: No such file or directory"]
