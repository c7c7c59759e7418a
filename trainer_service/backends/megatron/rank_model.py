"""One model of the back end on a rank: its stages, its passes and the changes to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.base import TRAINED_MODEL, ModelUse
from trainer_service.backends.common import ChangingModel
from trainer_service.backends.fsdp.optimizer import MOMENTS
from trainer_service.backends.fsdp.shards import write_tensors
from trainer_service.backends.megatron.config import MegatronOptions
from trainer_service.backends.megatron.names import VALUE
from trainer_service.backends.megatron.passes import Passes
from trainer_service.backends.megatron.ranges import key_of, read_whole
from trainer_service.backends.megatron.stages import StageParameter, make_stages
from trainer_service.backends.megatron.update import MegatronAdamW
from trainer_service.durable_files import FileEntry
from trainer_service.ranks import Ranks

Kinds = dict[str, dict[str, Tensor]]
"""Tensors of a rank by kind and by key. Kinds name the files of a checkpoint."""


class MegatronModel(ChangingModel):
    """See `ChangingModel`."""

    def __init__(self, name: str, use: ModelUse, ranks: Ranks, options: MegatronOptions) -> None:
        """See `MegatronBackend`. Raises `ModelError`."""
        super().__init__(name, use)
        self._ranks = ranks
        own = options if use.optimizer is not None else replace(options, recompute="none")
        self.stages = make_stages(use.folder, ranks, own, use.head)
        self._adamw: MegatronAdamW | None = None
        self._followed: dict[str, Tensor] = {}
        if use.optimizer is not None:
            self._adamw = MegatronAdamW(self.stages, use.optimizer, options.dtype)
            modules = self._adamw.wrapped
        else:
            modules = self.stages.chunks
            for chunk in modules:
                chunk.requires_grad_(False)
        for one in self.stages.parameters() if use.follows else ():
            self._followed[one.name] = one.tensor.detach().float().clone()
        self.passes = Passes(self.stages, modules, replays=name == TRAINED_MODEL)

    @property
    def state(self) -> Kinds:
        """The tensors for a checkpoint. These are the ranges of parameters that this rank updates, or
        all parameters of a model that follows another."""
        found: Kinds = {self.name: {}} if self.changes else {}
        for one in self.stages.parameters():
            if one.is_copy:
                continue
            if one.name in self._followed:
                if self._first_of_data(one):
                    found[self.name][key_of(one, 0)] = self._followed[one.name].reshape(-1)
                continue
            owned = self._adamw.owned(one.tensor) if self._adamw is not None else None
            if owned is None:
                continue
            found[self.name][key_of(one, owned.start)] = owned.main.detach()
            for moment in MOMENTS:
                if moment in owned.state:  # f32; a range has no moments before the first update
                    kind = found.setdefault(f"{self.name}.{moment}", {})
                    kind[key_of(one, owned.start)] = owned.state[moment]
        return found

    memory = state

    def write(self, folder: Path, kind: str, values: Mapping[str, Tensor]) -> dict[str, FileEntry]:
        return write_tensors(folder / f"{kind}-ranges-{self._ranks.rank:05d}.safetensors", values, {})

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        """See `TrainingBackend.load`."""
        if not self.begin_at(folder, updates):
            return
        weights = read_whole(folder, self.name, self.stages)
        if self._adamw is None:
            for one in self.stages.parameters():
                self._followed[one.name].copy_(whole := weights[one.name])
                one.tensor.data.copy_(whole)
            return
        self._adamw.restart(self.updates)
        self._adamw.take_weights((one.tensor, weights[one.name]) for one in self.stages.parameters())
        if not self.updates:
            return
        owned = {one.name: self._adamw.owned(one.tensor) for one in self.stages.parameters()}
        for moment in MOMENTS:
            whole_moments = read_whole(folder, f"{self.name}.{moment}", self.stages)
            for name, range_ in owned.items():
                if range_ is not None:
                    range_.state[moment].copy_(whole_moments[name].reshape(-1)[range_.start : range_.end])

    def _norm_of_gradient(self) -> float:
        assert self._adamw is not None
        return self._adamw.norm()

    def _update(self, norm: float, rate: float) -> float:
        assert self._adamw is not None
        self._adamw.step(rate)
        # Read once, because the host waits for the device each time.
        finite = [one.tensor.detach().isfinite().all() for one in self.stages.parameters()]
        is_finite = not finite or bool(torch.stack(finite).all())
        return 0.0 if self._ranks.largest(0 if is_finite else 1) == 0 else math.nan

    def discard(self) -> None:
        """See `TrainingBackend.discard`."""
        self._trained()
        assert self._adamw is not None
        self._adamw.discard()

    def _move(self, source: MegatronModel, share: float) -> None:
        theirs = {one.name: one.tensor for one in source.stages.parameters()}
        for one in self.stages.parameters():
            found = self.found_in(source, one.name, theirs.get(one.name), one.tensor.shape)
            one.tensor.data.copy_(self._followed[one.name].lerp_(found.float(), share))

    def pieces(self, dtype: torch.dtype) -> Iterator[TensorPiece]:
        """Yield the boxes of the model's tensors that this rank exports, in `dtype`."""
        for one in self.stages.parameters():
            if one.is_copy or not self._first_of_data(one):
                continue
            for piece in self.stages.boxes(one, one.tensor.detach()):
                if piece.tensor.numel() and not (piece.name == VALUE and self.use.head == "both"):
                    yield replace(piece, tensor=piece.tensor.to(dtype).contiguous())

    @staticmethod
    def _first_of_data(one: StageParameter) -> bool:
        """Return whether this is the first of the data ranks with the parameter."""
        if getattr(one.tensor, "allreduce", True):
            return bool(parallel_state.get_data_parallel_rank() == 0)
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
