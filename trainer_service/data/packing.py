"""Who trains what, and in which forward pass: pure, deterministic, free of tensors.

Three decisions, each a function of its arguments alone, so that every rank takes the same one:

- `deal_groups`: whole groups to the minibatches (optimizer updates) of a step;
- `deal_episodes`: the episodes of a minibatch to the ranks, balanced by their units;
- `pack`: the rows of one rank to micro-batches (packed forward passes) by a token budget.

Promises: each item lands in exactly one place; a group is never split between two minibatches; groups are
given by index, never by position. Every rank has the same number of micro-batches once all have passed the
largest count of any as `at_least`; a rank short of rows has empty ones, passes that add nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

from trainer_service.errors import BatchError


def deal_groups(n_groups: int, minibatches: int) -> list[list[int]]:
    """Group indices of each minibatch: in order, sizes that differ by at most one."""
    if n_groups < minibatches:
        raise BatchError(
            f"a step of {n_groups} groups cannot be cut into {minibatches} minibatches of whole groups: "
            "lower trainer.minibatches to at most buffer.batch_groups."
        )
    cuts = [index * n_groups // minibatches for index in range(minibatches + 1)]
    return [list(range(start, end)) for start, end in pairwise(cuts)]


def deal_episodes(units: Sequence[int], ranks: int) -> list[list[int]]:
    """Episode indices of each rank, ascending: the largest episode first, to the rank with the least.

    The ranks' sums differ by at most the largest episode. Ties go to the lower index."""
    heap = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(units)), key=lambda i: (-units[i], i)):
        load, rank = heapq.heappop(heap)
        shares[rank].append(index)
        heapq.heappush(heap, (load + units[index], rank))
    return [sorted(share) for share in shares]


def pack(lengths: Sequence[int], budget: int, *, at_least: int = 0) -> list[list[int]]:
    """Row indices of each micro-batch, best-fit decreasing: no two would fit into one.

    A row longer than `budget` tokens has a micro-batch of its own. Inside a micro-batch rows go from long
    to short, so that rows of one length are neighbours (see `attention`). Padded with empty micro-batches
    up to `at_least`.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length < 1:
            raise BatchError(f"row {index} has {length} tokens; a row holds at least one")
        place = bisect_left(free, (length, 0))
        if place == len(free):
            bins.append([index])
            left, where = budget - length, len(bins) - 1
        else:
            left, where = free.pop(place)
            left -= length
            bins[where].append(index)
        if left > 0:
            insort(free, (left, where))
    return bins + [[] for _ in range(at_least - len(bins))]
