"""A job whose episodes are made by an agent that knows nothing but a base URL."""

import shutil

import numpy as np
import pytest

from areal_async.quickstart.model import split_problems, write_tasks
from areal_async.trajectory import training_rows, unpack
from trainer_service.data.recording import read_step

STEPS = 4

pytestmark = [pytest.mark.slow]

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


def test_a_job_is_trained_on_what_an_agent_function_sampled(workspace, running):
    (workspace.folder / "chatter.py").write_text(FUNCTION)
    model = workspace.folder / "chat-model"
    shutil.copytree(workspace.folder / "model", model)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    rollout = {"workflow": "agent", "workflow_args": {"agent": "chatter.py:agent"}, "max_model_len": 320}
    _, held_out = split_problems(seed=0, n_held_out=64)
    write_tasks(held_out[:4], workspace.folder / "few.jsonl", "few")
    job_file = workspace.job(
        "chatting",
        rollout={"group_size": 2, "max_concurrent": 8, "sampling": {"max_new_tokens": 32}} | rollout,
        trainer__steps=STEPS,
        model=model.name,
        tasks={"train": "train.jsonl", "evaluation": "few.jsonl"},
        buffer__batch_groups=3,
        evaluation={"every_steps": 10, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
    )
    with running("run", job_file) as job:
        evaluations = job.end().records("evaluation")
    calls = roots = 0
    versions = []
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
    assert {record["n"] for record in evaluations} == {4}
