"""Sequence parallelism: each rank has a part of a micro-batch's tokens, and attention covers all of them.

The ranks of a group build the same micro-batch with T tokens. It is padded to a multiple of the group's size
(`MicroBatch.padded`), and cut into equal *stretches* of consecutive tokens, one for each rank.
Except for attention, every layer works on the rank's own stretch. For attention, the ranks exchange heads
(`exchange.py`).

The columns of a unit are computed by the rank whose stretch has the unit's place. Then all ranks get the
columns of all units, so the loss is the same as on one rank (`shared_loss`). The gradient of a unit's columns
flows only into its own stretch. So each rank gets a part of the gradient of the parameters, and the sum over
the group equals the gradient on a single rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_service.backends.fsdp.exchange import Attend, attend_by_heads
from trainer_service.data.microbatch import MicroBatch
from trainer_service.ranks import Ranks


@dataclass(frozen=True)
class SequenceRanks:
    """Consecutive ranks that have a stretch of each row, and this rank's place among them."""

    group: dist.ProcessGroup
    index: int
    size: int
    owner: int
    """Global number of the first rank in the group."""

    @classmethod
    def of(cls, ranks: Ranks, size: int) -> SequenceRanks:
        """Create groups of `size` neighbours; all `ranks` call it."""
        groups = [[*range(first, first + size)] for first in range(0, ranks.world, size)]
        timeout = timedelta(seconds=ranks.timeout_s)
        group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)
        index = ranks.rank % size
        return cls(group, index, size, ranks.rank - index)

    def part_of(self, batch: MicroBatch) -> SequencePart:
        """Return this rank's stretch of a micro-batch that the whole group has, with a multiple of `size`
        tokens."""
        length = batch.n_tokens // self.size
        return SequencePart(self, slice(self.index * length, (self.index + 1) * length))

    def stretch(self, routes: Tensor) -> Tensor:
        """Return the routes of this rank's stretch, from such a micro-batch's routes [layers, T, K]."""
        return routes.chunk(self.size, 1)[self.index]


@dataclass(frozen=True)
class SequencePart:
    """A rank's stretch of L tokens of a micro-batch."""

    ranks: SequenceRanks
    own: slice
    """Place of the stretch in the micro-batch."""

    def units_at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors i64 [N]: the indices of those `places` [S] that are in this stretch, and their
        places within it."""
        chosen = ((places >= self.own.start) & (places < self.own.stop)).nonzero()[:, 0]
        return chosen, places[chosen] - self.own.start

    def column(self, values: Tensor, chosen: Tensor, n_units: int) -> Tensor:
        """Return [n_units]: the values of all units, on every rank. This rank gives `values` [N], at the
        indices `chosen` [N]."""
        whole = torch.zeros(n_units, device=values.device).index_copy(0, chosen, values.float())
        return _Summed.apply(whole, self.ranks.group).to(values.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        """Return [1, L, H, D] for this stretch's queries [1, H, L, D], keys [1, H_kv, L, D] and values.

        `attend` gets some heads of all tokens. Raises `ValueError` if the ranks cannot share the heads."""
        if query.shape[1] % self.ranks.size:
            raise ValueError(
                f"a layer has {query.shape[1]} heads, which {self.ranks.size} ranks cannot share: set "
                "trainer.parallel.sequence to a divisor of the heads of every layer"
            )
        return attend_by_heads(query, key, value, attend, self.ranks.group)


class _Summed(torch.autograd.Function):
    """Sum over the group. In the backward pass, each rank's summand gets the gradient of the sum
    unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        found = tensor.clone()
        if found.numel():
            dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
