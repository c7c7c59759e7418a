"""Code that the back ends share: loading on all ranks, updates of a model and their errors, and the random
state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from areal_async.config.job import OptimizerSection
from areal_async.config.parallel import RankGrid
from areal_async.models.files import ONE_FILE, weight_files
from areal_async.weights.names import NamesMismatch
from trainer_service.backends.base import TRAINED_MODEL, ModelUse, learning_rate
from trainer_service.backends.fsdp.shards import HostCopies, write_tensors
from trainer_service.durable_files import FileEntry
from trainer_service.errors import CheckpointError, DivergenceError, GradientNotFinite, ModelError
from trainer_service.ranks import Ranks

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of trainable weights, under their safetensors names. Other dtypes are quantised."""
T = TypeVar("T")


def require_grid(grid: RankGrid, ranks: Ranks) -> None:
    """Raise `ModelError` unless the grid has exactly one place for each rank."""
    if grid.ranks != ranks.world:
        raise ModelError(
            f"trainer.parallel: {grid.ranks} places do not share {ranks.world} ranks evenly. Set sizes whose "
            "product is trainer.ranks."
        )


def loaded_on_all(folder: Path, ranks: Ranks, load: Callable[[], T], fix: str = "") -> T:
    """Return the result of `load`. If it fails on one rank, every rank raises `ModelError`, whose message
    ends with `fix`."""
    error: Exception | None = None
    try:
        loaded = load()
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        SafetensorError,
        NamesMismatch,
    ) as found:
        error = found
    if refused := ranks.largest(0 if error is None else ranks.rank + 1):
        reason = error or f"rank {refused - 1} cannot read it, as its log says"
        reason = f"it {error}" if isinstance(error, NamesMismatch) else reason
        raise ModelError(f"no model can be loaded from {folder}: {reason}.{fix}") from error
    return loaded


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return lazy views of all tensors in a model's files. Raises `OSError` or `SafetensorError`, and
    `ValueError` and others for an invalid index."""
    found: dict[str, Any] = {}
    for path in weight_files(folder) or [folder / ONE_FILE]:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise OSError(f"{path.name} cannot be read: {error}") from error
        found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return found


class ChangingModel(ABC):
    """The model `name` on a rank. `updates` is as in the protocol, and 0 for a frozen model."""

    def __init__(self, name: str, use: ModelUse) -> None:
        self.name, self.use = name, use
        self.updates = 0
        self.known_norm: float | None = None
        """Norm of the gradients of the next update, once it has been read."""
        section = "trainer" if name == TRAINED_MODEL else f"trainer.{name}"
        self._fix = f"Lower {section}.optimizer.lr, or start from an earlier checkpoint."

    @abstractmethod
    def discard(self) -> None:
        """See `TrainingBackend.discard`."""

    @abstractmethod
    def _norm_of_gradient(self) -> float:
        """Return the norm of the gradients of all ranks. The first call sums the gradients over ranks."""

    @abstractmethod
    def _update(self, norm: float, rate: float) -> float:
        """Clip the gradients, whose norm is given, update with this rate, and clear the gradients. Returns
        the norm of all updated weights, or any other number that is finite if and only if the weights are."""

    @abstractmethod
    def _move(self, source: Self, share: float) -> None:
        """Set the model's weights to (1 - share) · their value + `share` · the weights of `source`."""

    @property
    def changes(self) -> bool:
        return self.use.optimizer is not None or self.use.follows

    def gradient_norm(self) -> float:
        """See `TrainingBackend.gradient_norm`."""
        self._trained()
        norm = self._norm_of_gradient() if self.known_norm is None else self.known_norm
        self.known_norm = norm
        if not math.isfinite(norm):
            self.known_norm = None
            self.discard()
            raise GradientNotFinite(
                f"the gradient's norm is {norm} in optimizer update {self.updates} of {self.name}: training "
                f"has diverged. {self._fix}",
                self.name,
            )
        return norm

    def step(self) -> float:
        """See `TrainingBackend.optimizer_step`."""
        norm, self.known_norm = self.gradient_norm(), None
        size = self._update(norm, learning_rate(self._trained(), self.updates, self.use.total_updates))
        if not math.isfinite(size):
            raise DivergenceError(
                f"the norm of the weights is {size} after optimizer update {self.updates} of {self.name}: "
                f"they are not published. {self._fix}"
            )
        self.updates += 1
        return norm

    def begin_at(self, folder: Path, updates: Mapping[str, int]) -> bool:
        """Set the number of updates from a checkpoint in `folder`. Returns whether the checkpoint must have
        files with the state of this model. Raises `CheckpointError` if the checkpoint does not list the
        model."""
        if self.use.optimizer is None and not (self.use.follows and updates):
            return False
        if updates and self.name not in updates:
            raise CheckpointError(
                f"checkpoint {folder} holds no model {self.name!r}, which the job trains: begin a new run"
            )
        self.updates = updates.get(self.name, 0)
        return True

    @torch.no_grad()
    def follow(self, source: Self, share: float) -> None:
        """See `TrainingBackend.follow`."""
        if not self.use.follows:
            raise ValueError(f"the model {self.name!r} was not made to follow another one")
        self._move(source, share)
        self.updates += 1

    def found_in(self, source: ChangingModel, name: str, found: Tensor | None, shape: torch.Size) -> Tensor:
        """Return `found`, the tensor `name` of the model to follow. Raises `ModelError` if that tensor does
        not have this shape."""
        if found is None or found.shape != shape:
            raise ModelError(
                f"the model {self.name!r} cannot follow {source.name!r}, which has no {name} of its shape: "
                "both must come of one directory, and adapters cannot be followed."
            )
        return found

    def _trained(self) -> OptimizerSection:
        if self.use.optimizer is None:
            raise ValueError(f"the model {self.name!r} is not trained")
        return self.use.optimizer


M = TypeVar("M", bound=Any)


class NamedModels(Generic[M]):
    """Methods of `TrainingBackend` that delegate to one of its models."""

    _models: dict[str, M]
    _ranks: Ranks
    _copies: HostCopies

    side_by_side = False

    @property
    def updates(self) -> dict[str, int]:
        return {name: model.updates for name, model in self._models.items() if model.changes}

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        for model in self._models.values():
            model.load(folder, updates)
        read_random_state(folder, self._ranks)

    def prepare_save(self) -> None:
        models = self._models.values()
        self._copies.prepare({kind: values for model in models for kind, values in model.memory.items()})

    def save(self, folder: Path) -> Callable[[], Mapping[str, FileEntry]]:
        states = [(model, model.state) for model in self._models.values()]
        copies = self._copies.fill({kind: state[kind] for _, state in states for kind in state})
        random_state = random_states(self._ranks.device)

        def write() -> Mapping[str, FileEntry]:
            written = write_tensors(folder / random_state_file(self._ranks.rank), random_state, {})
            for model, state in states:
                for kind in state:
                    written |= model.write(folder, kind, copies[kind])
            return written

        return write

    def gradient_norm(self, model: str = TRAINED_MODEL) -> float:
        return float(self._models[model].gradient_norm())

    def optimizer_step(self, model: str = TRAINED_MODEL) -> float:
        return float(self._models[model].step())

    def discard(self, model: str = TRAINED_MODEL) -> None:
        self._models[model].known_norm = None
        self._models[model].discard()

    def follow(self, model: str, source: str, share: float) -> None:
        self._models[model].follow(self._models[source], share)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the random generators of a rank, u8 [n] by kind of device: of the CPU, and of its
    own device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def read_random_state(folder: Path, ranks: Ranks) -> None:
    """Restore the random states of this rank if its file exists. A device without a state in the file keeps
    its own. Raises `CheckpointError`."""
    if not (file := folder / random_state_file(ranks.rank)).exists():
        return
    device = ranks.device
    try:
        states = load_file(file)
        torch.set_rng_state(states["cpu"])
        if device.type != "cpu" and device.type in states:
            torch.get_device_module(device).set_rng_state(states[device.type], device)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {folder}: the random state cannot be restored") from error


def random_state_file(rank: int) -> str:
    """Return the name of a rank's random-state file."""
    return f"rng-{rank:05d}.safetensors"
