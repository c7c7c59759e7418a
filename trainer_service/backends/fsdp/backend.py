"""FSDP2: named models sharded over ranks, AdamW on the shards.

Promises: n ranks compute what one computes (losses are summed over ranks, never averaged); weights,
optimizer and random state come back from a checkpoint on any number of ranks; between two micro-batches a
rank holds gradients of its own shard alone, in fp32.

With `replicate` copies of the model, rank r has shard r mod (ranks / replicate), and gradients are summed
over the copies too. Copies are equal bit by bit: what is counted, written or given out is the first's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.base import TRAINED_MODEL, Columns, RankPlace, learning_rate
from trainer_service.backends.fsdp.head import open_window, packed_columns
from trainer_service.backends.fsdp.loading import load_sharded
from trainer_service.backends.fsdp.optimizer import MOMENTS, ShardedAdamW
from trainer_service.backends.fsdp.recompute import recompute_blocks
from trainer_service.backends.fsdp.shards import HostCopies, read_shard, shard_end, write_shard, write_tensors
from trainer_service.data.microbatch import MicroBatch
from trainer_service.disk import FileEntry
from trainer_service.errors import CheckpointError, DivergenceError, ModelError
from trainer_service.ranks import Ranks

T = TypeVar("T")


class FsdpBackend:
    """See `backends.base.TrainingBackend`. Models other than `policy` are frozen."""

    def __init__(
        self,
        models: Mapping[str, Path],
        optimizer: OptimizerSection,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        total_updates: int,
        recompute: str = "none",
        offload_optimizer: bool = False,
        replicate: int = 1,
        lora: LoraSection | None = None,
        seed: int = 0,
    ) -> None:
        """`models` maps names to Hugging Face directories and holds `policy`; `total_updates` is how many
        optimizer updates the whole run makes, for the learning rate's schedule. The other options are those
        of `Fsdp.Arguments`; with `lora` adapters are trained, whose first values come of `seed`. Raises
        `ModelError`."""
        if ranks.world % replicate:
            raise ModelError(
                f"trainer.backend_args.replicate: {replicate} copies of the model do not share {ranks.world} "
                "ranks evenly. Set it to a divisor of trainer.ranks."
            )
        self.place = RankPlace(ranks.rank, ranks.world)
        self._shards_count = ranks.world // replicate
        self._shard_rank = ranks.rank % self._shards_count
        self._first_copy = ranks.rank < self._shards_count
        if replicate > 1:
            grid = torch.arange(ranks.world).view(replicate, self._shards_count)
            ranks = replace(
                ranks, mesh=DeviceMesh(ranks.device.type, grid, mesh_dim_names=("replicate", "shard"))
            )
        self._ranks = ranks
        self._copies = HostCopies()
        self._settings = optimizer
        self._total_updates = total_updates
        self._dtype = dtype
        self._loaded = {
            name: load_sharded(folder, ranks, dtype, lora=lora if name == TRAINED_MODEL else None, seed=seed)
            for name, folder in models.items()
        }
        self._models = {name: loaded.module for name, loaded in self._loaded.items()}
        self.tied = self._loaded[TRAINED_MODEL].tied
        self.adapted = self._loaded[TRAINED_MODEL].adapted
        for name, model in self._models.items():
            if lora is None or name != TRAINED_MODEL:
                model.requires_grad_(name == TRAINED_MODEL)
            # The first forward of FSDP may move the local shards; the optimizer must see them after it.
            open_window(model, ranks.device)
        recompute_blocks(self._models[TRAINED_MODEL], recompute)
        trained = {
            name: parameter
            for name, parameter in self._models[TRAINED_MODEL].named_parameters()
            if parameter.requires_grad
        }
        self._shards = {name: nn.Parameter(_local(parameter)) for name, parameter in trained.items()}
        self._rows = {name: parameter.shape[0] for name, parameter in trained.items()}
        self._adamw = ShardedAdamW(self._shards, optimizer, offload=offload_optimizer)
        self.updates = 0

    @torch.no_grad()
    def evaluate(
        self,
        model: str,
        batches: Sequence[MicroBatch],
        fn: Callable[[int, Columns], T],
        *,
        columns: Sequence[str] = ("logp",),
    ) -> list[T]:
        found = self._models[model]
        return [fn(index, packed_columns(found, batch, columns)) for index, batch in enumerate(batches)]

    def train(
        self,
        batches: Sequence[MicroBatch],
        loss_of: Callable[[int, Columns], Tensor],
        *,
        columns: Sequence[str] = ("logp",),
    ) -> None:
        for index, batch in enumerate(batches):
            loss = loss_of(index, packed_columns(self._models[TRAINED_MODEL], batch, columns))
            # FSDP takes the mean over ranks; the objective is a sum over them.
            (loss * self._ranks.world).backward()

    def optimizer_step(self) -> float:
        parameters = dict(self._models[TRAINED_MODEL].named_parameters())
        gradients = []
        for name, shard in self._shards.items():
            gradient = parameters[name].grad
            shard.grad = None if gradient is None else _local(gradient)
            if shard.grad is not None:
                gradients.append(shard.grad)
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            raise DivergenceError(
                f"the gradient's norm is {norm} in optimizer update {self.updates}: training has diverged. "
                "Lower trainer.optimizer.lr, or start from an earlier checkpoint."
            )
        scale = min(1.0, self._settings.clip_grad_norm / (norm + 1e-6))
        if scale < 1:
            torch._foreach_mul_(gradients, scale)
        self._adamw.step(learning_rate(self._settings, self.updates, self._total_updates))
        for parameter in parameters.values():
            parameter.grad = None
        if not math.isfinite(size := self._norm([shard.detach() for shard in self._shards.values()])):
            raise DivergenceError(
                f"the norm of the weights is {size} after optimizer update {self.updates}: they are not "
                "published. Lower trainer.optimizer.lr, or start from an earlier checkpoint."
            )
        self.updates += 1
        return norm

    def _norm(self, parts: list[Tensor]) -> float:
        """2-norm over the shards of one copy, summed up in f64: on a CPU a sum of a million squares in f32 is
        off by 1e-5, and another number of ranks by another amount."""
        norms = torch._foreach_norm(parts, 2, torch.float64)
        squared = torch.stack(norms).square().sum().cpu() * self._first_copy
        self._ranks.sum(squared)
        return float(squared.sqrt())

    def export(self, model: str, *, gather: bool = False) -> Iterator[TensorPiece]:
        return self._loaded[model].pieces(self._ranks, self._dtype, gather=gather)

    def prepare_save(self) -> None:
        if self._first_copy:
            self._copies.prepare(dict.fromkeys((TRAINED_MODEL, *MOMENTS), self._shards))

    def save(self, folder: Path) -> Callable[[], Mapping[str, FileEntry]]:
        rank, shards_count = self._shard_rank, self._shards_count
        kinds: dict[str, Mapping[str, Tensor]] = {TRAINED_MODEL: self._shards, **self._adamw.moments()}
        copies = self._copies.fill(kinds if self._first_copy else {})
        random_state = torch.get_rng_state()

        def write() -> Mapping[str, FileEntry]:
            written = write_tensors(_rng_file(folder, self._ranks.rank), {"cpu": random_state}, {})
            for kind, values in copies.items():
                written |= write_shard(folder, kind, values, self._rows, rank, shards_count)
            return written

        return write

    def load(self, folder: Path, updates: int) -> None:
        kinds: dict[str, Mapping[str, Tensor]] = {TRAINED_MODEL: self._shards, **self._adamw.restart(updates)}
        for kind, values in kinds.items():
            read_shard(folder, kind, values, self._rows, self._shard_rank, self._shards_count)
        rank = self._ranks.rank
        if _rng_file(folder, rank).exists():
            try:
                torch.set_rng_state(load_file(_rng_file(folder, rank))["cpu"])
            except (KeyError, RuntimeError) as error:
                raise CheckpointError(f"checkpoint {folder}: the random state cannot be restored") from error
        self.updates = updates

    def reads(self, files: Collection[str]) -> Collection[str]:
        end = shard_end(self._shard_rank, self._shards_count)
        mine = {name for name in files if name.endswith(end)}
        if not mine:  # another number of ranks wrote them
            return files
        return mine | ({_rng_file(Path(), self._ranks.rank).name} & {*files})


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng-{rank:05d}.safetensors"
