"""What the trainer needs from a back end.

A back end holds named models (`policy` is the one that is trained) and hides how they are spread over ranks:
every method is called by all ranks in the same order, with each rank's own micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trainer_service.data.microbatch import MicroBatch


class Backend(Protocol):
    @property
    def updates(self) -> int:
        """Optimizer updates made so far, those before a checkpoint included."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Alias -> name, of the policy's tensors that are one."""
        ...

    def logprobs(self, model: str, batch: MicroBatch) -> Tensor:
        """f32 [S]: log-softmax(logits / temperature) at each unit's token; differentiable for `policy`."""
        ...

    def logits(self, model: str, batch: MicroBatch) -> Tensor:
        """f32 [S, V]: before any temperature; no gradient."""
        ...

    def greedy(self, model: str, batch: MicroBatch) -> Tensor:
        """bool [S]: whether each unit is the arg max of its distribution."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of this rank's `loss` (a scalar that is summed over ranks). `last`: an update
        follows."""
        ...

    def update(self) -> float:
        """Clip, step, clear gradients; returns the gradient's norm before clipping. Raises `DivergenceError`
        when that, or what the weights become, is not finite."""
        ...

    def tensors(self, model: str, *, on_cpu: bool = True) -> dict[str, Tensor]:
        """The full weights by name on rank 0, in the job's dtype, aliases left out; empty on other ranks. In
        the host's memory, or else on the rank's device. They may share memory with the model: use them before
        the next update."""
        ...

    def save(self, folder: Path) -> None:
        """Write this rank's part of weights, optimizer and random state into an existing folder."""
        ...

    def load(self, folder: Path, updates: int) -> None:
        """Restore what `save` wrote, on any number of ranks. Raises `CheckpointError`."""
        ...
