"""Compiled blocks: one graph for all equal blocks, made before the first step, equal to eager blocks.

Without a GPU, the compiler generates C++ instead of Triton. Graph breaks, compilations and the calls outside
generated kernels are the same on both. The number of generated kernels depends on the rules of fusion, which
differ in detail, so the figures here are for the C++ code.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from areal_async.config.job import LoraSection, OptimizerSection
from benchmarks.families import tiny_model
from tests import flash_cpu
from tests.unit.families import VOCABULARY, config_of
from tests.unit.trainer.conftest import plain_row
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import compiled
from trainer_service.backends.fsdp import model as fsdp_model
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.prefixes import plant
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

CONFIGS = {
    "dense": lambda: config_of(Qwen3Config, head_dim=16),
    "window": lambda: config_of(
        Qwen3Config, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "experts": lambda: config_of(
        Qwen3MoeConfig, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}


@pytest.fixture(autouse=True)
def ragged(monkeypatch):
    """Attention over ragged rows, as on CUDA, with a compiler that is fast to start."""
    monkeypatch.setattr(fsdp_model, "takes_ragged", lambda *_: True)
    monkeypatch.setattr(compiled, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    with flash_cpu.installed():
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, made in CONFIGS.items():
        tiny_model(made()).save_pretrained(folder / name)
    return folder


def backend_of(folder: Path, dtype=torch.float32, frozen=False, **options) -> FsdpBackend:
    models = {"policy": ModelUse(folder) if frozen else ModelUse(folder, OptimizerSection(lr=1e-3), 100)}
    return FsdpBackend(models, join_ranks(0, 1), dtype=dtype, **options)


def some_batches(seed: int) -> list[MicroBatch]:
    """A pack of plain rows, one of a tree with nested branches, and the pass of a rank without work."""
    rng = np.random.default_rng(seed)

    def row(episode: int, ids: np.ndarray):
        return plain_row(ids, slice(1, None), episode=episode, feeds_last=True)

    def ids(most: int) -> np.ndarray:
        return rng.integers(2, VOCABULARY, rng.integers(2, most))

    trunk = ids(200)
    turn = np.concatenate([trunk, ids(60)])
    rows = [row(n, np.concatenate([start, ids(40)])) for n, start in enumerate([trunk, turn, turn, trunk])]
    trees = plant(rows, np.zeros(4, int), 1 << 20)
    plain = [row(n, ids(most)) for n, most in enumerate((9, 90, 300, 5))]
    return [
        build_micro_batch(plain),
        build_micro_batch([r for tree in trees for r in tree.rows]),
        build_micro_batch([]),
    ]


def step_of(backend: FsdpBackend, batches: list[MicroBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs before and in training, and gradients."""
    before = backend.evaluate("policy", batches, lambda _, columns: columns["logp"])
    found = list(before)

    def loss_of(index: int, columns) -> torch.Tensor:
        found.append(columns["logp"].detach())
        return (columns["logp"] * torch.cos(torch.arange(len(columns["logp"])))).sum()

    backend.train("policy", batches, loss_of)
    parameters = backend._models["policy"].module.named_parameters()
    gradients = {name: p.grad.to_local().clone() for name, p in parameters if p.grad is not None}
    backend.discard()
    return torch.cat(found), gradients


CASES = [
    ("dense", {"recompute": "none"}),
    ("window", {"recompute": "selective"}),
    ("dense", {"recompute": "full", "lora": LoraSection(rank=2)}),
    ("experts", {"recompute": "full", "dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(
    ("model", "options"), CASES, ids=lambda each: each if isinstance(each, str) else each["recompute"]
)
def test_compiled_blocks_compute_the_same_and_are_compiled_before_the_first_step(model, options, folders):
    eager = backend_of(folders / model, **options)
    backend = backend_of(folders / model, compile="on", **options)
    graphs = counters["stats"]["unique_graphs"]
    kinds = 2 if model == "window" else 1
    assert graphs == 4 * kinds
    assert not counters["graph_break"]
    for seed in range(3):
        batches = some_batches(seed)
        (mine, gradients), (wanted, others) = step_of(backend, batches), step_of(eager, batches)
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, others[name], atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == graphs
