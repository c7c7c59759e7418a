"""How the ranks of a trainer share the work: `trainer.parallel`, and the grid of ranks that it comes to.

The ranks are a grid of pipeline x data x shard x sequence x tensor places. The innermost axis is `tensor`, so
ranks that talk most follow each other and are on one host. Rows of a batch are dealt over data x shard; ranks
that differ in the other axes alone work on the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

from areal_async.base.mistakes import Mistake
from areal_async.config.job import TrainerSection

AXES = ("pipeline", "data", "shard", "sequence", "tensor")
"""From the outermost to the innermost."""


@dataclass(frozen=True)
class RankGrid:
    """The sizes of a trainer's grid, all of them known."""

    data: int = 1
    shard: int = 1
    pipeline: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, trainer: TrainerSection) -> RankGrid:
        """What a job's `trainer` section says. `shard` is cut off where the ranks are not shared evenly,
        which `parallel_mistakes` tells."""
        asked = trainer.parallel
        others = prod(getattr(asked, axis) for axis in AXES if axis != "shard")
        shard = asked.shard or max(1, trainer.ranks // others)
        return cls(asked.data, shard, asked.pipeline, asked.sequence, asked.tensor, asked.expert)

    @property
    def ranks(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """Shares into which a batch is dealt."""
        return self.data * self.shard


def parallel_mistakes(trainer: TrainerSection, axes: Collection[str]) -> Iterator[Mistake]:
    """What is wrong with `trainer.parallel` for a back end that has the `axes`."""
    grid, asked = RankGrid.of(trainer), trainer.parallel
    for axis in (*AXES, "expert"):
        if axis not in axes and (getattr(asked, axis) or 1) > 1:
            able = "fsdp has data, shard and sequence; megatron data, shard, tensor, pipeline and expert"
            yield Mistake(
                f"trainer.parallel.{axis}",
                f"trainer.backend {trainer.backend} does not share work that way",
                f"Leave it out, or use another back end: {able}",
                ("trainer.backend",),
            )
    if grid.ranks != trainer.ranks:
        sizes = " x ".join(
            f"{getattr(grid, axis)} ({axis})"
            for axis in AXES
            if getattr(grid, axis) > 1 or (axis == "shard" and asked.shard)
        )
        nearest = grid.ranks if asked.shard else max(1, trainer.ranks // grid.ranks) * grid.ranks
        yield Mistake(
            "trainer.parallel",
            f"{sizes} do not share {trainer.ranks} ranks evenly",
            f"Set trainer.ranks to {nearest}, or sizes whose product it is",
            ("trainer.ranks",),
        )
    elif grid.data_ranks % grid.expert:
        yield Mistake(
            "trainer.parallel.expert",
            f"experts are dealt over {grid.expert} of {grid.data_ranks} ranks with rows of their own, "
            "which leaves some out",
            "Set it to a divisor of data x shard",
            ("trainer.parallel.shard",),
        )
