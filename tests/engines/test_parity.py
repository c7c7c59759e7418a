"""benchmarks/parity.py in short: every engine against a plain forward pass and the trainer's back end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
from agreement import Snapshots, job_for, write_sharp_model

from rollout_service.engines import make_engine
from rollout_service.engines.base import GenerateResult
from rollout_service.engines.local.engine import LocalEngine

ENGINES = [
    "local",
    pytest.param("sglang", marks=pytest.mark.engine),
    pytest.param("vllm", marks=pytest.mark.engine),
]


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sharp_model(tmp_path_factory.mktemp("model"))


@pytest.mark.timeout(400)  # of a server's start
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_says_what_a_plain_forward_pass_and_the_trainer_say(
    engine: str, endless: Path, tmp_path: Path, endless_server: Callable[[str], str | None]
) -> None:
    url = endless_server(engine)
    work = parity.parity([engine], endless, tmp_path, prompts=8, new_tokens=16, url=url)
    (found,) = asyncio.run(work)
    assert found.failed == []
    assert found.compared_units > 60
    assert found.sampled_units > 100


class Lying(LocalEngine):
    lie: Callable[[GenerateResult], GenerateResult]

    async def generate(self, request: Any) -> GenerateResult:
        return self.lie(await super().generate(request))


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda r: replace(r, token_ids=np.where(r.token_ids > 3, r.token_ids - 1, 3)), "answers differ"),
        (lambda r: replace(r, logprobs=r.logprobs - 2e-4), "greedy log-prob"),
        (lambda r: replace(r, logprobs=r.logprobs * np.float32(1.1)), "trainer's log-prob"),
        (lambda r: replace(r, versions=r.versions + 1), "not of the version that served"),
    ],
    ids=["ids", "logprobs", "temperature", "version"],
)
def test_an_engine_that_says_something_else_is_noticed(
    lie: Any, words: str, ending: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_service.engines.local.engine.LocalEngine", Lying)
    engine = make_engine(job_for("local", ending, max_model_len=64), slots=8, activity="parity")
    assert isinstance(engine, Lying)
    engine.lie = lie
    snapshot = Snapshots(ending, tmp_path).write(parity.TAG)
    prompts = parity.make_prompts(6, 16)
    found = asyncio.run(parity.measure(engine, "local", snapshot, prompts, new_tokens=12))
    assert any(words in failure for failure in found.failed)
