"""Passes of a model over micro-batches, by Megatron-Core's schedules.

A schedule calls each stage with each micro-batch, and requests the loss on the last stage. There, the head
computes columns from the hidden states. All tensor ranks have the same columns, and the first of them is the
owner. Stages can exchange packs of any length. An interleaved schedule needs a number of passes that is a
multiple of the number of stages, so empty passes are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from trainer_service.backends.base import Batches, Columns, LossOf, Names, OfColumns
from trainer_service.backends.head import Head, batch_columns
from trainer_service.backends.megatron.layers import (
    PackedCoreAttention,
    PackedGpt,
    PackedPass,
    padded,
    thd_params,
)
from trainer_service.backends.megatron.stages import Stages
from trainer_service.backends.shared_loss import shared_loss
from trainer_service.data.microbatch import MicroBatch, build_micro_batch

T = TypeVar("T")


def owns_columns() -> bool:
    """Return whether this rank owns the columns of its share."""
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


class Passes:
    """Passes of one model. `modules` are its stages, wrapped if they are trained.

    If `replays` is True, the routers replay the routes of the micro-batches. It is only True for the
    policy."""

    def __init__(self, stages: Stages, modules: Sequence[Any], *, replays: bool) -> None:
        self._stages, self._modules, self._replays = stages, list(modules), replays
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._tensors = stages.grid.tensor

    def train(self, batches: Batches, loss_of: LossOf, columns: Names) -> None:
        """Add the gradients of Σ `loss_of(index, columns)` to the gradients of this rank's parameters."""

        def loss(index: int, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            found = self._columns(batch, hidden, columns)
            if index < len(batches):
                each = partial(loss_of, index)
                group = self._group if self._tensors > 1 else None
                total = shared_loss(found, each, group=group, owner=dist.get_global_rank(self._group, 0))
            else:  # an empty pass has no loss, and its gradient is 0
                total = torch.stack([column.sum() for column in found.values()]).sum()
            nothing = hidden.sum() * 0  # a gradient for a micro-batch without units
            return total + nothing, torch.zeros((), dtype=torch.int, device=hidden.device), None

        self._run(batches, loss, forward_only=False)

    def evaluate(self, batches: Batches, fn: OfColumns[T], columns: Names) -> list[T]:
        """Return the results of `fn` for each micro-batch, on the rank that owns the columns."""
        made: dict[int, T] = {}

        def take(index: int, batch: MicroBatch, hidden: Tensor) -> None:
            found = self._columns(batch, hidden, columns)
            if index < len(batches) and owns_columns():
                made[index] = fn(index, found)

        with torch.no_grad():
            self._run(batches, take, forward_only=True)
        return [made[index] for index in sorted(made)]

    def _run(self, batches: Sequence[MicroBatch], last: Callable[..., Any], *, forward_only: bool) -> None:
        passes = [padded(batch, self._tensors) for batch in self._filled(batches)]
        iterators: list[Iterator[tuple[int, MicroBatch]]] = [iter(enumerate(passes)) for _ in self._modules]

        def forward(data: Iterator[tuple[int, MicroBatch]], module: Any) -> tuple[Tensor, Callable[..., Any]]:
            index, batch = next(data)
            kind = self._stages.config.params_dtype
            cos, sin = self._stages.rotary(batch.position_ids.new_empty(0, dtype=kind), batch.position_ids)
            thd = thd_params(batch) if PackedCoreAttention.kernel is not None else None
            packed = PackedPass(batch, cos, sin, thd)
            hidden = module(batch.input_ids, batch.position_ids, None, packed_seq_params=packed)
            return hidden, lambda output, non_loss_data=False: last(index, batch, output)

        run = get_forward_backward_func()
        run(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._modules if len(self._modules) > 1 else self._modules[0],
            num_microbatches=len(passes),
            seq_length=1,  # ignored with variable lengths
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _filled(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches for this model. If stages are interleaved, empty ones are appended."""
        lacking = -len(batches) % self._stages.grid.pipeline if len(self._modules) > 1 else 0
        device = batches[0].input_ids.device
        passes = [*batches, *(build_micro_batch([], device=device) for _ in range(lacking))]
        return passes if self._replays else [replace(batch, routes=None) for batch in passes]

    def _columns(self, batch: MicroBatch, hidden: Tensor, names: Sequence[str]) -> Columns:
        """Return the columns of a micro-batch from the last stage's hidden states [T, 1, H], or from this
        tensor rank's part of the tokens. Raises `ValueError` if the model does not have a column."""
        stage = self._stages.last
        assert stage is not None
        if self._tensors > 1:
            # Head and value layer give every rank the whole gradient; each rank takes its part of it.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        layer = getattr(stage, "score", None)
        return batch_columns(batch, hidden[:, 0], names, lambda: self._head(stage), layer)

    def _head(self, stage: PackedGpt) -> Head:
        """Return this rank's rows of the output layer, without padding rows."""
        if stage.output_layer is None:
            raise ValueError("the model has a value head alone, and no column of tokens")
        weight = stage.output_layer.weight
        if stage.share_embeddings_and_output_weights:
            weight = stage.shared_embedding_or_output_weight()
        first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        real = max(0, min(len(weight), self._stages.dimensions.vocabulary - first))
        return Head(weight[:real], first=first, group=self._group if self._tensors > 1 else None)
