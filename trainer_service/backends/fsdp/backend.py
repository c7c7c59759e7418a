"""FSDP2: named models sharded over ranks, AdamW on the shards.

Promises: n ranks compute what one computes (losses are summed over ranks, never averaged); weights,
optimizer and random state come back from a checkpoint on any number of ranks.

AdamW is elementwise, so it runs on each rank's plain local shard instead of on DTensors: the same numbers
without a dispatch through DTensor for every one of its operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_async.config.job import OptimizerSection
from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.base import TRAINED_MODEL, Columns, RankPlace, learning_rate
from trainer_service.backends.fsdp.loading import load_sharded, tied_names
from trainer_service.backends.fsdp.shards import read_shard, write_shard
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.errors import CheckpointError, DivergenceError
from trainer_service.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
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
    ) -> None:
        """`models` maps names to Hugging Face directories and holds `policy`; `total_updates` is how many
        optimizer updates the whole run makes, for the learning rate's schedule. Raises `ModelError`."""
        self.place = RankPlace(ranks.rank, ranks.world)
        self._ranks = ranks
        self._settings = optimizer
        self._total_updates = total_updates
        self._dtype = dtype
        self._models = {name: load_sharded(folder, ranks, dtype) for name, folder in models.items()}
        self.tied = tied_names(self._models[TRAINED_MODEL])
        for name, model in self._models.items():
            model.requires_grad_(name == TRAINED_MODEL)
            # The first forward of FSDP may move the local shards; the optimizer must see them after it.
            self.evaluate(name, [build_micro_batch([], device=ranks.device)], lambda index, columns: None)
        self._shards = {
            name: nn.Parameter(_local(parameter))
            for name, parameter in self._models[TRAINED_MODEL].named_parameters()
        }
        self._rows = {name: p.shape[0] for name, p in self._models[TRAINED_MODEL].named_parameters()}
        self._adamw = torch.optim.AdamW(
            self._shards.values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
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
        return [fn(index, self._columns(model, batch, columns)) for index, batch in enumerate(batches)]

    def train(
        self,
        batches: Sequence[MicroBatch],
        loss_of: Callable[[int, Columns], Tensor],
        *,
        columns: Sequence[str] = ("logp",),
    ) -> None:
        root = self._models[TRAINED_MODEL]
        assert isinstance(root, FSDPModule)
        for index, batch in enumerate(batches):
            root.set_requires_gradient_sync(index + 1 == len(batches))
            loss = loss_of(index, self._columns(TRAINED_MODEL, batch, columns))
            # FSDP takes the mean over ranks; the objective is a sum over them.
            (loss * self._ranks.world).backward()

    def _columns(self, model: str, batch: MicroBatch, names: Sequence[str]) -> Columns:
        logits = self._logits(model, batch)
        scaled = logits / batch.temperature[:, None]
        found: dict[str, Tensor] = {}
        for name in names:
            if name == "logp":
                found[name] = -F.cross_entropy(scaled, batch.target, reduction="none")
            elif name == "entropy":
                logp = scaled.log_softmax(-1)
                found[name] = -(logp.exp() * logp).sum(-1)
            elif name == "greedy":
                found[name] = logits.argmax(-1) == batch.target
            else:
                raise ValueError(f"a back end has no column {name!r}")
        return found

    def _logits(self, model: str, batch: MicroBatch) -> Tensor:
        """f32 [S, V]. With a cache, transformers would take the pack for one sequence: it must be off."""
        out = self._models[model](
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            packed_runs=batch.runs,
            logits_to_keep=batch.predict,
        )
        logits: Tensor = out.logits[0].float()
        return logits

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
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self._settings, self.updates, self._total_updates)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
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
        """2-norm over all ranks."""
        norms = torch._foreach_norm(parts)
        squared = torch.stack(norms).double().square().sum().cpu()
        self._ranks.sum(squared)
        return float(squared.sqrt())

    @torch.no_grad()
    def export(self, model: str) -> Iterator[TensorPiece]:
        for name, parameter in self._models[model].named_parameters():
            assert isinstance(parameter, DTensor)
            whole = _local(parameter) if self._ranks.world == 1 else parameter.full_tensor()
            if self._ranks.first:
                shape = tuple(whole.shape)
                yield TensorPiece(name, shape, (0,) * len(shape), whole.detach().to(self._dtype))

    def save(self, folder: Path) -> Callable[[], None]:
        rank, world = self._ranks.rank, self._ranks.world
        kinds: dict[str, Mapping[str, Tensor]] = {TRAINED_MODEL: self._shards}
        if self.updates:
            for moment in MOMENTS:
                kinds[moment] = {
                    name: self._adamw.state[shard][moment] for name, shard in self._shards.items()
                }
        copies = {
            kind: {name: value.detach().to("cpu", copy=True) for name, value in values.items()}
            for kind, values in kinds.items()
        }
        random_state = torch.get_rng_state()

        def write() -> None:
            for kind, values in copies.items():
                write_shard(folder, kind, values, self._rows, rank, world)
            save_file({"cpu": random_state}, _rng_file(folder, rank))

        return write

    def load(self, folder: Path, updates: int) -> None:
        rank, world = self._ranks.rank, self._ranks.world
        read_shard(folder, TRAINED_MODEL, self._shards, self._rows, rank, world)
        self._adamw.state.clear()
        if updates:
            for shard in self._shards.values():
                state = {moment: torch.zeros_like(shard, requires_grad=False) for moment in MOMENTS}
                self._adamw.state[shard] = {"step": torch.tensor(float(updates)), **state}
            for moment in MOMENTS:
                values = {name: self._adamw.state[shard][moment] for name, shard in self._shards.items()}
                read_shard(folder, moment, values, self._rows, rank, world)
        if _rng_file(folder, rank).exists():
            try:
                torch.set_rng_state(load_file(_rng_file(folder, rank))["cpu"])
            except (KeyError, RuntimeError) as error:
                raise CheckpointError(f"checkpoint {folder}: the random state cannot be restored") from error
        self.updates = updates


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng-{rank:05d}.safetensors"
