"""Reader for a policy that many ranks have trained: one process reads their checkpoint without
Megatron-Core."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from areal_async.models.files import stored_tensors
from areal_async.weights.pieces import TensorPiece, whole_piece
from trainer_service.backends.base import TRAINED_MODEL, ModelUse, RankPlace
from trainer_service.backends.megatron.config import Dimensions
from trainer_service.backends.megatron.names import VALUE
from trainer_service.backends.megatron.ranges import read_boxes
from trainer_service.errors import CheckpointError, ModelError

TRAINS = frozenset(
    ("evaluate", "train", "gradient_norm", "optimizer_step", "discard", "follow", "prepare_save", "save")
)
"""Methods of the protocol that need all ranks."""


class MegatronReader:
    """The methods of `backends.base.TrainingBackend` that tools need: `load` and `export`."""

    place = RankPlace(0, 1)
    adapted: Collection[str] = ()
    updates: Mapping[str, int] = {}

    def __init__(self, models: Mapping[str, ModelUse], *, dtype: torch.dtype) -> None:
        """Raises `ModelError`."""
        use = models[TRAINED_MODEL]
        try:
            self._model = Dimensions.of(json.loads((use.folder / "config.json").read_bytes()))
            self._shapes = {name: stored.shape for name, stored in stored_tensors(use.folder).items()}
        except (OSError, ValueError) as error:
            raise ModelError(f"no model can be loaded from {use.folder}: {error}.") from error
        if use.head == "value":
            self._shapes.pop("lm_head.weight", None)
            self._shapes[VALUE] = (1, self._model.hidden)
        self._dtype, self._folder = dtype, use.folder
        tied = self._model.tied and use.head != "value"
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        """Read from the checkpoint in `folder` from now on."""
        self._folder = folder

    def export(self, model: str, *, gather: bool = False, whole: bool = True) -> Iterator[TensorPiece]:
        """Yield the policy's tensors, one at a time. Raises `CheckpointError`, or `KeyError` for another
        model."""
        if model != TRAINED_MODEL:
            raise KeyError(model)
        for name, shape in self._shapes.items():
            if name in self.tied:
                continue
            piece = whole_piece(name, torch.zeros(shape))
            read_boxes(self._folder, model, [piece], self._model)
            yield whole_piece(name, piece.tensor.to(self._dtype))

    def reads(self, files: Collection[str]) -> Collection[str]:
        return files

    def __getattr__(self, name: str) -> None:
        if name not in TRAINS:
            raise AttributeError(name)
        raise CheckpointError(
            f"one process alone reads what several ranks of Megatron-Core have trained, and does not {name}"
        )
