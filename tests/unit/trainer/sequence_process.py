"""Ranks that share models, rows and tokens of rows: a script that forks them, first two, then four, and what
one rank computes of the same rows.

python sequence_process.py MODELS OUT
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.config.parallel import RankGrid
from areal_async.service.rank_group import Meeting
from tests import flash_cpu
from tests.unit.trainer.conftest import plain_row
from tests.unit.trainer.sharded_process import forked
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import attention
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data import prefixes
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.rows import TrainingRow
from trainer_service.errors import ModelError
from trainer_service.ranks import Ranks, join_ranks

VOCABULARY = 17
LEARNING = OptimizerSection(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5, eps=1e-2)
"""With an `eps` that keeps AdamW from making much of gradients that are 0 but for rounding."""
WHY_NOT_RAGGED = attention.why_not_ragged
COLUMNS = ("logp", "entropy", "greedy")


@dataclass(frozen=True)
class Case:
    """A way to share the model in the folder `model` and its rows."""

    model: str
    sequence: int = 1
    shard: int = 1
    data: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    with_values: bool = False
    """Whether there are a value head, a critic and a reference that follows the policy."""
    routed: bool = False
    """Whether the tokens of its one layer of four experts go where an engine sent them."""

    ragged: bool = False
    """Whether several ranks compute attention in one call for all rows. One rank computes exact attention."""

    @property
    def grid(self) -> RankGrid:
        return RankGrid(data=self.data, shard=self.shard, sequence=self.sequence)

    @property
    def ranks(self) -> int:
        return self.sequence * self.shard * self.data

    @property
    def shares(self) -> range:
        """Shares of a step's rows, dealt to the ranks that do not share them."""
        return range(max(2, self.grid.data_ranks))


CASES = {
    "models": Case("heads", shard=2, with_values=True),
    "copies": Case("heads", shard=2, data=2),
    "heads": Case("heads", 2, with_values=True, options={"recompute": "selective"}),
    "repeated": Case("repeated", 2, options={"recompute": "full"}),
    "experts": Case("experts", 2, options={"offload_optimizer": True}),
    "routes": Case("experts", 2, options={"recompute": "full"}, routed=True),
    "shards": Case("heads", 2, shard=2),
    "adapters": Case("repeated", 2, data=2, options={"lora": LoraSection(rank=2, alpha=4.0)}),
    "four": Case("heads", 4),
    "window": Case("window", 2),
    "ragged": Case("window", 2, ragged=True),
}
MODELS: dict[str, dict[str, Any]] = {
    "heads": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "repeated": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "window": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "experts": {"num_attention_heads": 4, "num_key_value_heads": 4},
}


def _row(rng: Any, episode: int, ids: np.ndarray, sampled: int) -> TrainingRow:
    at = rng.choice(np.array([0.7, 1.0], np.float32), len(ids))
    return plain_row(ids, slice(-sampled, None), episode=episode, temperature=at, feeds_last=True)


def share_of(step: int, share: int) -> list[MicroBatch]:
    """Three micro-batches: trees of rows with common beginnings, a small one and one that is attended branch
    by branch; rows of uneven lengths, the longest sampled to its end; and of the first share one without
    rows, of the second one of two tokens."""
    rng = np.random.default_rng([step, share])

    def ids(n: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, n).astype(np.int32)

    trees = []
    for group, length in enumerate((5, 23)):
        trunk = ids(length)
        turn = np.concatenate([trunk, ids(length)])
        for episode, begun in enumerate((trunk, turn, turn)):
            trees.append(
                _row(rng, 3 * group + episode, np.concatenate([begun, ids(4 + episode)]), 4 + episode)
            )
    groups = np.repeat(np.arange(2), 3)
    planted = prefixes.plant(trees, groups, 1 << 20, prefixes.RowCost(1, 0, 0))
    planted.sort(key=lambda tree: -tree.n_tokens)
    assert [len(tree.rows) for tree in planted] == [3, 3]
    uneven = [
        _row(rng, episode, ids(n), k) for episode, (n, k) in enumerate([(37, 36), (9, 2), (9, 2), (4, 1)])
    ]
    return [
        build_micro_batch([row for tree in planted for row in tree.rows]),
        build_micro_batch(uneven),
        build_micro_batch([_row(rng, 0, ids(2), 1)] if share else []),
    ]


def batches_of(case: Case, step: int, shares: Sequence[int]) -> list[MicroBatch]:
    """The micro-batches of these shares, some of whose tokens have no route, and some one expert alone."""
    found = [batch for share in shares for batch in share_of(step, share)]
    if not case.routed:
        return found
    rng = np.random.default_rng(step)
    routed = []
    for batch in found:
        routes = rng.permuted(np.tile(np.arange(4), (1, batch.n_tokens, 1)), axis=-1)[:, :, :2]
        routes[:, ::3, 1] = -1
        routes[:, ::7] = -1
        routed.append(replace(batch, routes=torch.from_numpy(routes.astype(np.int16))))
    return routed


def backend_of(case: Case, models: Path, ranks: Ranks, grid: RankGrid | None) -> FsdpBackend:
    attention.why_not_ragged = (lambda *_: "") if case.ragged and ranks.world > 1 else WHY_NOT_RAGGED
    uses = {"policy": ModelUse(models / case.model, LEARNING, 100)}
    if case.with_values:
        uses["policy"] = ModelUse(models / case.model, LEARNING, 100, "both")
        uses["critic"] = ModelUse(models / case.model, LEARNING, 100, "value")
        uses["ref"] = ModelUse(models / case.model, follows=True)
    return FsdpBackend(uses, ranks, grid=grid, **{"dtype": torch.float32} | case.options)


def trained(backend: FsdpBackend, case: Case, steps: range, batches_of: Callable) -> dict[str, torch.Tensor]:
    """What this rank knows of `steps`: columns before the first, where it owns some, and norms. The loss must
    be called once for each micro-batch where they are owned."""
    found: dict[str, torch.Tensor] = {}
    owns = backend.place.owns
    for step in steps:
        batches = batches_of(step)
        called: list[int] = []
        reference = "ref" if case.with_values else "policy"
        kept = backend.evaluate(reference, batches, lambda index, columns: columns["logp"].detach().clone())

        def loss_of(
            index: int, columns: Any, by: list = batches, calls: list = called, kept: list = kept
        ) -> torch.Tensor:
            calls.append(index)
            if index and case.sequence == 1:  # the backward pass of the micro-batch before is over
                assert unsharded_gradient_bytes(backend._models["policy"].module) == 0
            slope = torch.cos(3.0 * by[index].episode + by[index].target)
            loss = ((columns["logp"] - 0.5 * kept[index]) * slope).sum()
            if "entropy" in columns:
                loss = loss + 0.1 * columns["entropy"].sum()
            if "value" in columns:
                loss = loss + (columns["value"] - slope).square().sum()
            return loss

        def score_loss_of(index: int, columns: Any, by: list = batches) -> torch.Tensor:
            return (columns["score"] - by[index].target.float()).square().sum()

        for model, names in (("policy", COLUMNS), ("critic", ("value", "score"))):
            if step == 0 and (model == "policy" or case.with_values):
                columns = backend.evaluate(model, batches, lambda index, of: of, columns=names)
                assert len(columns) == len(batches) * owns
                for name in names if owns else ():
                    found[f"{step}.{name}"] = torch.cat([each[name] for each in columns]).float()
        trained_columns = ("logp", "entropy", "value") if case.with_values else ("logp", "entropy")
        backend.train("policy", batches, loss_of, columns=trained_columns)
        assert called == [*range(len(batches))] * owns
        norms = [backend.optimizer_step()]
        if case.with_values:
            backend.train("critic", batches, score_loss_of, columns=("score",))
            norms.append(backend.optimizer_step("critic"))
            backend.follow("ref", "policy", 0.5)
        found[f"{step}.norms"] = torch.tensor(norms)
    return found


def unsharded_gradient_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of gradients that FSDP holds beyond the rank's own shards, which must be in fp32."""
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


def weights_of(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {
        f"{model}/{piece.name}": piece.tensor.clone()
        for model in backend.updates
        for piece in backend.export(model, gather=True)
    }


def alone(case: Case, models: Path) -> dict[str, torch.Tensor]:
    """What one rank computes in two steps, and the weights after the first."""
    small_tiles()
    torch.manual_seed(0)
    backend = backend_of(case, models, join_ranks(0, 1), None)

    def both(step: int) -> list[MicroBatch]:
        return batches_of(case, step, case.shares)

    found = trained(backend, case, range(1), both) | weights_of(backend)
    return found | trained(backend, case, range(1, 2), both)


def small_tiles() -> None:
    """Treat short rows as large trees."""
    prefixes.DENSE_TOKENS, prefixes.LEAST_BRANCH = 24, 4


def refused(models: Path, ranks: Ranks) -> None:
    """A model in which tokens look at their neighbours is refused on every rank, whatever its file says."""
    plain = Qwen2MLP.forward
    Qwen2MLP.forward = lambda self, x: plain(self, x + x.roll(1, 1))
    try:
        with pytest.raises(ModelError, match="the log-probs of packed rows are not those"):
            backend_of(CASES["repeated"], models, ranks, RankGrid(sequence=ranks.world))
    finally:
        Qwen2MLP.forward = plain


def run(rank: int, world: int, meeting: Meeting, models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(rank, world, meeting=meeting)
    if world == 2:
        refused(models, ranks)
    for name, case in CASES.items():
        if case.ranks != world:
            continue
        grid = case.grid
        backend = backend_of(case, models, ranks, grid)
        share, place = divmod(rank, case.sequence)  # ranks that share rows follow each other
        assert (backend.place.data_rank, backend.place.data_ranks) == (share, grid.data_ranks)
        assert backend.place.owns == (place == 0)

        shares = (share,) if grid.data_ranks > 1 else case.shares
        mine = partial(batches_of, case, shares=shares)

        if name == "copies":  # their gradients are added up in fp32 too where bfloat16 is computed in
            half = replace(case, options={"dtype": torch.bfloat16})
            trained(backend_of(half, models, ranks, grid), half, range(1), mine)
        found = trained(backend, case, range(1), mine) | weights_of(backend)
        folder = out / name
        folder.mkdir(exist_ok=True)
        backend.save(folder)()
        ranks.barrier()
        if rank % 2:  # what a checkpoint brings back is what this rank was
            backend.load(folder, backend.updates)
        found |= trained(backend, case, range(1, 2), mine)
        save_file({name: t.contiguous() for name, t in found.items()}, folder / f"rank{rank}.safetensors")
        ranks.barrier()


if __name__ == "__main__":
    small_tiles()
    folder, results = map(Path, sys.argv[1:])
    with flash_cpu.installed():
        for size in (2, 4):
            if forked(size, lambda rank, met, n=size: run(rank, n, met, folder, results)):
                sys.exit(1)
