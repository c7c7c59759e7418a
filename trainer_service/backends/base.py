"""The protocol of a back end, and the code that all of them share.

A back end holds named models (`policy`, `ref`, `critic`, `teacher`, …), some of which are trained, each with
an optimizer of its own, and hides how they are spread over ranks: every method is called by all ranks in the
same order, with the micro-batches of each rank's own share, and all ranks have equally many, some of them
without a row. It owns the passes over them, so that it may pipeline them, in an order of its own and with
empty ones in between; autograd stays inside, and no tensor as wide as the vocabulary leaves it. What does
are *columns*, one value for each unit of a micro-batch, under their names:

    logp     f32 [S]: log-softmax(logits / temperature) at the unit's token
    entropy  f32 [S]: of the same distribution, in nats
    greedy   bool [S]: whether the token is the arg max of its distribution; only of `evaluate`
    value    f32 [S]: of the value head, at the place before the unit's token: what is to come
    score    f32 [S]: of the value head, at the unit's own token; of rows whose last token is fed
             (`TrainingRow.feeds_last`)

The first three are of models with a head for tokens, the last two of those with one for values.
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

TRAINED_MODEL = "policy"  # Which of the models is the policy's own, the one that is given out
REFERENCE, CRITIC, TEACHER, PROCESS = "ref", "critic", "teacher", "process"
T = TypeVar("T")
Columns = Mapping[str, "Tensor"]
Names = Sequence[str]
LOGP: Names = ("logp",)
Batches = Sequence["MicroBatch"]
OfColumns = Callable[[int, Columns], T]
"""A function of the index of a micro-batch and its columns."""
LossOf = OfColumns["Tensor"]
ModelHead = Literal["tokens", "value", "both"]


@dataclass(frozen=True)
class ModelUse:
    """Use of one model of a back end."""

    folder: Path
    """A Hugging Face directory: of a causal language model, or with the head `value` also of a sequence
    classifier with one label."""
    optimizer: OptimizerSection | None = None
    """Settings of its training; None: it is frozen."""
    total_updates: int = 0
    """Optimizer updates of the whole run, for the schedule of the learning rate."""
    head: ModelHead = "tokens"
    """Outputs of the model. `tokens` has the columns of a distribution. `value` has the columns of one number
    per unit, from a linear layer on the last hidden state that replaces the output layer. `both` has both
    layers. The linear layer begins as zeros if the folder has none."""
    follows: bool = False
    """Whether `follow` is called on it: its weights are kept in fp32 then, and saved."""

    def __post_init__(self) -> None:
        if self.follows and self.optimizer is not None:
            raise ValueError("a model that follows another one is not trained itself")


def models_of(job: JobConfig) -> dict[str, ModelUse]:
    """Return the models that the trainer of a job holds, by name: the policy, and the models that compute
    columns for its objective. Raises `PartError` if a part cannot be found."""
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
    """Return the columns that models other than the policy compute for the objective of a job."""
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
    """A rank's place in the layout of its back end, which is independent of its number among all ranks: ranks
    that share the layers or the tensors of a model have one `data_rank` in common."""

    data_rank: int
    """Index of the share of each batch in which this rank takes part, below `data_ranks`."""
    data_ranks: int
    """Number of shares into which each batch is dealt."""
    reads: bool = True
    """Whether the rank is given the rows of its share; another one has micro-batches without rows."""
    owns: bool = True
    """True if this rank returns the columns of its share. That is exactly one rank of each `data_rank`. It
    must also read the rows, because the code that uses the columns needs them."""

    def __post_init__(self) -> None:
        if self.owns and not self.reads:
            raise ValueError("a rank that owns the columns of its share is given the rows of it")


class TrainingBackend(Protocol):
    @property
    def place(self) -> RankPlace: ...

    @property
    def updates(self) -> Mapping[str, int]:
        """Number of changes of each model so far, those before a checkpoint included: optimizer updates of a
        trained model, calls of `follow` of one that follows."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Alias -> name, of the policy's tensors that are one."""

    @property
    def adapted(self) -> Sequence[str]:
        """Return the layers of the policy that have an adapter. If there are some, only adapters are trained,
        exported (under peft's names) and saved. Called only with `trainer.lora`."""

    def evaluate(self, model: str, batches: Batches, fn: OfColumns[T], *, columns: Names = LOGP) -> list[T]:
        """Return the result of `fn(index, columns)` for each micro-batch, in their order, without gradients;
        empty on a rank that does not own its share's columns. `fn` is called once for each, in any order."""

    def train(self, model: str, batches: Batches, loss_of: LossOf, *, columns: Names = LOGP) -> None:
        """Add the gradients of Σ `loss_of(index, columns)`, over the micro-batches of all ranks, to the
        gradients of a trained model.

        The loss is a scalar with a gradient through the columns. It is called once for each micro-batch, in
        any order, on the ranks that own the columns.
        """

    def gradient_norm(self, model: str = TRAINED_MODEL) -> float:
        """Return the norm that the following `optimizer_step` returns or refuses. Models that are trained
        together can thus be checked before any of them changes. Raises `GradientNotFinite`."""

    def optimizer_step(self, model: str = TRAINED_MODEL) -> float:
        """Clip, update and clear gradients, and return the gradient's norm before clipping. Raises
        `GradientNotFinite` if the norm is not finite: gradients are then cleared, nothing else has changed,
        and training may continue. Raises `DivergenceError` if the new weights are not finite."""

    def discard(self, model: str = TRAINED_MODEL) -> None:
        """Clear gradients without an update."""

    def follow(self, model: str, source: str, share: float) -> None:
        """Move the weights of `model` to (1 - share) of themselves + `share` of the weights of `source`.
        Raises `ModelError` if the models have different shapes."""

    def export(self, model: str, *, gather: bool = False) -> Iterator[TensorPiece]:
        """Yield the weights under the names of the model's files, in the job's dtype, without aliases. Each
        rank yields its own boxes; together the ranks cover each tensor once. With `gather`, rank 0 yields all
        of them. The value layer of a model with `both` heads is left out. All ranks iterate to the end
        together. A piece is valid until the next one is requested, or until the next update."""

    def prepare_save(self) -> None:
        """Begin to get the host memory that `save` copies into, so that the first checkpoint stops the step
        no longer than the later ones. Called once, before the first step; returns at once."""

    def save(self, folder: Path) -> Callable[[], Mapping[str, FileEntry]]:
        """Copy this rank's part of the random state, and of weights and optimizer of each model that changes,
        into the host's memory. Return a function that writes it into the existing `folder`, on any thread and
        during training, and returns the files by their names. The next call reuses the memory, so the writing
        must be finished by then."""

    def load(self, folder: Path, updates: Mapping[str, int]) -> None:
        """Restore the state that `save` wrote at these `updates`, on any number of ranks. Without `updates`,
        restore only the trained weights, for publication. Raises `CheckpointError`."""

    def reads(self, files: Collection[str]) -> Collection[str]:
        """Return the files that `load` reads on this rank, from the names of all files that `save` wrote on
        all ranks. Called if ranks are on several hosts, since a host then fetches only these files."""


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


def learning_rate_of(job: JobConfig, backend: TrainingBackend) -> float:
    """Return the rate of the policy's last update; before the first update, the rate of the first."""
    use = models_of(job)[TRAINED_MODEL]
    return learning_rate(job.trainer.optimizer, max(0, backend.updates[TRAINED_MODEL] - 1), use.total_updates)
