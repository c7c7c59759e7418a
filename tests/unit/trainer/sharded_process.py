"""Synthetic steps for an FSDP back end, and forks that are its ranks."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_async.config.job import OptimizerSection
from areal_async.service.rank_group import Meeting
from tests.unit.trainer.conftest import plain_row
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.ranks import Ranks

OPTIMIZER = OptimizerSection(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5)
SHARES = 4


def shares(step: int) -> list[MicroBatch]:
    """Return the rows of `step` as four micro-batches, of which the last of step 0 has no rows."""
    rng = np.random.default_rng(step)
    made = []
    for share in range(SHARES):
        rows = []
        for episode in range(0 if (step, share) == (0, SHARES - 1) else 3):
            n = int(rng.integers(3, 20))
            rows.append(plain_row(rng.integers(0, 17, n), slice(1, None), episode=episode))
        made.append(build_micro_batch(rows))
    return made


def backend_of(model: Path, ranks: Ranks, dtype: str = "float32", **options: Any) -> FsdpBackend:
    return FsdpBackend(
        {"policy": ModelUse(model, OPTIMIZER, 100)}, ranks, dtype=getattr(torch, dtype), **options
    )


def loss_of(index: int, columns: Any) -> torch.Tensor:
    return (columns["logp"].square() + 0.1 * columns["entropy"]).sum()


def train(backend: FsdpBackend, steps: range) -> list[float]:
    """Return the gradient norms of `steps`, as one rank."""
    norms = []
    for step in steps:
        backend.train("policy", shares(step), loss_of, columns=("logp", "entropy"))
        norms.append(backend.optimizer_step())
    return norms


def forked(world: int, run: Callable[[int, Meeting], None]) -> int:
    """Run `run(rank, meeting)` in a process for each rank; the worst of their exit statuses."""
    listening, children = socket.create_server(("127.0.0.1", 0)), []
    host, port = listening.getsockname()
    for number in range(world):
        if child := os.fork():
            children.append(child)
            continue
        status = 1
        try:
            run(number, Meeting(host, port, None if number else listening.fileno()))
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)
