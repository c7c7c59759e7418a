"""Packed micro-batches: from rows of tokens to the tensors of one forward pass.

Shared prefixes of rows in one group are packed once (`prefixes`), so a pack consists of trees of rows.

Three pure functions distribute the rows, with equal results on every rank: `deal_groups` deals whole groups
to the minibatches (optimizer updates) of a step, `deal_rows` the rows of a minibatch to the ranks by what
they cost, `spread` the rows of one rank to as many micro-batches as every other has. A rank with too few rows
gets empty micro-batches, whose passes add nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_async.trajectory.routes import no_route
from trainer_service.data.flops import TOKENS_ALONE, RowCost
from trainer_service.data.prefixes import Branching, Runs, Tree, branching_of, places_of, plant, runs_of
from trainer_service.data.rows import TrainingRow, joined
from trainer_service.errors import BatchError
from trainer_service.ranks import Ranks


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass of T tokens with S sampled units. T ≥ 1 and S may be 0 (an empty pass)."""

    input_ids: Tensor
    """i64 [1, T]"""
    position_ids: Tensor
    """i64 [1, T]: the token's place in its row."""
    runs: Runs
    branching: list[Branching]
    """Structure of the trees of each run, for attention."""
    shared_tokens: int
    """Tokens that it would have more if every row were packed whole."""
    predict: Tensor
    """i64 [S]: the place in the pack whose logits predict the unit."""
    own: Tensor | None
    """i64 [S]: the place of the unit's own token; None if a row's last token is not fed."""
    target: Tensor
    """i64 [S]: the unit's token id."""
    temperature: Tensor
    """f32 [S]"""
    episode: Tensor
    """i64 [S]: index into the step's episodes."""
    routes: Tensor | None = None
    """i16 [L, T, K]: for each layer of experts, the experts that the engine chose for the token; -1 if the
    route is unknown or the expert was dropped. None if the model chooses all experts itself."""

    @property
    def n_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def replayed_tokens(self) -> int:
        """Number of its tokens that have a route, in some layer at least."""
        return 0 if self.routes is None else int((self.routes >= 0).any(-1).any(0).sum())

    @property
    def n_units(self) -> int:
        return self.target.shape[0]


def plan_passes(
    rows: Sequence[TrainingRow],
    ranks: Ranks,
    budget: int,
    cost: RowCost = TOKENS_ALONE,
    *,
    groups: NDArray[np.int64] | None = None,
) -> list[list[TrainingRow]]:
    """Return this rank's rows, divided into forward passes of at most `budget` tokens, or on several ranks at
    most the length of the longest row of all. There is at least one pass, and equally many on all ranks, of
    similar `cost`. All ranks call it.

    `groups` i64 [E] has the group of each episode of the batch; with it, rows of one group share prefixes.
    """
    longest = max((row.packed_length for row in rows), default=0)
    if ranks.world > 1:
        # A longer row has a pass of its own, for which others wait: they may as well do as much meanwhile.
        budget = ranks.largest(max(budget, longest))
    trees = [Tree([row]) for row in rows] if groups is None else plant(rows, groups, budget, cost)
    rooms = [tree.room for tree in trees]
    plan = pack(rooms, budget) or [[]]
    if ranks.world > 1:
        costs = [cost.of(tree.n_tokens, tree.n_units) for tree in trees]
        plan = spread(rooms, costs, budget, ranks.largest(len(plan)))
    sorted_trees = (sorted((trees[i] for i in chosen), key=lambda tree: -tree.n_tokens) for chosen in plan)
    return [[row for tree in chosen for row in tree.rows] for chosen in sorted_trees]


def build_micro_batch(
    rows: Sequence[TrainingRow],
    *,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack rows in the given order, each without the prefix that it shares with the previous row.

    An empty list gives a pass of one token without units, for a rank that has run out of rows.
    """
    shared = np.array([row.shared for row in rows] or [0])
    lengths = np.array([row.packed_length for row in rows] or [1]) - shared
    starts = np.cumsum(lengths) - lengths
    ids = joined([row.fed[row.shared :] for row in rows] or [np.zeros(1)], np.int64)
    positions = np.arange(len(ids)) - np.repeat(starts - shared, lengths)
    runs = runs_of(np.add.reduceat(lengths, np.flatnonzero(shared == 0)).tolist())
    counts = [len(row.position) for row in rows]
    episode = np.repeat(np.array([row.episode for row in rows], np.int64), counts)

    def tensor(array: NDArray, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

    return MicroBatch(
        input_ids=tensor(ids, np.int64)[None],
        position_ids=tensor(positions, np.int64)[None],
        runs=runs,
        branching=branching_of(runs, positions, device),
        shared_tokens=int(shared.sum()),
        predict=tensor(places_of(rows, starts) if rows else episode, np.int64),
        own=tensor(places_of(rows, starts, before=0) if rows else episode, np.int64)
        if all(row.feeds_last for row in rows)
        else None,
        target=tensor(joined([row.token_ids[row.position] for row in rows], np.int64), np.int64),
        temperature=tensor(joined([row.temperature for row in rows], np.float32), np.float32),
        episode=tensor(episode, np.int64),
        routes=None if (routes := _packed_routes(rows)) is None else tensor(routes, np.int16),
    )


def _packed_routes(rows: Sequence[TrainingRow]) -> NDArray[np.int16] | None:
    """Return i16 [L, T, K] of the tokens in the pack, -1 for none; None if no row has routes."""
    like = next((row.routes for row in rows if row.routes is not None), None)
    if like is None:
        return None
    parts = []
    for row in rows:
        found = np.full((row.packed_length - row.shared, *like.shape[1:]), -1, np.int16)
        if row.routes is not None:
            own = row.routes[row.shared : row.packed_length]
            found = np.where(own == no_route(own.dtype), -1, own.astype(np.int16))
        parts.append(found)
    return np.concatenate(parts).swapaxes(0, 1)


def deal_groups(n_groups: int, minibatches: int) -> list[list[int]]:
    """Group indices of each minibatch: in order, sizes that differ by at most one."""
    if n_groups < minibatches:
        raise BatchError(
            f"a step of {n_groups} groups cannot be cut into {minibatches} minibatches of whole groups: "
            "lower trainer.minibatches to at most buffer.batch_groups."
        )
    cuts = [index * n_groups // minibatches for index in range(minibatches + 1)]
    return [list(range(start, end)) for start, end in pairwise(cuts)]


Share = dict[int, list[int]]
"""One rank's share: index of an episode -> numbers of its rows, both ascending."""


def deal_episodes(
    costs: Sequence[Sequence[int]], ranks: int, groups: Sequence[int] | None = None
) -> list[Share]:
    """Deal as `deal_rows`, with all rows of an episode in one share."""
    shares = deal_rows([[sum(rows)] for rows in costs], ranks, groups)
    return [
        {episode: [place for place, cost in enumerate(costs[episode]) if cost] for episode in share}
        for share in shares
    ]


def deal_rows(costs: Sequence[Sequence[int]], ranks: int, groups: Sequence[int] | None = None) -> list[Share]:
    """Return the share of each rank. `costs` has the cost of each row of each episode, 0 for an untrained
    row. `groups` [E] has the group of each episode; without it each episode is a group.

    The costliest piece goes first, to the rank with the least. A piece is a whole group, because prefixes are
    shared on one rank only, unless that would put the rank above the ideal: the larger of the ranks' mean and
    the costliest row. Then its episodes are dealt singly, and where one of those is still too much, which
    several ranks then fetch, its rows. Every row that costs something is in exactly one share, and every
    episode in at least one, if without rows: whoever has it fetches its bytes and checks them. No share costs
    more than the ranks' mean and the costliest row together. Ties go to the lower index.

    The rule is that of Graham (1969), "Bounds on multiprocessing timing anomalies".
    """
    shares: list[Share] = [{} for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    total, largest = sum(map(sum, costs)), max((cost for rows in costs for cost in rows), default=0)
    members: dict[int, list[int]] = {}
    for episode, group in enumerate(range(len(costs)) if groups is None else groups):
        members.setdefault(group, []).append(episode)
    pieces = [(-sum(sum(costs[e]) for e in held), held[0], GROUP, group) for group, held in members.items()]
    heapq.heapify(pieces)
    while pieces:
        negative, episode, row, group = heapq.heappop(pieces)
        load, rank = loads[0]
        after = load - negative
        held = members[group] if row == GROUP else [episode]
        rows = [
            (e, place) for e in held for place, cost in enumerate(costs[e]) if cost and row in (place, *ALL)
        ]
        if len(rows) > 1 and after * ranks > max(total, largest * ranks):
            for e, place in rows if len(held) == 1 else ((e, WHOLE) for e in held):
                heapq.heappush(
                    pieces, (-sum(costs[e]) if place == WHOLE else -costs[e][place], e, place, group)
                )
            continue
        heapq.heapreplace(loads, (after, rank))
        for e in held:
            shares[rank].setdefault(e, []).extend(place for owner, place in rows if owner == e)
    return [{episode: sorted(share[episode]) for episode in sorted(share)} for share in shares]


WHOLE, GROUP = ALL = (-1, -2)  # Row of a piece that is a whole episode, or a whole group


def spread(lengths: Sequence[int], costs: Sequence[int], budget: int, passes: int) -> list[list[int]]:
    """Return the row indices of each of `passes` micro-batches of at most `budget` tokens, the costliest
    first, so that ranks in step run their costliest passes together; `passes` is at least what `pack` needs.

    The costliest row goes first, to the micro-batch with room for it that costs least. Where a row finds no
    room, they are filled one after the other as `pack` fills them, and the rest is empty.
    """
    plan: list[list[int]] = [[] for _ in range(passes)]
    tokens, loads = [0] * passes, [0] * passes
    for index in sorted(range(len(lengths)), key=lambda i: (-costs[i], -lengths[i], i)):
        free = (n for n in range(passes) if not tokens[n] or tokens[n] + lengths[index] <= budget)
        number = min(free, key=lambda n: (loads[n], n), default=None)
        if number is None:
            plan = pack(lengths, budget)
            plan += [[] for _ in range(passes - len(plan))]
            break
        plan[number].append(index)
        tokens[number] += lengths[index]
        loads[number] += costs[index]
    plan.sort(key=lambda rows: -sum(costs[index] for index in rows))
    return [sorted(rows, key=lambda i: (-lengths[i], i)) for rows in plan]


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row indices of each micro-batch, best-fit decreasing: no two would fit into one.

    A row longer than `budget` tokens has a micro-batch of its own. Inside a micro-batch rows go from long
    to short, so that rows of one length are neighbours (see `attention`).
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
    return bins
