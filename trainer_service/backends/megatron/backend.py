"""Megatron-Core back end: named models on tensor, pipeline, expert and data ranks, AdamW with distributed
state.

Guarantees: a grid computes the same as one rank, because losses are summed over data ranks and never
averaged. A checkpoint restores weights, optimizer and random state on any grid. No rank ever has more of a
tensor than its own part, neither in loading nor in training nor in an export.

The order of ranks is Megatron's: tensor ranks are consecutive, then data ranks, then stages. All ranks of a
share read its rows. The first tensor rank of the last stage owns the columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state, tensor_parallel

from areal_async.config.parallel import RankGrid
from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.base import (
    LOGP,
    TRAINED_MODEL,
    Batches,
    LossOf,
    ModelUse,
    Names,
    OfColumns,
    RankPlace,
)
from trainer_service.backends.common import NamedModels, require_grid
from trainer_service.backends.fsdp.shards import HostCopies
from trainer_service.backends.megatron.config import MegatronOptions
from trainer_service.backends.megatron.passes import owns_columns
from trainer_service.backends.megatron.rank_model import MegatronModel
from trainer_service.errors import ModelError
from trainer_service.publishing.handover import receive_piece, send_tensor
from trainer_service.publishing.writing import describe
from trainer_service.ranks import Ranks

T = TypeVar("T")


class MegatronBackend(NamedModels[MegatronModel]):
    """Back end on Megatron-Core. See `backends.base.TrainingBackend` for the methods."""

    adapted: Sequence[str] = ()

    def __init__(self, models: Mapping[str, ModelUse], ranks: Ranks, **options: Any) -> None:
        """`options` are the fields of `MegatronOptions`. Raises `ModelError`."""
        self._options = MegatronOptions(**options)
        grid = self._options.grid
        require_grid(grid, ranks)
        _initialize(grid, self._options.virtual_stages, ranks)
        self.place = RankPlace(
            parallel_state.get_data_parallel_rank(), grid.data_ranks, reads=True, owns=owns_columns()
        )
        self._ranks, self._copies = ranks, HostCopies()
        self._models = {name: MegatronModel(name, use, ranks, self._options) for name, use in models.items()}
        policy = self._models.get(TRAINED_MODEL)
        tied = policy is not None and policy.stages.dimensions.tied and models[TRAINED_MODEL].head != "value"
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def evaluate(self, model: str, batches: Batches, fn: OfColumns[T], *, columns: Names = LOGP) -> list[T]:
        return self._models[model].passes.evaluate(batches, fn, columns)

    def train(self, model: str, batches: Batches, loss_of: LossOf, *, columns: Names = LOGP) -> None:
        self._models[model].passes.train(batches, loss_of, columns)

    def export(self, model: str, *, gather: bool = False, whole: bool = True) -> Iterator[TensorPiece]:
        if gather and self._ranks.world > 1:
            return self._gathered(self._models[model])
        return self._models[model].pieces(self._options.dtype)

    def _gathered(self, model: MegatronModel) -> Iterator[TensorPiece]:
        """Yield all ranks' pieces on rank 0, rank by rank. Each piece is received when it is requested."""
        side = self._ranks.side()
        held = describe(side, model.pieces(self._options.dtype), frozenset())
        for piece in model.pieces(self._options.dtype):
            if self._ranks.first:
                yield piece
            else:
                send_tensor(side, piece.tensor.cpu(), to=0)
        for rank in range(1, self._ranks.world) if self._ranks.first else ():
            for box in held[rank]:
                yield receive_piece(side, box, rank)

    def reads(self, files: Collection[str]) -> Collection[str]:
        return files


def _initialize(grid: RankGrid, virtual_stages: int, ranks: Ranks) -> None:
    """Create Megatron-Core's process groups, which are global to the process. Raises `ModelError` if they
    exist for another grid."""
    sizes = (grid.tensor, grid.pipeline, grid.expert, virtual_stages)
    if parallel_state.is_initialized():
        if _initialized != [sizes]:
            raise ModelError("Megatron-Core has one grid of ranks in a process, and that has another already")
        return
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=virtual_stages if virtual_stages > 1 else None,
        expert_model_parallel_size=grid.expert,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(ranks.timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    _initialized[:] = [sizes]


_initialized: list[tuple[int, ...]] = []
