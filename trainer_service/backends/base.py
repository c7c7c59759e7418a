"""What the trainer needs from a back end, and what all of them share.

A back end holds named models (`policy` is the one that is trained) and hides how they are spread over ranks:
every method is called by all ranks in the same order, with each rank's own micro-batches, and all ranks have
equally many. It owns the passes over them, so that it may pipeline them, and no tensor as wide as the
vocabulary leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from areal_async.config.job import OptimizerSection
from trainer_service.data.microbatch import MicroBatch

TRAINED_MODEL = "policy"  # Which of the models is the policy's own, the one that is trained


class TrainingBackend(Protocol):
    @property
    def updates(self) -> int:
        """Optimizer updates made so far, those before a checkpoint included."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Alias -> name, of the policy's tensors that are one."""
        ...

    def logprobs(self, model: str, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """f32 [S] of each micro-batch: log-softmax(logits / temperature) at each unit's token."""
        ...

    def greedy(self, model: str, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """bool [S] of each micro-batch: whether each unit is the arg max of its distribution."""
        ...

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss_of: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Add the policy's gradients of Σ `loss_of(index, logp)`, over the micro-batches of all ranks.

        `logp` f32 [S] are the log-probs of micro-batch `index`, and the loss is a scalar. It is called once
        for each, in any order."""
        ...

    def update(self) -> float:
        """Clip, step, clear gradients; returns the gradient's norm before clipping. Raises `DivergenceError`
        when that, or what the weights become, is not finite."""
        ...

    def export(self, model: str, *, on_cpu: bool = True) -> dict[str, Tensor]:
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


def learning_rate(section: OptimizerSection, update: int, total_updates: int) -> float:
    """Rate of optimizer update `update` (from 0) of `total_updates`.

    A linear warm-up over `warmup_steps`, then what `schedule` says: `constant`; `linear` or `cosine` down
    to `final_lr_share` of the peak at the last update.
    """
    if update < section.warmup_steps:
        return section.lr * (update + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    decaying = max(1, total_updates - 1 - section.warmup_steps)
    done = min(1.0, (update - section.warmup_steps) / decaying)
    remaining = 1 - done if section.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return section.lr * (section.final_lr_share + (1 - section.final_lr_share) * remaining)
