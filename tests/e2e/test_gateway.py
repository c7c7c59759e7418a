"""A job whose episodes are made by an agent that knows nothing but a base URL."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_async.quickstart.model import split_problems, write_parquet
from areal_async.trajectory import training_rows, unpack
from trainer_service.data.recording import read_step

STEPS = 4

pytestmark = [pytest.mark.slow]

AGENT = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["prompt"]}]
for turn in range(2):
    body = {"model": "policy", "messages": messages, "max_tokens": 8}
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "1+1="}]
print(said)
"""
FUNCTION = """
import asyncio
import openai

async def agent(session, task):
    async with openai.AsyncOpenAI(base_url=session.openai_base_url, api_key=session.api_key) as client:
        async def chat(n):
            messages = [{"role": "user", "content": task.prompt}]
            for turn in range(3):
                stream = await client.chat.completions.create(
                    model="gpt", messages=messages, max_tokens=24, stream=True)
                said = "".join([c.choices[0].delta.content or "" async for c in stream])
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "1+1="}]
            return said
        return (await asyncio.gather(chat(0), chat(1)))[0]
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}={% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)


def chat_model(folder: Path) -> str:
    """The name of the workspace's model with a chat template."""
    model = folder / "chat-model"
    if not model.exists():
        shutil.copytree(folder / "model", model)
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return model.name


def test_a_job_is_trained_on_what_an_agent_function_sampled(workspace: Any, running: Any) -> None:
    (workspace.folder / "chatter.py").write_text(FUNCTION)
    rollout = {
        "group_size": 2,
        "max_concurrent": 8,
        "max_model_len": 320,
        "workflow": "agent",
        "workflow_args": {"agent": "chatter.py:agent"},
        "sampling": {"temperature": 0.9, "max_new_tokens": 32},
    }
    _, held_out = split_problems(seed=0, n_held_out=64)
    write_parquet(held_out[:4], workspace.folder / "few.parquet", "few")
    job_file = workspace.job(
        "chatting",
        rollout=rollout,
        trainer__steps=STEPS,
        model=chat_model(workspace.folder),
        tasks={"train": "train.parquet", "evaluation": "few.parquet"},
        buffer__batch_groups=3,
        evaluation={"every_steps": 10, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
    )
    with running("run", job_file) as job:
        told = job.read_all(120)
        assert job.process.wait(60) == 0, told
    calls = roots = 0
    versions: list[int] = []
    for step in range(STEPS):
        for blob in read_step(job.folder / "batches", step).blobs.values():
            episode = unpack(blob)
            metadata = episode.header.metadata
            calls += metadata["gateway_calls"]
            roots += metadata["roots"]
            assert metadata["gateway_calls"] == 6
            rows = training_rows(episode)
            assert sum(row.mask.sum() for row in rows) == episode.n_sampled
            versions += np.unique(episode.units.version[episode.units.mask == 1]).tolist()
    assert calls == STEPS * 3 * 2 * 6
    assert roots >= STEPS * 3 * 2
    assert len(set(versions)) > 1
    evaluations = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    assert any(record["kind"] == "evaluation" and record["n"] == 4 for record in evaluations)


def test_a_job_is_trained_on_what_a_command_sampled(workspace: Any, running: Any) -> None:
    (workspace.folder / "command.py").write_text(AGENT)
    rollout = {
        "group_size": 2,
        "max_concurrent": 4,
        "max_model_len": 64,
        "workflow": "agent",
        "workflow_args": {"command": [sys.executable, "command.py"], "cwd": "."},
        "sampling": {"temperature": 0.9, "max_new_tokens": 8},
    }
    tasks = {"train": "train.parquet"}
    job_file = workspace.job(
        "commanded",
        rollout=rollout,
        trainer__steps=2,
        buffer__batch_groups=2,
        tasks=tasks,
        model=chat_model(workspace.folder),
    )
    with running("run", job_file) as job:
        told = job.read_all(120)
        assert job.process.wait(60) == 0, told
    blobs = [blob for step in range(2) for blob in read_step(job.folder / "batches", step).blobs.values()]
    assert [unpack(blob).header.metadata["gateway_calls"] for blob in blobs] == [2] * 8
