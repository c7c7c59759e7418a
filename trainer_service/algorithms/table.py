"""The unit table of a step: columns of its episodes, segments and sampled units.

There are three levels, and each refers to the level above it:

    EpisodeTable   E episodes, in the order of the manifest; the same on every rank
    SegmentTable   G sampled segments with trained units, of all ranks; the same on every rank
    UnitTable      U sampled units of this rank's rows, or of one micro-batch of them

Ids, never positions, connect the levels. `UnitTable.by_episode` and similar functions sum over the units of
all ranks. An advantage or a correction therefore depends neither on the packing of rows nor on their
distribution over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_async.base.verdicts import Parts
from areal_async.rpc.messages import BatchEpisode
from areal_async.trajectory.builder import anchor_of
from trainer_service.errors import ObjectiveError
from trainer_service.transfer import moved

if TYPE_CHECKING:
    from trainer_service.ranks import Ranks

ROUNDING = 1e-10
"""Largest relative rounding error in the mean of millions of equal values."""


@dataclass(frozen=True)
class EpisodeTable:
    """E episodes of a step."""

    reward: Tensor
    """f64 [E]"""
    group: Tensor
    """i64 [E]"""
    baseline: Tensor
    """bool [E]: True for greedy episodes, which serve only as baselines and are not trained."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """f64 [E] by name; NaN if the episode does not have the component."""
    parts: Sequence[Parts | None] = ()
    """Rewards of segments, agents and units for each episode, or None if the episode's verdict has none. The
    sequence is empty if no verdict has any."""

    def __len__(self) -> int:
        return len(self.reward)

    @classmethod
    def of(
        cls, episodes: Sequence[BatchEpisode], group: NDArray[np.int64], *, greedy_sample: int | None = None
    ) -> EpisodeTable:
        """Build the table from the episodes of a manifest. `greedy_sample` is the sample number of a group's
        greedy episode."""
        names = {name: None for episode in episodes for name in episode.components}
        none = float("nan")

        def numbers(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)

        return cls(
            reward=numbers([episode.reward for episode in episodes]),
            group=torch.from_numpy(group),
            baseline=torch.tensor([episode.sample == greedy_sample for episode in episodes]),
            components={name: numbers([e.components.get(name, none) for e in episodes]) for name in names},
            parts=[e.parts for e in episodes] if any(e.parts is not None for e in episodes) else (),
        )

    @property
    def groups_without_baseline(self) -> int:
        return len(set(self.group.tolist()) - set(self.group[self.baseline].tolist()))


@dataclass(frozen=True)
class SegmentTable:
    """G segments of all ranks, ordered by episode and segment."""

    episodes: EpisodeTable
    episode: Tensor
    """i64 [G]"""
    index: Tensor
    """i64 [G]: number of the segment in its episode, ascending in time."""
    turn: Tensor
    """i64 [G]"""
    agent: Tensor
    """i64 [G]: equal numbers for equal names (`agent_id`)."""
    anchor: Tensor
    """i64 [G]: equal numbers for equal states; 0 if the workflow named no state."""
    length: Tensor
    """i64 [G]: number of trained units."""
    given: Tensor
    """f64 [G]: sum of the rewards that the verdict or the workflow gave to the segment and its units; 0
    without any."""
    reward: Tensor
    """f64 [G]: the segment's share of the reward of its agent's sequence (see `credit.py`)."""

    def __len__(self) -> int:
        return len(self.episode)

    @property
    def group(self) -> Tensor:
        """i64 [G]"""
        return self.episodes.group[self.episode]

    @property
    def sequence(self) -> Tensor:
        """i64 [G], one value for each segment: index of its (episode, agent) pair among the sorted pairs."""
        return keys(self.episode, self.agent)

    def in_time(self) -> InTime:
        """Return the segments of each sequence in the order of time."""
        return InTime.of(self.sequence, self.index)


@dataclass(frozen=True)
class InTime:
    """The N entries of a table, as sequences in the order of time."""

    order: Tensor
    """i64 [N]: indices of the entries, sequence by sequence, in ascending time. The entries that belong to no
    sequence are the last."""
    follows: Tensor
    """bool [N - 1]: whether the next entry is in the same sequence."""
    kept: Tensor
    """bool [N]: whether the entry, in the order of the table, belongs to a sequence."""

    @classmethod
    def of(cls, sequence: Tensor, time: Tensor, keep: Tensor | None = None) -> InTime:
        """Order entries by their numbers [N] of sequences and their times [N], both from 0. `keep` bool [N]
        selects entries."""
        kept = torch.ones_like(sequence, dtype=torch.bool) if keep is None else keep
        key = sequence * (time.max() + 1) + time if len(time) else sequence
        order = key.masked_fill(~kept, torch.iinfo(torch.int64).max).argsort()
        number = sequence.masked_fill(~kept, -1)[order]
        return cls(order, (number[1:] == number[:-1]) & (number[1:] >= 0), kept)

    def following(self, values: Tensor, at_end: Tensor) -> Tensor:
        """Return f64 [N]: for each entry the value [N] of the next one in its sequence, and `at_end` [N] for
        the last. Entries that were not kept get 0."""
        inner, last = values.double()[self.order], at_end.double()[self.order]
        last[:-1] = torch.where(self.follows, inner[1:], last[:-1])
        return masked(torch.zeros_like(last).index_copy(0, self.order, last), self.kept)

    def to_go(self, values: Tensor, discount: float) -> Tensor:
        """Return f64 [N]: G_k = value_k + discount · G_{k+1} along each sequence. Entries that were not kept
        get 0.

        The sums are computed in parallel: for windows of 1, 2, 4 … entries, each made of two windows of the
        previous size. The number of windows does not depend on the sequences, so the host need not wait for
        the device."""
        sums = values.double()[self.order]
        reach, shift, factor = self.follows, 1, discount
        while shift < len(sums):
            sums[:-shift] += torch.where(reach, factor * sums[shift:], 0.0)
            # A window doubles only if the window after it is in the same sequence.
            reach = reach[:-shift] & reach[shift:]
            shift, factor = 2 * shift, factor * factor
        return masked(torch.zeros_like(sums).index_copy(0, self.order, sums), self.kept)


@dataclass(frozen=True)
class UnitTable:
    """U sampled units with their columns, all [U]. `table["prox"]` returns a column by name. Columns of every
    table are also properties."""

    columns: Mapping[str, Tensor]
    episodes: EpisodeTable
    segments: SegmentTable | None = None
    """Table of the segments. None unless a part of the objective uses segments, agents or turns."""
    ranks: Ranks | None = field(default=None, repr=False)
    """Collectives; None for a micro-batch, which is only a part of the step."""

    def __len__(self) -> int:
        return len(self.mask)

    def __getitem__(self, name: str) -> Tensor:
        """Raises `ObjectiveError` if the column does not exist."""
        found = self.columns.get(name)
        if found is None:
            raise ObjectiveError(
                f"the unit table has no column {name!r} here. A part that reads one declares it: "
                f"columns=({name!r},). There are {', '.join(self.columns)}."
            )
        return found

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    @property
    def behaviour(self) -> Tensor:
        """f32 [U]: log-prob from the engine that sampled the unit."""
        return self.columns["behaviour"]

    @property
    def version(self) -> Tensor:
        """i64 [U]: version of the weights that sampled the unit."""
        return self.columns["version"]

    @property
    def episode(self) -> Tensor:
        """i64 [U]: index into the step's episodes."""
        return self.columns["episode"]

    @property
    def group(self) -> Tensor:
        """i64 [U]: index into the step's groups."""
        return self.columns["group"]

    @property
    def mask(self) -> Tensor:
        """bool [U]: False removes the unit from the loss, its gradient and every count."""
        return self.columns["mask"]

    @property
    def advantage(self) -> Tensor:
        """f32 [U]"""
        return self.columns["advantage"]

    def with_columns(self, **columns: Tensor) -> UnitTable:
        return replace(self, columns={**self.columns, **columns})

    def parts(self, sizes: Sequence[int]) -> Iterator[UnitTable]:
        """Yield the units of consecutive micro-batches of these sizes."""
        start = 0
        for size in sizes:
            yield self.part(start, start + size)
            start += size

    def part(self, start: int, end: int) -> UnitTable:
        """Return the units of one micro-batch."""
        cut = {name: column[start:end] for name, column in self.columns.items()}
        return replace(self, columns=cut, ranks=None)

    def cleared(self) -> UnitTable:
        """Return the table with floating-point columns set to 0 where the mask is False, so that a NaN there
        reaches neither a sum nor a gradient."""
        numbers = {name: column for name, column in self.columns.items() if column.is_floating_point()}
        return self.with_columns(**{name: masked(column, self.mask) for name, column in numbers.items()})

    def in_time(self) -> InTime:
        """Return the unmasked units of each sequence in the order of time. A sequence is everything that one
        agent did in one episode. Each episode must be whole on one rank."""
        assert self.segments is not None, "the part does not declare that it needs segments"
        sequence = moved(self.segments.sequence, self.mask.device)[self["segment"]]
        return InTime.of(sequence, self["unit"], self.mask)

    # --- over the whole step, all ranks together ---

    def by_episode(self, values: Tensor) -> Tensor:
        """Return f64 [E]: the sums of values [U] over the unmasked units of each episode."""
        return self._sums(values, self.episode, len(self.episodes))

    def read_by_episode(self, *columns: Tensor) -> Sequence[Tensor]:
        """Return `by_episode` of each column [U], in host memory. They are read from the device at once."""
        return torch.stack([self.by_episode(values) for values in columns]).cpu().unbind()

    def mean_of_episode(self, values: Tensor) -> Tensor:
        """Return f64 [U]: for each unit the mean of values [U] over its episode's unmasked units."""
        count = self.by_episode(torch.ones_like(values)).clamp(min=1)
        return (self.by_episode(values) / count)[self.episode]

    def by_segment(self, values: Tensor) -> Tensor:
        """Return f64 [G]: the sums of values [U] over the unmasked units of each segment."""
        assert self.segments is not None, "the part does not declare that it needs segments"
        return self._sums(values, self["segment"], len(self.segments))

    def total(self, values: Tensor) -> Tensor:
        """Return f64 []: the sum of values [U] over all unmasked units."""
        return self._sums(values, torch.zeros_like(self.episode), 1)[0]

    def whiten(self, values: Tensor, *, eps: float = 1e-8) -> Tensor:
        """Return f64 [U]: values [U] minus their mean, divided by their standard deviation (n - 1).

        Both are over all unmasked units. The result is exactly 0 if all values are equal."""
        values = values.double()
        count = self.total(torch.ones_like(values))
        centred = difference(values, self.total(values) / count.clamp(min=1))
        variance = self.total(centred.square()) / (count - 1).clamp(min=1)
        return centred / (variance.sqrt() + eps)

    def gathered(self, values: Tensor) -> Tensor:
        """Return f64 [N]: values [U] of the unmasked units of all ranks."""
        found, mask = torch.stack([values.double(), self.mask.double()]).cpu()
        mine = found[mask > 0].numpy()[None]
        return moved(torch.from_numpy(self._ranks.concatenate(mine)[0]), values.device)

    def _sums(self, values: Tensor, labels: Tensor, count: int) -> Tensor:
        sums = torch.zeros(count, dtype=torch.float64, device=values.device)
        sums.index_add_(0, labels, masked(values.double(), self.mask))
        self._ranks.sum(sums)
        return sums

    @property
    def _ranks(self) -> Ranks:
        if self.ranks is None:
            raise ObjectiveError(
                'a part sums over the whole step, but is given one micro-batch: let it declare of="step".'
            )
        return self.ranks


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` with 0 where the mask is False. Call it before any arithmetic, so that a NaN or an
    infinity of a masked unit reaches neither a sum nor a gradient."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def difference(values: Tensor, mean: Tensor) -> Tensor:
    """Return `values` minus their mean. A difference within the rounding error becomes exactly 0, because it
    is only noise."""
    found = values - mean
    return found.masked_fill(found.abs() <= ROUNDING * values.abs(), 0.0)


@cache
def agent_id(name: str) -> int:
    """Return the i64 number that represents an agent's name in a table."""
    return anchor_of(name)


def keys(*columns: Tensor) -> Tensor:
    """Return i64 [N]: numbers from 0, equal for rows that are equal in all columns [N], in lexicographic
    order."""
    found = torch.zeros_like(columns[0], dtype=torch.int64)
    for column in columns:
        values, inverse = column.unique(return_inverse=True)
        found = (found * len(values) + inverse).unique(return_inverse=True)[1]
    return found
