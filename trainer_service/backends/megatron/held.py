"""One of the back end's models on a rank: its stages, the passes over them, and what changes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from areal_async.config.parallel import RankGrid
from areal_async.weights.pieces import TensorPiece
from trainer_service.backends.base import TRAINED_MODEL, ModelUse, learning_rate
from trainer_service.backends.megatron.names import VALUE
from trainer_service.backends.megatron.passes import Passes
from trainer_service.backends.megatron.ranges import key_of, read_whole
from trainer_service.backends.megatron.stages import StageParameter, make_stages
from trainer_service.backends.megatron.update import MOMENTS, MegatronAdamW, moments_of
from trainer_service.errors import CheckpointError, DivergenceError, GradientNotFinite, ModelError
from trainer_service.ranks import Ranks

Kinds = dict[str, dict[str, Tensor]]
"""Tensors of a rank by what they are, which names the files of a checkpoint, and by key."""


class MegatronModel:
    """The model `name`. Its `updates` are those of the protocol, 0 for a frozen one."""

    def __init__(
        self,
        name: str,
        use: ModelUse,
        ranks: Ranks,
        grid: RankGrid,
        *,
        dtype: torch.dtype,
        recompute: str,
        virtual_stages: int,
    ) -> None:
        """See `MegatronBackend`. Raises `ModelError`."""
        self._name, self._use, self._ranks = name, use, ranks
        section = "trainer" if name == TRAINED_MODEL else f"trainer.{name}"
        self._fix = f"Lower {section}.optimizer.lr, or start from an earlier checkpoint."
        self.stages = make_stages(
            use.folder,
            ranks,
            grid,
            dtype=dtype,
            head=use.head,
            recompute=recompute if use.optimizer is not None else "none",
            virtual_stages=virtual_stages,
        )
        self.updates = 0
        self._adamw: MegatronAdamW | None = None
        self._followed: dict[str, Tensor] = {}
        if use.optimizer is not None:
            self._adamw = MegatronAdamW(self.stages, use.optimizer, dtype)
            modules = self._adamw.wrapped
        else:
            modules = self.stages.chunks
            for chunk in modules:
                chunk.requires_grad_(False)
        if use.follows:
            self._followed = {
                one.name: one.tensor.detach().float().clone() for one in self.stages.parameters()
            }
        self.passes = Passes(self.stages, modules, replays=name == TRAINED_MODEL)

    @property
    def changes(self) -> bool:
        return self._adamw is not None or self._use.follows

    def state(self) -> Kinds:
        """What a checkpoint holds of it: the ranges of its parameters that this rank updates, or of one that
        follows all of them."""
        found: Kinds = {self._name: {}} if self.changes else {}
        for one in self.stages.parameters():
            if one.is_copy:
                continue
            if one.name in self._followed:
                if self._first_of_data(one):
                    found[self._name][key_of(one, 0)] = self._followed[one.name].reshape(-1)
                continue
            owned = self._adamw.owned(one.tensor) if self._adamw is not None else None
            if owned is None:
                continue
            found[self._name][key_of(one, owned.start)] = owned.main.detach()
            for moment, values in moments_of(owned).items():
                found.setdefault(f"{self._name}.{moment}", {})[key_of(one, owned.start)] = values
        return found

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        """See `TrainingBackend.load`."""
        if not self.changes or (self._adamw is None and not updates):
            return
        if updates and self._name not in updates:
            raise CheckpointError(
                f"checkpoint {folder} holds no model {self._name!r}, which the job trains: begin a new run"
            )
        self.updates = updates.get(self._name, 0)
        weights = read_whole(folder, self._name, self.stages)
        if self._adamw is None:
            for one in self.stages.parameters():
                self._followed[one.name].copy_(whole := weights[one.name])
                one.tensor.data.copy_(whole)
            return
        self._adamw.restart(self.updates)
        self._adamw.take_weights((one.tensor, weights[one.name]) for one in self.stages.parameters())
        if not self.updates:
            return
        owned = [(one.name, self._adamw.owned(one.tensor)) for one in self.stages.parameters()]
        for moment in MOMENTS:
            whole_moments = read_whole(folder, f"{self._name}.{moment}", self.stages)
            for name, range_ in owned:
                if range_ is not None:
                    values = whole_moments[name].reshape(-1)[range_.start : range_.end]
                    range_.state[moment].copy_(values)

    def gradient_norm(self) -> float:
        """See `TrainingBackend.gradient_norm`."""
        norm = self._trained().norm()
        if not math.isfinite(norm):
            self.discard()
            raise GradientNotFinite(
                f"the gradient's norm is {norm} in optimizer update {self.updates} of {self._name}: training "
                f"has diverged. {self._fix}",
                self._name,
            )
        return norm

    def step(self) -> float:
        """See `TrainingBackend.optimizer_step`."""
        adamw, settings = self._trained(), self._use.optimizer
        assert settings is not None
        norm = self.gradient_norm()
        adamw.step(learning_rate(settings, self.updates, self._use.total_updates))
        finite = all(bool(one.tensor.detach().isfinite().all()) for one in self.stages.parameters())
        if self._ranks.largest(0 if finite else 1):
            raise DivergenceError(
                f"a weight is not finite after optimizer update {self.updates} of {self._name}: they are not "
                f"published. {self._fix}"
            )
        self.updates += 1
        return norm

    def discard(self) -> None:
        """See `TrainingBackend.discard`."""
        self._trained().discard()

    @torch.no_grad()
    def follow(self, source: MegatronModel, share: float) -> None:
        """See `TrainingBackend.follow`."""
        if not self._use.follows:
            raise ValueError(f"the model {self._name!r} was not made to follow another one")
        theirs = {one.name: one.tensor for one in source.stages.parameters()}
        for one in self.stages.parameters():
            found = theirs.get(one.name)
            if found is None or found.shape != one.tensor.shape:
                raise ModelError(
                    f"the model {self._name!r} cannot follow {source._name!r}, which has no {one.name} of "
                    "its shape: both must come of one directory."
                )
            one.tensor.data.copy_(self._followed[one.name].lerp_(found.float(), share))
        self.updates += 1

    def pieces(self, dtype: torch.dtype) -> Iterator[TensorPiece]:
        """The boxes of the model's tensors that this rank gives out, in `dtype`."""
        for one in self.stages.parameters():
            if one.is_copy or not self._first_of_data(one):
                continue
            for piece in self.stages.boxes(one, one.tensor.detach()):
                if piece.name == VALUE and self._use.head == "both":
                    continue
                if piece.tensor.numel():
                    yield TensorPiece(
                        piece.name, piece.shape, piece.offset, piece.tensor.to(dtype).contiguous()
                    )

    @staticmethod
    def _first_of_data(one: StageParameter) -> bool:
        """Whether this is the first of the data ranks that have the parameter."""
        if getattr(one.tensor, "allreduce", True):
            return bool(parallel_state.get_data_parallel_rank() == 0)
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)

    def _trained(self) -> MegatronAdamW:
        if self._adamw is None:
            raise ValueError(f"the model {self._name!r} is not trained")
        return self._adamw
