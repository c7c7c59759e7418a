"""benchmarks/parity.py and versions.py in short: the local engine against a plain forward pass and the
trainer's back end, and its versions while weights change under requests. (Servers: `test_contract.py`.)"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import versions
from agreement import Snapshots, job_for, write_sharp_model

from rollout_service.engines import make_engine
from rollout_service.engines.base import GenerateResult
from rollout_service.engines.local.engine import LocalEngine

UPDATE_S = 0.02
"""Between two updates."""
LONGEST = (120, 240, 480, 960)
"""Units of the longest answers: tried in turn until an update falls into one, on any machine."""


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sharp_model(tmp_path_factory.mktemp("ending"))


def measured(model: Path, root: Path, **how: Any) -> versions.Versions:
    how = {"episodes": 16, "slots": 16, "most_updates": 5, "update_s": UPDATE_S} | how
    for longest in LONGEST:
        work = versions.versions("local", model, root / f"{longest}", longest=longest, **how)
        found = asyncio.run(work)
        if found.failed or found.spanning:
            break
    return found


def tell_lies(patch: pytest.MonkeyPatch, lie: Callable[[GenerateResult], GenerateResult]) -> None:
    """What the local engine says goes through `lie` from now on."""

    class Lying(LocalEngine):
        async def generate(self, request: Any) -> GenerateResult:
            return lie(await super().generate(request))

    patch.setattr("rollout_service.engines.local.engine.LocalEngine", Lying)


def test_an_engine_says_what_a_plain_forward_pass_and_the_trainer_say(endless: Path, tmp_path: Path) -> None:
    work = parity.parity(["local"], endless, tmp_path, prompts=8, new_tokens=16)
    (found,) = asyncio.run(work)
    assert found.failed == []
    assert found.compared_units > 60
    assert found.sampled_units > 100


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
    tell_lies(monkeypatch, lie)
    engine = make_engine(job_for("local", ending, max_model_len=64), slots=8, activity="parity")
    snapshot = Snapshots(ending, tmp_path).write(parity.TAG)
    prompts = parity.make_prompts(6, 16)
    found = asyncio.run(parity.measure(engine, "local", snapshot, prompts, new_tokens=12))
    assert any(words in failure for failure in found.failed)


def test_versions_are_true_and_nothing_is_lost_or_cut(endless: Path, tmp_path: Path) -> None:
    found = measured(endless, tmp_path)
    assert found.failed == []
    assert found.served >= 2
    assert found.spanning > 0


def test_answers_end_where_the_model_ends_them(ending: Path, tmp_path: Path) -> None:
    assert measured(ending, tmp_path, update_s=0.01).failed == []


def test_what_a_stream_tells_on_the_way_is_the_beginning_of_its_answer(endless: Path, tmp_path: Path) -> None:
    found = measured(endless, tmp_path, streams=True)
    assert found.failed == []
    assert found.spanning > 0
    assert found.pieces > 4 * found.requests, "the answers came in lumps"


def test_kept_kv_is_exact_until_the_first_update_and_labelled_truly_after(
    endless: Path, tmp_path: Path
) -> None:
    found = measured(endless, tmp_path, mode="keep")
    assert found.failed == []
    assert found.spanning > 0
    assert found.max > versions.BOUND  # else nothing was approximate, and `keep` did not keep


def shifted(result: GenerateResult) -> GenerateResult:
    """Each version begins one unit late, as with a client that guesses from the time of the swap."""
    return replace(result, versions=np.r_[result.versions[:1], result.versions[:-1]])


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (shifted, "off what the version that it names gives"),
        (lambda r: replace(r, versions=np.full_like(r.versions, r.versions[-1])), "off what the version"),
        (lambda r: replace(r, epochs=r.epochs + 1), "never served"),
        (lambda r: replace(r, finish_reason="abort"), "ended with abort"),
    ],
    ids=["late", "last", "epoch", "cut"],
)
def test_a_wrong_tag_or_a_cut_answer_is_noticed(
    lie: Any, words: str, endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_lies(monkeypatch, lie)
    found = measured(endless, tmp_path, episodes=12, update_s=0.01)
    assert any(words in failure for failure in found.failed)
