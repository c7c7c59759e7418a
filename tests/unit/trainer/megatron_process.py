"""Ranks of Megatron-Core back ends that train on synthetic rows, on a CPU: a script that forks them.

python megatron_process.py WORLD OUT GRIDS…

A grid is JSON: `model` (a folder), `sizes`, `options` of the back end, `from` (the checkpoint that it goes on
from), `routes` (the number of layers that replay some) and `thd` (a stand-in of the kernel for packed rows).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from areal_async.config.parallel import RankGrid
from areal_async.service.rank_group import Meeting
from areal_async.weights.pieces import TensorPiece
from tests.megatron_cpu import install
from tests.unit.trainer.conftest import plain_row
from tests.unit.trainer.sharded_process import OPTIMIZER, forked
from trainer_service.backends.base import ModelUse, TrainingBackend
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.prefixes import plant
from trainer_service.data.rows import TrainingRow
from trainer_service.ranks import join_ranks

SHARES, STEPS = 4, 2
COLUMNS = ("logp", "entropy", "value")
POLICY = OPTIMIZER.model_copy(update={"lr": 1e-3})
"""AdamW steps by the rate also where a gradient is all rounding: by 0.01, one of 2,048 elements of a matrix
was 3e-4 apart after two steps of equal norms."""
CRITIC = OPTIMIZER.model_copy(update={"lr": 3e-3})


def rows_of(step: int, share: int) -> list[TrainingRow]:
    """Rows of two episodes that begin alike, of one that does not, and in the last share of step 0 none."""
    rng = np.random.default_rng(10 * step + share)
    prefix = rng.integers(0, 17, 9)
    found = []
    for episode in range(0 if (step, share) == (0, SHARES - 1) else 4):
        ids = rng.integers(0, 17, int(rng.integers(12, 24)))
        if episode < 3 and share < SHARES - 1:
            ids[: len(prefix) - episode] = prefix[: len(prefix) - episode]
        found.append(plain_row(ids, slice(len(prefix), None), episode=episode))
    return found


def shares(step: int, layers: int = 0) -> list[MicroBatch]:
    """The micro-batches of a step, in all but the last with rows that share what they begin with; with
    `layers` of a mixture with routes for most of their tokens, some of them of fewer experts than two."""
    groups = np.array([0, 0, 0, 1])
    found = [
        build_micro_batch([row for tree in plant(rows_of(step, share), groups, 400) for row in tree.rows])
        for share in range(SHARES)
    ]
    return [replace(each, routes=routes_of(each, layers, step)) for each in found] if layers else found


def routes_of(batch: MicroBatch, layers: int, seed: int) -> torch.Tensor:
    """[layers, T, 2] of eight experts."""
    rng = np.random.default_rng(seed)
    routes = rng.permuted(np.tile(np.arange(8), (layers, batch.n_tokens, 1)), axis=-1)[:, :, :2]
    routes[:, ::3, 1] = -1
    routes[:, ::7] = -1
    return torch.from_numpy(routes.astype(np.int16))


def models_of(model: Path) -> dict[str, ModelUse]:
    return {
        "policy": ModelUse(model, POLICY, 100, head="both"),
        "critic": ModelUse(model, CRITIC, 100, head="value"),
        "ref": ModelUse(model, follows=True),
    }


def loss_of(columns: Any, kept: torch.Tensor) -> torch.Tensor:
    """Of all columns, each with a gradient of its own."""
    logp, entropy, value = (columns[name] for name in COLUMNS)
    return ((logp - 0.5 * kept).square() + 0.1 * entropy + (value - 1).square()).sum()


def trained(backend: TrainingBackend, steps: range, layers: int = 0) -> dict[str, list[float]]:
    """Norms of `steps` and, on the rank that owns them, losses and columns."""
    found: dict[str, list[float]] = {"norms": [], "losses": [], "columns": []}
    place = backend.place
    for step in steps:
        mine = shares(step, layers)[place.data_rank :: place.data_ranks]
        kept = backend.evaluate("ref", mine, lambda _, c: c["logp"].clone())

        def of_policy(index: int, columns: Any, kept: Any = kept) -> torch.Tensor:
            loss = loss_of(columns, kept[index])
            found["losses"].append(float(loss.detach()))
            return loss

        backend.train("policy", mine, of_policy, columns=COLUMNS)
        backend.train("critic", mine, lambda _, c: (c["value"] - 2).square().sum(), columns=("value",))
        found["norms"] += [backend.optimizer_step(), backend.optimizer_step("critic")]
        backend.follow("ref", "policy", 0.5)
        told = backend.evaluate(
            "policy",
            mine,
            lambda _, c: [float(c[n].sum()) for n in ("logp", "greedy")],
            columns=("logp", "greedy"),
        )
        found["columns"] += [number for each in told for number in each]
    return found


def held_by(backend: Any) -> int:
    """Bytes that a rank keeps between steps: parameters, gradients, main copies, moments, averages."""
    tensors: list[torch.Tensor] = []
    for model in backend._models.values():
        for one in model.stages.parameters():
            tensors += [one.tensor.data, getattr(one.tensor, "main_grad", one.tensor.data)]
        tensors += [tensor for kind in model.state.values() for tensor in kind.values()]
        tensors += model._followed.values()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def whole(pieces: Sequence[TensorPiece] | Any) -> dict[str, torch.Tensor]:
    """The tensors of which all boxes are there; another box of one again is an error."""
    found: dict[str, torch.Tensor] = {}
    for piece in pieces:
        tensor = found.setdefault(piece.name, torch.full(piece.shape, torch.nan))
        assert tensor[piece.box].isnan().all(), f"{piece.name} has a box twice"
        tensor[piece.box] = piece.tensor
    assert not any(tensor.isnan().any() for tensor in found.values()), "a box is not there"
    return found


class Varlen(torch.nn.Module):
    """What Transformer Engine's kernel computes of packed rows, which needs CUDA."""

    def __init__(self, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: Any, k: Any, v: Any, _: Any, *, attn_mask_type: Any, packed_seq_params: Any) -> Any:
        assert (attn_mask_type.name, packed_seq_params.qkv_format) == ("padding_causal", "thd")
        ends = packed_seq_params.cu_seqlens_q.tolist()
        assert max(b - a for a, b in pairwise(ends)) == packed_seq_params.max_seqlen_q
        found = []
        for a, b in pairwise(ends):
            one = (each[a:b].transpose(0, 1)[None] for each in (q, k, v))
            attend = torch.nn.functional.scaled_dot_product_attention
            out = attend(*one, is_causal=True, scale=self.scale, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
        return torch.cat(found).flatten(1)


def run(rank: int, world: int, meeting: Meeting, out: Path, grids: Sequence[dict[str, Any]]) -> None:
    from megatron.core import parallel_state

    from trainer_service.backends.megatron.backend import MegatronBackend
    from trainer_service.backends.megatron.layers import PackedCoreAttention

    torch.set_num_threads(1)
    ranks = join_ranks(rank, world, meeting=meeting)
    for number, asked in enumerate(grids):
        model, options = Path(asked["model"]), asked.get("options", {})
        grid = RankGrid(**asked.get("sizes", {}))
        made = {"dtype": torch.float32, "grid": grid, **options}
        PackedCoreAttention.kernel = Varlen if asked.get("thd") else None
        backend = MegatronBackend(models_of(model), ranks, **made)
        checkpoint = out / f"checkpoint-{number}"
        if from_ := asked.get("from"):
            backend.load(Path(from_), {"policy": STEPS, "critic": STEPS, "ref": STEPS})
        first = 0 if not from_ else STEPS
        told = trained(backend, range(first, STEPS), asked.get("routes", 0))
        weights = whole(backend.export("policy", gather=True)) if first == 0 else {}
        if rank == 0:
            checkpoint.mkdir(exist_ok=True)
        ranks.barrier()
        backend.prepare_save()
        backend.save(checkpoint)()
        after = trained(backend, range(STEPS, STEPS + 1), asked.get("routes", 0)) | {"held": held_by(backend)}
        (out / f"told-{number}-{rank}.json").write_text(json.dumps([told, after]))
        if rank == 0:
            save_file(weights, out / f"weights-{number}.safetensors")
        ranks.barrier()
        parallel_state.destroy_model_parallel()
    ranks.leave()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    size, results, *texts = sys.argv[1:]
    install()
    from trainer_service.backends.megatron import backend as _  # noqa: F401 - before the fork

    asked_of = [json.loads(text) for text in texts]
    sys.exit(forked(int(size), lambda rank, met: run(rank, int(size), met, Path(results), asked_of)))
