"""Ranks of an FSDP back end that train on synthetic rows: a script that forks them, so that torch is loaded
once.

python sharded_process.py WORLD REPLICATE MODEL OUT
"""

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
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_async.config.job import OptimizerSection
from areal_async.config.parallel import RankGrid
from areal_async.runtime.group import Meeting
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.rows import row_of
from trainer_service.ranks import Ranks, join_ranks

OPTIMIZER = OptimizerSection(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5)
SHARES = 4
"""Shares of a step's rows, dealt to the ranks; with as many ranks, each runs an empty pass too."""


def shares(step: int) -> list[MicroBatch]:
    """The rows of `step` as micro-batches: of four, the last of step 0 has no rows."""
    rng = np.random.default_rng(step)
    made = []
    for share in range(SHARES):
        rows = []
        for episode in range(0 if (step, share) == (0, SHARES - 1) else 3):
            n = int(rng.integers(3, 20))
            mask = np.ones(n, np.uint8)
            mask[0] = 0
            ids = rng.integers(0, 17, n).astype(np.int32)
            rows.append(row_of(episode, ids, mask, np.zeros(n, np.float32), np.zeros(n, np.int32)))
        made.append(build_micro_batch([row for row in rows if row is not None]))
    return made


def backend_of(model: Path, ranks: Ranks, dtype: str = "float32", **options: Any) -> FsdpBackend:
    return FsdpBackend(
        {"policy": ModelUse(model, OPTIMIZER, 100)}, ranks, dtype=getattr(torch, dtype), **options
    )


def train(backend: FsdpBackend, rank: int, world: int, steps: range, *, before: Any = None) -> list[float]:
    """Gradient norms of `steps`; `before` is called with each loss but the first of a step, which is after
    the backward pass of the micro-batch before."""
    norms = []
    for step in steps:
        mine = shares(step)[rank::world] if world < SHARES else [shares(step)[rank], build_micro_batch([])]

        def loss_of(index: int, columns: Any) -> torch.Tensor:
            if index and before is not None:
                before()
            return (columns["logp"].square() + 0.1 * columns["entropy"]).sum()

        backend.train("policy", mine, loss_of, columns=("logp", "entropy"))
        norms.append(backend.optimizer_step())
    return norms


def unsharded_gradient_bytes(model: torch.nn.Module) -> int:
    """Bytes of gradients that FSDP holds beyond the rank's own shards. Asserts that there are those."""
    held = 0
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                gradients = [parameter.unsharded_accumulated_grad]
                if hasattr(parameter, "_unsharded_param"):
                    gradients.append(parameter._unsharded_param.grad)
                held += sum(g.numel() * g.element_size() for g in gradients if g is not None)
                own = parameter.sharded_param.grad
                assert isinstance(own, DTensor)
                assert own.to_local().dtype == torch.float32
                assert own.to_local().shape == parameter.sharded_param.to_local().shape
    return held


def run(rank: int, world: int, meeting: Meeting, replicate: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    ranks = join_ranks(rank, world, meeting=meeting)
    held: list[int] = []
    for dtype in ("bfloat16", "float32"):
        backend = backend_of(model, ranks, dtype, grid=RankGrid(data=replicate, shard=world // replicate))
        root = backend._models["policy"].module
        norms = train(
            backend, rank, world, range(2), before=lambda by=root: held.append(unsharded_gradient_bytes(by))
        )
    pieces = {piece.name: piece.tensor.clone() for piece in backend.export("policy", gather=True)}
    (out / "checkpoint").mkdir(exist_ok=True)
    backend.save(out / "checkpoint")()
    ranks.barrier()
    norms += train(backend, rank, world, range(2, 3))
    figures = {"norms": torch.tensor(norms), "held": torch.tensor(held, dtype=torch.int64)}
    save_file({**figures, **pieces}, out / f"rank{rank}.safetensors")
    # The checkpoint brings back what this rank was.
    again = backend_of(model, ranks, grid=RankGrid(data=replicate, shard=world // replicate))
    again.load(out / "checkpoint", {"policy": 2})
    assert train(again, rank, world, range(2, 3)) == norms[2:]
    ranks.barrier()


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


if __name__ == "__main__":
    size, copies, folder, results = sys.argv[1:]
    sys.exit(
        forked(
            int(size),
            lambda rank, met: run(rank, int(size), met, int(copies), Path(folder), Path(results)),
        )
    )
