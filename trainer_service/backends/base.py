"""The protocol of a back end, and helpers for its users.

A back end holds named models (`policy`, `ref`, `critic`, `teacher`, …). Some of them are trained, each with
its own optimizer. The back end hides how a model is distributed. All ranks call every method in the same
order, with the micro-batches of their own share. All ranks have the same number of micro-batches, some of
them without rows.

The back end runs all passes itself, so it may pipeline them, reorder them and insert empty ones. The caller
does not use autograd through the model, and no tensor with the width of the vocabulary leaves the back end. A
pass returns *columns*, with one value for each unit of a micro-batch:

    logp     f32 [S]: log-softmax(logits / temperature) at the unit's token
    entropy  f32 [S]: entropy of the same distribution, in nats
    greedy   bool [S]: whether the token is the arg max of its distribution; only from `evaluate`
    value    f32 [S]: value head at the place before the unit's token: prediction of the future reward
    score    f32 [S]: value head at the unit's own token, for rows whose last token is an input
             (`TrainingRow.feeds_last`)

A head for tokens computes the first three columns, and a head for values the last two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from areal_async.config import registry
from areal_async.config.job import JobConfig, OptimizerSection
from areal_async.weights.pieces import TensorPiece

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_service.data.microbatch import MicroBatch
    from trainer_service.durable_files import FileEntry

TRAINED_MODEL = "policy"  # Name of the policy, the model that is published
REFERENCE, CRITIC, TEACHER, PROCESS = "ref", "critic", "teacher", "process"
T = TypeVar("T")
Columns = Mapping[str, "Tensor"]
Names = Sequence[str]
LOGP: Names = ("logp",)
Batches = Sequence["MicroBatch"]
OfColumns = Callable[[int, Columns], T]
"""Function of a micro-batch's index and its columns."""
LossOf = OfColumns["Tensor"]
ModelHead = Literal["tokens", "value", "both"]


@dataclass(frozen=True)
class ModelUse:
    """Use of one model in a back end."""

    folder: Path
    """A Hugging Face directory of a causal language model. With the head `value`, the folder may also have a
    sequence classifier with one label."""
    optimizer: OptimizerSection | None = None
    """Settings of the model's training; None if the model is frozen."""
    total_updates: int = 0
    """Number of optimizer updates in the whole run, for the learning-rate schedule."""
    head: ModelHead = "tokens"
    """Outputs of the model.

    `tokens` computes a distribution over tokens. `value` computes one number for each unit: a linear value
    layer on the last hidden state replaces the output layer. `both` has the two layers. The value layer
    starts with zeros if the folder has none."""
    follows: bool = False
    """Whether `follow` will be called on the model. If so, its weights are kept in fp32 and saved in
    checkpoints."""

    def __post_init__(self) -> None:
        if self.follows and self.optimizer is not None:
            raise ValueError("a model that follows another one is not trained itself")


def models_of(job: JobConfig) -> dict[str, ModelUse]:
    """Return the models that the trainer of a job needs, by name: the policy, and models that compute columns
    for the objective. Raises `PartError` if a part cannot be found."""
    section = job.trainer
    if job.kind != "rl":
        head: ModelHead = "value" if job.kind == "reward_model" else "tokens"
        return {TRAINED_MODEL: ModelUse(job.model, section.optimizer, section.steps, head)}
    updates, critic, columns = section.steps * section.minibatches, section.critic, model_columns(job)
    with_values = "value" in columns and critic.kind == "head"
    models = {
        TRAINED_MODEL: ModelUse(job.model, section.optimizer, updates, "both" if with_values else "tokens")
    }
    if "value" in columns and not with_values:
        models[CRITIC] = ModelUse(critic.model or job.model, critic.optimizer, updates, "value")
    if "ref" in columns:
        reference = section.reference
        models[REFERENCE] = ModelUse(reference.model or job.model, follows=reference.every_steps > 0)
    if "teacher" in columns and section.teacher.model is not None:
        models[TEACHER] = ModelUse(section.teacher.model)
    if "process" in columns:
        process = section.process_reward
        models[PROCESS] = ModelUse(process.model or job.model, process.optimizer, section.steps)
    return models


def model_columns(job: JobConfig) -> set[str]:
    """Return the columns of a job's objective that models other than the policy compute."""
    section = job.trainer.objective
    parts = (
        registry.ADVANTAGES.find(section.advantage),
        registry.LOSSES.find(section.loss),
        registry.CORRECTIONS.find(section.correction),
    )
    found = {column for part in parts for column in getattr(part, "columns", ())}
    if section.kl.coefficient > 0:
        found.add("ref")
    return found & {"value", "ref", "teacher", "process"}


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank in the layout of its back end. Ranks that share the layers or the tensors of a model
    have the same `data_rank`."""

    data_rank: int
    """Index of this rank's share of each batch, below `data_ranks`."""
    data_ranks: int
    """Number of shares in each batch."""
    reads: bool = True
    """Whether the rank gets the rows of its share. If it does not, its micro-batches have no rows."""
    owns: bool = True
    """Whether the rank owns the columns of its share. Exactly one rank of each `data_rank` does. That rank
    must also read the rows, because functions of columns use them."""

    def __post_init__(self) -> None:
        if self.owns and not self.reads:
            raise ValueError("a rank that owns the columns of its share is given the rows of it")


class TrainingBackend(Protocol):
    @property
    def place(self) -> RankPlace: ...

    @property
    def side_by_side(self) -> bool:
        """Whether one of the models computes the rows of a micro-batch side by side, each filled up to the
        longest (`plan_passes`)."""

    @property
    def updates(self) -> Mapping[str, int]:
        """Number of changes of each model so far, including those before a checkpoint. A change is an
        optimizer update or a call of `follow`."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Alias -> name of the tensor that it is tied to, for the policy."""

    @property
    def adapted(self) -> Sequence[str]:
        """Layers of the policy that have an adapter. If there are any, only adapters are trained, saved and
        exported (under peft's names). The trainer reads this value only for jobs with `trainer.lora`."""

    def evaluate(self, model: str, batches: Batches, fn: OfColumns[T], *, columns: Names = LOGP) -> list[T]:
        """Return `fn(index, columns)` of each micro-batch, in their order, without gradients.

        The list is empty on a rank that does not own its share's columns. `fn` is called once for each
        micro-batch, in any order."""

    def train(self, model: str, batches: Batches, loss_of: LossOf, *, columns: Names = LOGP) -> None:
        """Add the gradients of Σ `loss_of(index, columns)` over the micro-batches of all ranks to a trained
        model's gradients.

        `loss_of` returns a scalar with a gradient through the columns. It is called once for each
        micro-batch, in any order, on the ranks that own the columns."""

    def gradient_norm(self, model: str = TRAINED_MODEL) -> float:
        """Return the norm of the gradients. The next call for the model must be `optimizer_step`. With this
        method, several models that are trained together can be checked before any of them changes. Raises
        `GradientNotFinite` like `optimizer_step`."""

    def optimizer_step(self, model: str = TRAINED_MODEL) -> float:
        """Clip the gradients, update and clear them. Returns the norm of the gradients before clipping.

        Raises `GradientNotFinite` if the norm is not finite. The gradients are then cleared, nothing else has
        changed, and training may continue. Raises `DivergenceError` if the new weights are not finite."""

    def discard(self, model: str = TRAINED_MODEL) -> None:
        """Clear gradients without an update."""

    def follow(self, model: str, source: str, share: float) -> None:
        """Set the weights of `model` to (1 - share) · their value + `share` · the weights of `source`. Raises
        `ModelError` if the models have different shapes."""

    def export(self, model: str, *, gather: bool = False, whole: bool = True) -> Iterator[TensorPiece]:
        """Yield the weights under the names in the model's files, in the job's dtype, without aliases.
        Without `whole`, a vision tower that is not trained is left out: receivers have it from the files.

        Each rank yields its own boxes (rectangular parts of tensors); together the ranks cover each tensor
        once. With `gather`, rank 0 yields all boxes. With `both` heads the value layer is not included. All
        ranks must iterate to the end together. A piece is valid until the next piece is requested, or until
        the next update."""

    def prepare_save(self) -> None:
        """Start to allocate the host memory for `save`, so that the first checkpoint delays its step no
        longer than later ones. Called once, before the first step; returns immediately."""

    def save(self, folder: Path) -> Callable[[], Mapping[str, FileEntry]]:
        """Copy this rank's part of the state into host memory and return a function that writes the copy.

        The state is the random state, and the weights and optimizer of each changing model. The function
        writes into the existing `folder` and returns the files by name. It may run in any thread while
        training continues. The next call reuses the memory, so the writing must be finished by then."""

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        """Restore the state that `save` wrote after these `updates`. Any number of ranks may have written it.
        If `updates` is empty, restore only the weights of trained models, which is enough for an export.
        Raises `CheckpointError`."""

    def reads(self, files: Collection[str]) -> Collection[str]:
        """Select the files that `load` reads on this rank, from the names of the files that all ranks saved.
        If ranks are on several hosts, a host needs only the files that its ranks read."""


class SleepingBackend(TrainingBackend, Protocol):
    """A back end whose part has `sleeps = True`, which `placement.share` needs."""

    def sleep(self) -> int:
        """Move the whole state of this rank from its device into host memory. Returns the bytes moved. Only
        `wake` may follow."""

    def wake(self) -> None:
        """Bring the state back after `sleep`."""


def learning_rate(section: OptimizerSection, update: int, total_updates: int) -> float:
    """Return the learning rate of optimizer update `update` (from 0) of `total_updates`.

    The rate rises linearly over `warmup_steps`. Then it stays `constant`, or falls as `linear` or `cosine` to
    `final_lr_share` of the peak at the last update.
    """
    if update < section.warmup_steps:
        return section.lr * (update + 1) / section.warmup_steps
    if section.schedule == "constant":
        return section.lr
    decaying = max(1, total_updates - 1 - section.warmup_steps)
    done = min(1.0, (update - section.warmup_steps) / decaying)
    remaining = 1 - done if section.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return section.lr * (section.final_lr_share + (1 - section.final_lr_share) * remaining)


def learning_rate_of(job: JobConfig, backend: TrainingBackend) -> float:
    """Return the learning rate of the policy's last update, or of its first one before any update."""
    use = models_of(job)[TRAINED_MODEL]
    return learning_rate(job.trainer.optimizer, max(0, backend.updates[TRAINED_MODEL] - 1), use.total_updates)
