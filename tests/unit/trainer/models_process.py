"""Two ranks of a back end that holds a policy with a value head, a critic and a reference that follows.

python models_process.py MODEL CLASSIFIER OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from areal_async.config.job import OptimizerSection
from areal_async.runtime.group import Meeting
from tests.unit.trainer.sharded_process import OPTIMIZER, SHARES, forked, shares
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.ranks import Ranks, join_ranks

WORLD = 2
CRITIC = OptimizerSection(lr=3e-2, clip_grad_norm=2.0)


def backend_of(model: Path, classifier: Path, ranks: Ranks, **options: Any) -> FsdpBackend:
    models = {
        "policy": ModelUse(model, OPTIMIZER, 100, head="both"),
        "critic": ModelUse(classifier, CRITIC, 100, head="value"),
        "ref": ModelUse(model, follows=True),
    }
    return FsdpBackend(models, ranks, **{"dtype": torch.float32, **options})


def train(backend: FsdpBackend, rank: int, world: int, steps: range) -> list[float]:
    """Gradient norms of `steps`: two updates of the critic and one of the policy in each."""
    norms = []
    for step in steps:
        mine = shares(step)[rank::world]
        assert len(mine) == SHARES // world
        for _ in range(2):
            backend.train("critic", mine, lambda _, c: (c["value"] - 1).square().sum(), columns=("value",))
            norms.append(backend.optimizer_step("critic"))
        kept = backend.evaluate("ref", mine, lambda _, c: c["logp"])

        def loss_of(index: int, columns: Any, kept: Any = kept) -> torch.Tensor:
            return ((columns["logp"] - 0.5 * kept[index]).square() + columns["value"].exp()).sum()

        backend.train("policy", mine, loss_of, columns=("logp", "value"))
        norms.append(backend.optimizer_step())
        backend.follow("ref", "policy", 0.5)
    return norms


def exported(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    """The tensors of all models by model and name; on rank 0."""
    return {
        f"{model}/{piece.name}": piece.tensor.clone()
        for model in ("policy", "critic", "ref")
        for piece in backend.export(model, gather=True)
    }


def run(rank: int, meeting: Meeting, model: Path, classifier: Path, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(rank, WORLD, meeting=meeting)
    backend = backend_of(model, classifier, ranks)
    norms = train(backend, rank, WORLD, range(2))
    tensors = exported(backend)
    backend.save(out)()
    ranks.barrier()
    norms += train(backend, rank, WORLD, range(2, 3))
    if ranks.first:
        save_file({**tensors, "norms": torch.tensor(norms, dtype=torch.float64)}, out / "found.safetensors")
    again = backend_of(model, classifier, ranks)
    again.load(out, {"policy": 2, "critic": 4, "ref": 2})
    assert train(again, rank, WORLD, range(2, 3)) == norms[6:]
    ranks.barrier()


if __name__ == "__main__":
    sys.exit(forked(WORLD, lambda rank, meeting: run(rank, meeting, *map(Path, sys.argv[1:]))))
