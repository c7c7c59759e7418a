"""One of two ranks that compile blocks: one rank alone cannot compile them, or both share the rows.

python compiled_process.py RANK MODEL COMPILER
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import AutoConfig

from areal_async.config.job import OptimizerSection
from areal_async.config.parallel import RankGrid
from areal_async.service.rank_group import Meeting
from tests import flash_cpu
from tests.unit.families import VOCABULARY
from tests.unit.trainer.conftest import plain_row
from tests.waiting import deadline_s
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import attention, compiled
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data import ragged
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.prefixes import plant
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

COLLECTIVE_S = deadline_s(60)


def whole(graph: torch.fx.GraphModule, inputs: object) -> Any:
    return graph.forward


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("no compiler on this host")


fails_forward, fails_backward = broken, aot_autograd(fw_compiler=whole, bw_compiler=broken)


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
    if seed:  # Every size has its smallest value at the start of a run. It grows here.
        plain += [row(n, ids(9)) for n in range(4, 12)] + [row(12, rng.integers(2, VOCABULARY, 400))]
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
    return torch.cat([torch.zeros(0), *found]), gradients  # of shared rows, one rank has all log-probs


def main(rank: int, model: Path, compiler: str) -> dict[str, Any]:
    """Return the results of this rank. `compiler` is for rows that the ranks share."""
    torch.set_num_threads(1)
    ranks = join_ranks(rank, 2, meeting=Meeting.from_environment(), timeout_s=COLLECTIVE_S)
    attention.why_not_ragged = lambda *_: ""
    logged: list[str] = []
    log = logging.getLogger("areal.trainer")
    log.addFilter(lambda record: logged.append(str(record.__dict__)) or True)
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(attention, "varlen_attn", broken)
        config = AutoConfig.from_pretrained(model)
        seen["ragged"] = attention.takes_ragged("policy", config, ranks, torch.bfloat16)
        seen["attention"] = logged.pop()

    ragged.LEAST_LENGTH = 256  # A row of the second step is longer.

    def backend_of(compile: str, sequence: int = 1, *, trained: bool = True) -> FsdpBackend:
        use = ModelUse(model, OptimizerSection(lr=1e-3), 100) if trained else ModelUse(model)
        grid = RankGrid(shard=2 // sequence, sequence=sequence)
        return FsdpBackend({"policy": use}, ranks, dtype=torch.float32, compile=compile, grid=grid)

    compiled.COMPILER = fails_forward if rank else whole
    try:
        backend_of("on", trained=False)
    except ModelError as error:
        seen["refused"] = str(error)
    compiled.COMPILER = fails_backward if rank else whole
    logged.clear()
    backend, eager = backend_of("auto"), backend_of("off")
    seen["logged"] = [line for line in logged if "run eagerly" in line]
    seen["differs"] = differs(backend, eager, 0)

    compiled.COMPILER = compiler
    counters.clear()
    backend, eager = backend_of("on", 2), backend_of("off", 2)
    graphs = counters["stats"]["unique_graphs"]
    seen["shared"] = [differs(backend, eager, seed) for seed in range(2)]
    seen["graphs"] = [graphs, counters["stats"]["unique_graphs"]]
    return seen


def differs(backend: FsdpBackend, eager: FsdpBackend, seed: int) -> float:
    """Return the largest difference of log-probs and gradients between two back ends."""
    batches = some_batches(seed)
    (mine, gradients), (wanted, others) = (step_of(each, batches) for each in (backend, eager))
    assert gradients.keys() == others.keys() != set()
    pairs = [(mine, wanted), *((gradient, others[name]) for name, gradient in gradients.items())]
    return max(float((one - other).abs().max()) for one, other in pairs if one.numel())


if __name__ == "__main__":
    with flash_cpu.installed():
        print(json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])), flush=True)
    os._exit(0)
