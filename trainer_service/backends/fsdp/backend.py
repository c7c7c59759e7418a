"""FSDP2 back end: named models sharded over ranks, with AdamW on the shards.

Guarantees: n ranks compute the same as one rank, because losses are summed over ranks and never averaged. A
checkpoint restores weights, optimizer and random state on any number of ranks. Between two micro-batches a
rank holds gradients only of its own shard, in fp32.

With several copies of the model (`data`), each copy is on consecutive ranks, and gradients are also summed
over copies. All copies are equal bit for bit, so norms, checkpoints and publications use only the first copy.

With `sequence`, a row is cut into parts, one for each of several neighbouring ranks (`sequence.py`). Each of
these ranks also has its own shard of the weights: a copy is distributed over `shard` x `sequence` ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from areal_async.config.parallel import RankGrid
from areal_async.weights.parking import ParkingPlace
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
from trainer_service.backends.common import (
    NamedModels,
    random_state_file,
    require_grid,
)
from trainer_service.backends.fsdp.forward import packed_columns
from trainer_service.backends.fsdp.model import FsdpOptions, HeldModel
from trainer_service.backends.fsdp.sequence import SequenceRanks
from trainer_service.backends.fsdp.shards import HostCopies, shard_end
from trainer_service.backends.shared_loss import shared_loss
from trainer_service.ranks import Ranks

T = TypeVar("T")


class FsdpBackend(NamedModels[HeldModel]):
    """Back end on FSDP2. See `backends.base.TrainingBackend` for the methods."""

    def __init__(
        self, models: Mapping[str, ModelUse], ranks: Ranks, *, grid: RankGrid | None = None, **options: Any
    ) -> None:
        """`options` are the fields of `FsdpOptions`. `grid` has the axes `data`, `shard` and `sequence`, for
        all models. Raises `ModelError`."""
        grid = grid or RankGrid(shard=ranks.world)
        require_grid(grid, ranks)
        replicate = grid.data
        shared = SequenceRanks.of(ranks, grid.sequence) if grid.sequence > 1 else None
        self.place = RankPlace(
            ranks.rank // grid.sequence, grid.data_ranks, owns=shared is None or shared.index == 0
        )
        self._shards_count = ranks.world // replicate
        self._shard_rank = ranks.rank % self._shards_count
        if replicate > 1:
            numbers = torch.arange(ranks.world).view(replicate, self._shards_count)
            ranks = replace(
                ranks, mesh=DeviceMesh(ranks.device.type, numbers, mesh_dim_names=("data", "shard"))
            )
        self._ranks = ranks
        self._copies, self._parking = HostCopies(), ParkingPlace()
        self._options = FsdpOptions(**options)
        self._models = {
            name: HeldModel(name, use, ranks, self._options, shards_count=self._shards_count, shared=shared)
            for name, use in models.items()
        }
        self.side_by_side = any(model.side_by_side for model in self._models.values())
        policy = self._models.get(TRAINED_MODEL)
        self.tied = policy.loaded.tied if policy is not None else {}
        self.adapted = policy.loaded.adapted if policy is not None else ()

    @torch.no_grad()
    def evaluate(self, model: str, batches: Batches, fn: OfColumns[T], *, columns: Names = LOGP) -> list[T]:
        of, found = self._models[model], []
        of.module.eval()  # Compute log-probs without dropout.
        for index, batch in enumerate(of.ready(batches)):
            with of.routed(batch):
                given = packed_columns(of.module, batch, columns, of.sequence)
                if self.place.owns:
                    found.append(fn(index, given))
        return found

    def train(self, model: str, batches: Batches, loss_of: LossOf, *, columns: Names = LOGP) -> None:
        of, rank = self._models[model], self._ranks.rank
        group, owner = (of.sequence.group, of.sequence.owner) if of.sequence is not None else (None, rank)
        of.module.train()
        for index, batch in enumerate(of.ready(batches)):
            with of.routed(batch):
                given = packed_columns(of.module, batch, columns, of.sequence)
                loss = shared_loss(given, partial(loss_of, index), group=group, owner=owner)
                # FSDP averages over ranks, but the objective is a sum over ranks.
                (loss * self._ranks.world).backward()

    def export(self, model: str, *, gather: bool = False, whole: bool = True) -> Iterator[TensorPiece]:
        loaded, dtype = self._models[model].loaded, self._options.dtype
        return loaded.pieces(self._ranks, dtype, gather=gather, whole=whole)

    def sleep(self) -> int:
        return self._parking.leave(each for model in self._models.values() for each in model.on_device())

    def wake(self) -> None:
        self._parking.come_back()

    def reads(self, files: Collection[str]) -> Collection[str]:
        end = shard_end(self._shard_rank, self._shards_count)
        mine = {name for name in files if name.endswith(end)}
        if not mine:  # another number of ranks wrote them
            return files
        return mine | ({random_state_file(self._ranks.rank)} & {*files})
