"""Decode passes as CUDA graphs, on a GPU: the same answers as without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.graphs import few
from rollout_service.engines.local.model import LocalModel
from tests.unit.families import FAMILIES
from tests.unit.rollout.conftest import Tiny, save_model
from tests.unit.rollout.test_local_core import run, swap

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def core_of(tiny: Tiny, slots: int = 12) -> EngineCore:
    core = EngineCore(LocalModel(tiny.directory, device="cuda:0"), slots=slots, max_model_len=96)
    core.swap(tiny.weights(0))
    return core


def asked(temperature: Sequence[float]) -> list[GenerateRequest]:
    """Samples of a few prompts, of different lengths: rows come, part and go."""

    def one(i: int) -> GenerateRequest:
        how = Sampling(max_new_tokens=10 + 3 * i, seed=i, temperature=temperature[i % len(temperature)])
        return GenerateRequest(str(i), [5, 6, 7 + i % 5], how)

    return [one(i) for i in range(24)]


@on_a_gpu
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_graphs_change_no_answer(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    config.eos_token_id = None
    made = save_model(tmp_path, config)
    core, requests = core_of(made), asked([0.0, 1.0, 0.3])
    for _ in range(2):  # shapes are recorded, then all are
        done = run(core, *requests)
        for one in requests:
            made.assert_true(one, done[one.request_id])


@on_a_gpu
@pytest.mark.parametrize("able", [True, False], ids=["recorded", "not to be recorded"])
def test_a_graph_computes_with_the_newest_weights(endless: Any, able: bool) -> None:
    core, requests = core_of(endless), asked([1.0, 0.0])
    if not able:  # a number on the host is what cannot be recorded
        hidden = core.model.hidden
        core.model.hidden = lambda ids, *rest: (ids.sum().item(), hidden(ids, *rest))[1]
    run(core, *requests)
    done = run(core, *requests, at=lambda n: n in range(10, 60, 10) and swap(core, endless.weights(n // 10)))
    assert len({int(version) for got in done.values() for version in got.versions}) > 3
    for one in requests:
        endless.assert_true(one, done[one.request_id])
    core.fail(EngineError("the cache begins anew"))
    core.swap(endless.weights(0))
    again = run(core, *requests)
    for one in requests:
        endless.assert_true(one, again[one.request_id])


def test_shapes_are_few_and_never_below() -> None:
    shapes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 128, 192]
    assert [few(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 17, 100, 129)] == shapes
    assert all(n <= few(n) < 2 * n for n in range(1, 3000))
    assert len({few(n) for n in range(1, 257)}) == 16
