"""What the trainer needs from a back end, and what all of them share.

A back end holds named models (`policy` is the one that is trained) and hides how they are spread over ranks:
every method is called by all ranks in the same order, with the micro-batches of each rank's own share, and
all ranks have equally many, some of them without a row. It owns the passes over them, so that it may pipeline
them, in an order of its own and with empty ones in between; autograd stays inside, and no tensor as wide as
the vocabulary leaves it. What leaves it are *columns*, one value for each unit of a micro-batch, under their
names:

    logp     f32 [S]: log-softmax(logits / temperature) at the unit's token
    entropy  f32 [S]: of the same distribution, in nats
    greedy   bool [S]: whether the token is the arg max of its distribution; only of `evaluate`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from areal_async.config.job import OptimizerSection
from areal_async.weights.pieces import TensorPiece
from trainer_service.data.microbatch import MicroBatch
from trainer_service.disk import FileEntry

TRAINED_MODEL = "policy"  # Which of the models is the policy's own, the one that is trained
T = TypeVar("T")
Columns = Mapping[str, Tensor]


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the layout of its back end, which is apart from its number among all ranks:
    ranks that share the layers or the tensors of a model have one `data_rank` in common."""

    data_rank: int
    """Index of the share of each batch in which this rank takes part, below `data_ranks`."""
    data_ranks: int
    """Number of shares into which each batch is dealt."""
    reads: bool = True
    """Whether the rank is given the rows of its share; another one has micro-batches without rows."""
    owns: bool = True
    """Whether the columns of its share come out here: on exactly one rank of each `data_rank`, which reads
    too, since what is called with the columns looks at the rows."""

    def __post_init__(self) -> None:
        if self.owns and not self.reads:
            raise ValueError("a rank that owns the columns of its share is given the rows of it")


class TrainingBackend(Protocol):
    @property
    def place(self) -> RankPlace: ...

    @property
    def updates(self) -> int:
        """Optimizer updates made so far, those before a checkpoint included."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Alias -> name, of the policy's tensors that are one."""
        ...

    @property
    def adapted(self) -> Sequence[str]:
        """The layers of the policy that have an adapter: with some, adapters are what is trained, exported
        (under peft's names) and saved. Asked for only with `trainer.lora`."""
        ...

    def evaluate(
        self,
        model: str,
        batches: Sequence[MicroBatch],
        fn: Callable[[int, Columns], T],
        *,
        columns: Sequence[str] = ("logp",),
    ) -> list[T]:
        """What `fn(index, columns)` makes of each micro-batch, in their order, without gradients; empty on a
        rank that does not own its share's columns. `fn` is called once for each, in any order."""
        ...

    def train(
        self,
        batches: Sequence[MicroBatch],
        loss_of: Callable[[int, Columns], Tensor],
        *,
        columns: Sequence[str] = ("logp",),
    ) -> None:
        """Add the policy's gradients of Σ `loss_of(index, columns)`, over the micro-batches of all ranks.

        The loss is a scalar with a gradient through the columns. It is called once for each micro-batch, in
        any order, on the ranks that own the columns."""
        ...

    def optimizer_step(self) -> float:
        """Clip, update, clear gradients; returns the gradient's norm before clipping. Raises
        `DivergenceError` when that, or what the weights become, is not finite."""
        ...

    def export(self, model: str, *, gather: bool = False) -> Iterator[TensorPiece]:
        """The weights under the names of the model's files, in the job's dtype, aliases left out: the boxes
        that this rank holds, which with those of the others cover each tensor once; or to `gather` all of
        them on rank 0. All ranks iterate to the end together. A piece is good until the next is asked for, or
        the next update."""
        ...

    def prepare_save(self) -> None:
        """Begin to get the host memory that `save` copies into, so that the first checkpoint stops the step
        no longer than the later ones. Called once, before the first step; returns at once."""
        ...

    def save(self, folder: Path) -> Callable[[], Mapping[str, FileEntry]]:
        """Copy this rank's part of weights, optimizer and random state into the host's memory; what is
        returned writes it into the existing `folder`, on any thread and while training goes on, and tells
        the files by their names. The memory is used again by the next call: the writing must be over."""
        ...

    def load(self, folder: Path, updates: int) -> None:
        """Restore what `save` wrote after `updates` updates, on any number of ranks; with 0 the weights
        alone, to be given out. Raises `CheckpointError`."""
        ...

    def reads(self, files: Collection[str]) -> Collection[str]:
        """Of the names of all files that `save` wrote, on all ranks, those that `load` reads on this one.
        Asked where ranks are on several hosts: a host needs no files but these."""
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
