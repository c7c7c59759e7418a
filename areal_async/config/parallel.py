"""The grid of a trainer's ranks, which `trainer.parallel` describes.

The axes of the grid are pipeline x data x shard x sequence x tensor. The innermost axis is `tensor`, so the
ranks that communicate most have adjacent numbers and are on one host. Rows of a batch are distributed over
data x shard. Ranks that differ only in other axes work on the same rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from areal_async.base.mistakes import Mistake
from areal_async.config.job import TrainerSection

AXES = ("pipeline", "data", "shard", "sequence", "tensor")
"""Axes of the grid, outermost first."""


@dataclass(frozen=True)
class RankGrid:
    """The sizes of a trainer's grid."""

    data: int = 1
    shard: int = 1
    pipeline: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, trainer: TrainerSection) -> RankGrid:
        """Return the grid of a job's `trainer` section. If the sizes do not divide the number of ranks,
        `shard` is rounded down; `parallel_mistakes` refuses this case."""
        asked = trainer.parallel
        others = prod(getattr(asked, axis) for axis in AXES if axis != "shard")
        shard = asked.shard or max(1, trainer.ranks // others)
        return cls(asked.data, shard, asked.pipeline, asked.sequence, asked.tensor, asked.expert)

    @property
    def ranks(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """The number of shares into which a batch is split."""
        return self.data * self.shard


def parallel_mistakes(trainer: TrainerSection, axes: Collection[str]) -> Iterator[Mistake]:
    """Yield the mistakes in `trainer.parallel` for a back end that supports `axes`."""
    grid, asked = RankGrid.of(trainer), trainer.parallel
    for axis in (*AXES, "expert"):
        if axis not in axes and (getattr(asked, axis) or 1) > 1:
            able = "fsdp has data, shard and sequence; megatron data, shard, tensor, pipeline and expert"
            problem = f"trainer.backend {trainer.backend} does not share work that way"
            fix = f"Leave it out, or use another back end: {able}"
            yield Mistake(f"trainer.parallel.{axis}", problem, fix)
    if grid.ranks != trainer.ranks:
        given = {axis: getattr(grid, axis) for axis in AXES}
        shown = {axis: n for axis, n in given.items() if n > 1 or (axis == "shard" and asked.shard)}
        sizes = " x ".join(f"{n} ({axis})" for axis, n in shown.items())
        nearest = grid.ranks if asked.shard else max(1, trainer.ranks // grid.ranks) * grid.ranks
        problem = f"{sizes} do not share {trainer.ranks} ranks evenly"
        fix = f"Set trainer.ranks to {nearest}, or sizes whose product it is"
        yield Mistake("trainer.parallel", problem, fix)
    elif grid.data_ranks % grid.expert:
        ranks = f"{grid.expert} of {grid.data_ranks} ranks"
        problem = f"experts are dealt over {ranks} with rows of their own, which leaves some out"
        fix = "Set it to a divisor of data x shard"
        yield Mistake("trainer.parallel.expert", problem, fix)
