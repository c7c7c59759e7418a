"""Two ranks that train rows with images: a script that forks them.

python images_process.py MODEL OUT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from areal_async.config.job import JobConfig, OptimizerSection
from areal_async.config.parallel import RankGrid
from areal_async.service.rank_group import Meeting
from areal_async.weights.pieces import whole_tensors
from tests.unit.trainer.image_rows import row_with, rows_of
from tests.unit.trainer.rank_process import job_of
from tests.unit.trainer.sharded_process import forked
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import MicroBatch, build_micro_batch, plan_passes
from trainer_service.ranks import Ranks, join_ranks

OF_GRADIENT = OptimizerSection(lr=1e8, eps=1e8, clip_grad_norm=1e8)
"""Settings with which AdamW subtracts the gradient itself from the weights, because `eps` is so large."""
CASES: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"vision": "trained", "recompute": "full"},
    "sequence": {"vision": "trained", "grid": RankGrid(sequence=2)},
}


def backend_of(folder: Path, ranks: Ranks, **options: Any) -> FsdpBackend:
    models = {"policy": ModelUse(folder, OF_GRADIENT, 10)}
    return FsdpBackend(models, ranks, **{"dtype": torch.float32, **options})


def lora_job(folder: Path, rank: int) -> JobConfig:
    return job_of(folder, folder / "run", lora={"rank": rank})


def batches_of(folder: Path, shares: Sequence[int]) -> list[MicroBatch]:
    """Return the micro-batches of these shares, three each. In the first, share 1 has rows without images;
    in the second, no share has images; in the third, share 0 has no rows."""
    rows, groups = rows_of(folder)
    ((*planted,),) = plan_passes(rows[:6], join_ranks(0, 1), 1 << 20, groups=groups)
    text = [row_with(folder, prompt) for prompt in ("1+2=", "34*5=", "7-7=")]
    by_share = {0: (planted, text[:1], []), 1: (text[1:2], text[2:], rows[7:])}
    return [build_micro_batch(chosen) for share in shares for chosen in by_share[share]]


def weights(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() for name, tensor in whole_tensors(backend.export("policy", gather=True)).items()
    }


def gradient_of(backend: FsdpBackend, batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Return the gradient of a loss by name, on rank 0."""
    before = weights(backend)
    backend.evaluate("policy", batches, lambda index, columns: None)

    def loss_of(index: int, columns: Any) -> torch.Tensor:
        slope = torch.cos(3.0 * batches[index].target)
        return (columns["logp"] * slope).sum()

    backend.train("policy", batches, loss_of)
    backend.optimizer_step()
    after = weights(backend)
    return {name: (before[name] - after[name]).contiguous() for name in before}


def run(rank: int, meeting: Meeting, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(rank, 2, meeting=meeting)
    for name, options in CASES.items():
        backend = backend_of(folder, ranks, **options)
        found = gradient_of(backend, batches_of(folder, (0, 1) if name == "sequence" else (rank,)))
        if ranks.first:
            save_file(found, out / f"{name}.safetensors")


if __name__ == "__main__":
    given = [Path(each) for each in sys.argv[1:]]
    sys.exit(forked(2, partial(run, folder=given[0], out=given[1])))
