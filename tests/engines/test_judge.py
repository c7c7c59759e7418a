"""A language model behind a real server, vLLM or SGLang. As a judge: a job learns what it likes, and every
score is its own. As a teacher: what it says of each token is what the model says."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_async.base.verdicts import Failure, Score, message_of
from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.model import split_problems, write_model, write_tasks
from areal_async.config.engines import find_engine_python
from areal_async.config.objective import TeacherSection
from areal_async.config.reward import RewardSection
from areal_async.trajectory import unpack
from reward_service.client import LocalScorer
from reward_service.sdk import RewardInput
from rollout_service.engines.http.adapter import Directory, Launch, ServerSettings
from rollout_service.engines.http.process import ServerProcess, free_port
from rollout_service.engines.sglang.adapter import variables as sglang_variables
from rollout_service.engines.vllm.adapter import ONE_PROCESS
from rollout_service.engines.vllm.adapter import variables as vllm_variables
from tests.e2e.conftest import Workspace, finish
from tests.graders import share_of_ones, write_trained_judge
from tests.waiting import deadline_s
from trainer_service.data.recording import read_step
from trainer_service.data.rows import row_of
from trainer_service.teacher import TeacherServers

pytestmark = pytest.mark.engine

torch.set_num_threads(1)
READY_S = deadline_s(900)
STEPS = 20
CONTEXT = 96


def launched(python: Path, model: Path, port: int) -> Launch:
    settings = ServerSettings(slots=16, max_model_len=CONTEXT, python=python)
    return Launch(settings, model, Directory(VersionTag("policy", 0, 0), model), CONTEXT, port)


def vllm(python: Path, model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    flags = ["--model", str(model), "--served-model-name", "judge", "--host", "127.0.0.1"]
    flags += ["--port", str(port), "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    flags += ["--max-num-seqs", "16"]
    flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
    flags += ["--disable-uvicorn-access-log", "--distributed-executor-backend", ONE_PROCESS]
    module = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, *flags], vllm_variables(launched(python, model, port), os.environ)


def sglang(python: Path, model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    flags = ["--model-path", str(model), "--served-model-name", "judge", "--host", "127.0.0.1"]
    flags += ["--port", str(port), "--device", "cpu", "--attention-backend", "torch_native"]
    flags += ["--disable-overlap-schedule", "--disable-cuda-graph", "--grammar-backend", "none"]
    flags += ["--sleep-on-idle", "--max-total-tokens", "4096", "--context-length", str(CONTEXT)]
    flags += ["--dtype", "float32", "--max-running-requests", "16", "--log-level", "warning"]
    # Its warm-up asks in words that this tokenizer does not have: a prompt without a token ends the server.
    flags += ["--skip-server-warmup"]
    argv = [str(python), "-W", "ignore", "-P", "-m", "sglang.launch_server", *flags]
    return argv, sglang_variables(launched(python, model, port), os.environ)


@dataclass(frozen=True)
class Served:
    name: str
    url: str


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(
    request: pytest.FixtureRequest, judge_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name = str(request.param)
    python = find_engine_python(name)
    port = free_port()
    argv, environment = {"vllm": vllm, "sglang": sglang}[name](python, judge_model, port)
    log = tmp_path_factory.mktemp(name) / "server.log"
    server = ServerProcess(f"the {name} server", argv, environment, log)

    async def serves() -> bool:
        try:
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/v1/models") as answer:
                    return answer.status == 200
        except aiohttp.ClientError:
            return False

    try:
        asyncio.run(server.wait_ready(serves, READY_S))
        yield Served(name, f"http://127.0.0.1:{port}/v1")
    finally:
        asyncio.run(server.stop())


def arguments(served: Served, **more: object) -> dict[str, object]:
    grading = {
        "template": "{response}=",
        "quote": "none",
        "parse": r"\A\D*(\d)",
        "scale": [0, 9],
        "max_tokens": 2,
    }
    return {"base_url": served.url, "model": "judge", **grading, **more}


TEXTS = ["1111", "2345", "1234", "", "11110000", "+-=+", "123123123123"]


async def judged(served: Served, texts: list[str], **more: object) -> list[Any]:
    section = RewardSection(name="judge", args=arguments(served, **more), timeout_s=60)
    async with LocalScorer(section) as scorer:
        return list(await scorer.score([RewardInput(response=text) for text in texts]))


async def test_the_server_judges_and_several_votes_agree(served: Served) -> None:
    values = [verdict.value for verdict in await judged(served, TEXTS) if isinstance(verdict, Score)]
    assert values == pytest.approx([share_of_ones(text) for text in TEXTS], abs=0.17)
    voting = {"votes": 3, "temperature": 0.05, "aggregate": "median", "seed": 1}
    voted = await judged(served, TEXTS, **voting)
    medians = [verdict.value for verdict in voted if isinstance(verdict, Score)]
    assert medians == pytest.approx(values, abs=0.12)


async def test_a_text_that_the_server_cannot_take_is_not_judged_and_its_words_say_why(served: Served) -> None:
    long, short = await judged(served, ["1" * 300, "1"])
    assert isinstance(long, Failure) or long.at_fault
    assert str(CONTEXT) in message_of(long)
    assert isinstance(short, Score)


def test_a_teacher_says_what_its_model_says_of_each_unit(served: Served, judge_model: Path) -> None:
    rng = np.random.default_rng(0)
    network = AutoModelForCausalLM.from_pretrained(judge_model).eval()
    rows, wanted = [], []
    for length in (2, 9, 33, CONTEXT - 8):
        ids = rng.integers(3, network.config.vocab_size, length).astype(np.int32)
        mask = (rng.random(length) < 0.6).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        rows.append(row_of(0, ids, mask, np.zeros(length, np.float32), np.zeros(length, np.int32)))
        with torch.no_grad():
            said = network(torch.tensor(ids[None].astype(np.int64))).logits[0].double().log_softmax(-1)
        wanted += [float(said[at - 1, ids[at]]) for at in np.flatnonzero(mask)]
    url = served.url.removesuffix("/v1")
    section = TeacherSection(urls=[url], api=served.name, name="judge", timeout_s=120)
    found = TeacherServers(section).logprobs(rows)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.nightly
def test_a_job_learns_what_its_judge_likes(served: Served, tmp_path: Path) -> None:
    train, held_out = split_problems(seed=0, n_held_out=32)
    write_tasks(train[:500], tmp_path / "train.jsonl", "train")
    write_tasks(held_out, tmp_path / "held_out.jsonl", "held_out")
    write_model(tmp_path / "model", seed=0)
    workspace = Workspace(tmp_path)
    job_file = workspace.job(
        f"judged-by-{served.name}",
        evaluated=True,
        reward={"name": "judge", "args": arguments(served), "timeout_s": 60},
        trainer__steps=STEPS,
        trainer__optimizer={"lr": 2e-3, "clip_grad_norm": 1.0},
        evaluation={"every_steps": STEPS, "sampling": {"temperature": 0.0, "max_new_tokens": 8}},
    )
    run = finish(workspace, job_file)
    assert run.summary["episodes_dropped"] == 0
    rewards = [step["reward_mean"] for step in run.records("step")]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05
    gaps = []
    for step in range(STEPS):
        record = read_step(run.folder / "batches", step)
        for episode in (episode for group in record.batch.groups for episode in group.episodes):
            text = unpack(record.blobs[episode.episode_id]).header.response_text
            if set(text) <= set("0123456789+-="):  # It has learned no special tokens
                gaps.append(abs(episode.reward - share_of_ones(text)))
            assert episode.reward in {grade / 9 for grade in range(10)}
    assert len(gaps) > STEPS
    assert max(gaps) < 0.3
    assert np.mean(gaps) < 0.06
    assert json.loads((run.folder / "summary.json").read_text())["restarts"] == {}
