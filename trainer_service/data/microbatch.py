"""Packed micro-batches: tensors of one forward pass, from rows of tokens.

A prefix that rows of a group share is packed only once (`prefixes.py`), so a pack consists of trees of rows.

Three pure functions distribute the work; every rank computes the same result. `deal_groups` assigns whole
groups to the minibatches (optimizer updates) of a step. `deal_rows` assigns the rows of a minibatch to ranks
by cost. `spread` assigns the rows of one rank to micro-batches. All ranks have the same number of
micro-batches. If a rank has too few rows, some of its micro-batches are empty, and their passes contribute
nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from areal_async.trajectory.routes import no_route
from trainer_service.data.flops import TOKENS_ALONE, RowCost
from trainer_service.data.images import PackedImages
from trainer_service.data.prefixes import (
    Branching,
    Runs,
    Tree,
    branching_of,
    places_of,
    plant,
    rows_of,
    runs_of,
)
from trainer_service.data.ragged import Ragged, ragged_of
from trainer_service.data.rows import TrainingRow, joined
from trainer_service.errors import BatchError
from trainer_service.ranks import Ranks
from trainer_service.transfer import on_device


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass of T tokens with S sampled units. T ≥ 1; S is 0 in an empty pass."""

    input_ids: Tensor
    """i64 [1, T]"""
    position_ids: Tensor
    """i64 [1, T]: position of the token in its row."""
    position: NDArray[np.int64]
    """[T]: the same on the host. The structure of the pack follows from it."""
    shared_tokens: int
    """Number of tokens saved because rows share a prefix."""
    predict: Tensor
    """i64 [S]: place in the pack whose logits predict the unit."""
    own: Tensor | None
    """i64 [S]: place in the pack of the unit itself. None if the last token of a row is not in the pack."""
    target: Tensor
    """i64 [S]: token id of the unit."""
    temperature: Tensor
    """f32 [S]"""
    episode: Tensor
    """i64 [S]: index into the step's episodes."""
    routes: Tensor | None = None
    """i16 [L, T, K]: the experts that the engine chose in each layer of experts. An entry is -1 if the engine
    reported no expert there or left one out. The value is None if the model's own routers choose for all
    tokens."""
    replayed_tokens: int = 0
    """Number of tokens with a route in at least one layer."""
    images: PackedImages | None = None
    """Images of the rows; None if no model has to compute features of images."""
    _padded: dict[int, MicroBatch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def n_tokens(self) -> int:
        return self.input_ids.shape[1]

    @cached_property
    def runs(self) -> Runs:
        """Trees of equal length, for exact attention."""
        return runs_of(np.diff(np.append(np.flatnonzero(self.position == 0), self.n_tokens)).tolist())

    @cached_property
    def branching(self) -> list[Branching]:
        """Structure of the trees of each run, for exact attention."""
        return branching_of(self.runs, self.position, self.input_ids.device)

    @cached_property
    def ragged(self) -> Ragged:
        """Structure for a single attention call."""
        return ragged_of(self.position, self.input_ids.device)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Complete rows, for a model that computes them side by side (`prefixes.rows_of`)."""
        places, back = (torch.from_numpy(each).to(self.input_ids.device) for each in rows_of(self.position))
        return places, back

    def padded(self, n_tokens: int) -> MicroBatch:
        """Return the micro-batch with `n_tokens` tokens. Those that it lacks are a last row without units."""
        lacking = n_tokens - self.n_tokens
        if lacking and n_tokens not in self._padded:
            row = torch.arange(lacking, device=self.input_ids.device)[None]
            self._padded[n_tokens] = replace(
                self,
                input_ids=torch.cat([self.input_ids, self.input_ids[:, -1:].expand(1, lacking)], 1),
                position_ids=torch.cat([self.position_ids, row], 1),
                position=np.append(self.position, np.arange(lacking)),
                routes=None if self.routes is None else F.pad(self.routes, (0, 0, 0, lacking), value=-1),
            )
        return self._padded[n_tokens] if lacking else self

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
    side_by_side: bool = False,
) -> list[list[TrainingRow]]:
    """Distribute this rank's rows over forward passes of at most `budget` tokens. All ranks call it.

    All ranks have the same number of passes, at least one, with similar `cost`. On several ranks, the budget
    is at least the longest row of any rank. If `groups` i64 [E] has the group of each episode of the batch,
    rows of a group share their prefix. With `side_by_side` they do not, and each row counts as the longest of
    its pass."""
    longest = max((row.packed_length for row in rows), default=0)
    if ranks.world > 1:
        # A longer row gets its own pass, and others wait for it: let their passes be as large.
        budget = ranks.largest(max(budget, longest))
    if side_by_side:
        filled = pack_side_by_side([row.packed_length for row in rows], budget) or [[]]
        lacking = ranks.largest(len(filled)) - len(filled) if ranks.world > 1 else 0
        return [[rows[i] for i in chosen] for chosen in (*filled, *([] for _ in range(lacking)))]
    trees = [Tree.of(row) for row in rows] if groups is None else plant(rows, groups, budget, cost)
    rooms = [tree.room for tree in trees]
    plan = pack(rooms, budget) or [[]]
    if ranks.world > 1:
        costs = [cost.of(tree.n_tokens, tree.n_units, tree.n_of_images) for tree in trees]
        plan = spread(rooms, costs, budget, ranks.largest(len(plan)))
    sorted_trees = (sorted((trees[i] for i in chosen), key=lambda tree: -tree.n_tokens) for chosen in plan)
    return [[row for tree in chosen for row in tree.rows] for chosen in sorted_trees]


def build_micro_batch(
    rows: Sequence[TrainingRow],
    *,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack rows in the given order, each without the prefix that it shares with the previous row.

    Without rows, the result is the pass of a rank without work: one token and no unit."""
    shared = np.array([row.shared for row in rows] or [0])
    lengths = np.array([row.packed_length for row in rows] or [1]) - shared
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(starts - shared, lengths)
    tokens = joined([row.token_ids for row in rows] or [np.zeros(1)], np.int64)
    sizes = [len(row.token_ids) for row in rows] or [1]
    begins = np.cumsum(sizes) - sizes
    counts = [len(row.position) for row in rows] or [0]
    episode = np.repeat(np.array([row.episode for row in rows] or [0], np.int64), counts)

    routes = _packed_routes(rows)
    arrays = {
        "input_ids": tokens[np.repeat(begins, lengths) + positions][None],
        "position_ids": positions[None],
        "predict": places_of(rows, starts) if rows else episode,
        "target": tokens[np.repeat(begins, counts) + joined([row.position for row in rows], np.int64)],
        "temperature": joined([row.temperature for row in rows], np.float32),
        "episode": episode,
    }
    if all(row.feeds_last for row in rows):
        arrays["own"] = places_of(rows, starts, before=0) if rows else episode
    if routes is not None:
        arrays["routes"] = routes
    tensors: dict[str, Any] = {"own": None, **on_device(arrays, device)}
    return MicroBatch(
        position=positions,
        shared_tokens=int(shared.sum()),
        replayed_tokens=0 if routes is None else int((routes >= 0).any(-1).any(0).sum()),
        images=PackedImages(rows, starts.tolist()) if any(row.fed_images for row in rows) else None,
        **tensors,
    )


def _packed_routes(rows: Sequence[TrainingRow]) -> NDArray[np.int16] | None:
    """Return i16 [L, T, K]: the routes of the rows' tokens in the pack; -1 for none. Returns None if no row
    has routes."""
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
    """Return the group indices of each minibatch, in order. Their sizes differ by at most one."""
    if n_groups < minibatches:
        raise BatchError(
            f"a step of {n_groups} groups cannot be cut into {minibatches} minibatches of whole groups: "
            "lower trainer.minibatches to at most buffer.batch_groups."
        )
    cuts = [index * n_groups // minibatches for index in range(minibatches + 1)]
    return [list(range(start, end)) for start, end in pairwise(cuts)]


Share = dict[int, list[int]]
"""Share of one rank: episode index -> numbers of its rows, both ascending."""


def deal_episodes(
    costs: Sequence[Sequence[int]], ranks: int, groups: Sequence[int] | None = None
) -> list[Share]:
    """Distribute like `deal_rows`, but keep all rows of an episode in one share."""
    shares = deal_rows([[sum(rows)] for rows in costs], ranks, groups)
    return [
        {episode: [place for place, cost in enumerate(costs[episode]) if cost] for episode in share}
        for share in shares
    ]


def deal_rows(costs: Sequence[Sequence[int]], ranks: int, groups: Sequence[int] | None = None) -> list[Share]:
    """Return the share of each rank. `costs` has the costs of each episode's rows; an untrained row has cost
    0.

    `groups` [E] are the groups of the episodes. Without `groups`, every episode is its own group. Pieces are
    assigned in descending order of cost, each to the rank with the smallest load. A piece is a whole group if
    possible, because a prefix can be shared only on one rank. If a group would raise the rank above the ideal
    load, its episodes are assigned one by one. The ideal load is the larger of the ranks' mean and the
    costliest row. If a single episode is still too large, its rows are assigned one by one, and several ranks
    fetch it.

    Every row with a cost is in exactly one share. Every episode is in at least one share, even without rows,
    so that some rank fetches and checks its bytes. No share costs more than the ranks' mean plus the
    costliest row. Ties go to the lower index. Source of the rule: Graham (1969), "Bounds on multiprocessing
    timing anomalies"."""
    if ranks == 1:
        return [{e: [place for place, cost in enumerate(rows) if cost] for e, rows in enumerate(costs)}]
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


WHOLE, GROUP = ALL = (-1, -2)  # Row number of a whole episode, and of a whole group


def spread(lengths: Sequence[int], costs: Sequence[int], budget: int, passes: int) -> list[list[int]]:
    """Return the row indices of each of `passes` micro-batches with at most `budget` tokens.

    `passes` must be at least the number that `pack` needs. Rows are assigned in descending order of cost,
    each to the cheapest micro-batch with room for it. If there is no room for a row, the result is that of
    `pack`, filled up with empty micro-batches. The costliest micro-batch is returned first, so that the ranks
    run their costliest passes at the same time."""
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
    """Return the row indices of each micro-batch by best-fit decreasing. No two micro-batches fit into one.

    A row longer than `budget` tokens has its own micro-batch. Rows are sorted by descending length within a
    micro-batch, so that rows of equal length are neighbours (see `attention`).
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


def pack_side_by_side(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the row indices of each micro-batch whose rows are filled up to its longest.

    A micro-batch has at most `budget` tokens with what fills the rows up, or one row. Rows are assigned in
    descending order of length, so that little is filled up."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    while order:
        fitting = max(1, budget // lengths[order[0]])
        bins.append(order[:fitting])
        order = order[fitting:]
    return bins
