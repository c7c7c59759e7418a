"""Shared prefixes: tokens at the beginning of several rows of a group, which are packed and computed only
once.

Rows of a group share their prompt. Turns share the earlier turns, and branches share their trunk. `plant`
sorts the rows of each group so that rows with common prefixes are neighbours, and makes *trees* of them. The
first row of a tree is packed completely. Every other row is packed without its first `shared` tokens, which
it has in common with the previous row. The tokens of a tree are thus in depth-first order, and each of them
keeps its position within its row.

The structure of a tree follows from the positions of its tokens alone. Token j precedes token i on some row
if and only if j < i and all tokens after j, up to and including i, have larger positions than j. If one of
them has a smaller or equal position, the branch of j has ended before i. `branching_of` derives the structure
for attention from this rule.

Rows share only identical token ids at identical positions, and only within a group. Hidden states depend on
nothing else except images and replayed routes. So no token is shared from the first image on that the rows do
not have in common. Tokens are not shared either if their routes differ, or if only one of them has a route.
Versions, temperatures and behaviour log-probs belong to units, and units are never shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from zlib import crc32

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from trainer_service.data.flops import TOKENS_ALONE, RowCost
from trainer_service.data.rows import TrainingRow
from trainer_service.transfer import on_device

DENSE_TOKENS = 256
"""Largest tree, in tokens, that uses one attention mask over all its tokens. Larger trees use one call for
each branch."""
LEAST_BRANCH = 64
"""Smallest prefix, in tokens, that is shared in a tree larger than `DENSE_TOKENS`. A shorter prefix is
repeated, because this costs less than another attention call."""

SEEN_PER_TOKEN = 4
"""Number of copied keys that count as one token of a budget. Branches copy the keys of their prefixes, except
in small trees on the path with a mask."""

Runs = list[tuple[int, int]]
"""`(count, length)` of each sequence of consecutive trees of equal length."""


@dataclass(slots=True)
class Tree:
    """Rows with a shared prefix; `rows[0].shared` is 0."""

    rows: list[TrainingRow]
    n_tokens: int
    """Number of the tree's tokens in a pack."""
    n_units: int
    fed: int
    """Number of tokens of the rows without sharing."""
    n_of_images: int = 0
    """Number of the tree's tokens that stand for images."""

    @classmethod
    def of(cls, row: TrainingRow) -> Tree:
        return cls([row], row.packed_length, len(row.position), row.packed_length, row.image_tokens())

    @property
    def room(self) -> int:
        """Size of the tree for a budget of tokens (`_room`)."""
        return _room(self.n_tokens, self.n_units, self.fed)

    def take(self, row: TrainingRow, shared: int, budget: int) -> bool:
        """Add a row with `shared` tokens of the previous row, if the tree then fits into `budget`. Return
        whether it does."""
        length = row.packed_length
        tokens, units = self.n_tokens + length - shared, self.n_units + len(row.position)
        fed = self.fed + length
        if _room(tokens, units, fed) > budget:
            return False
        self.rows.append(replace(row, shared=shared))
        self.n_tokens, self.n_units, self.fed = tokens, units, fed
        self.n_of_images += row.image_tokens(shared)
        return True


def _room(tokens: int, units: int, fed: int) -> int:
    """Return the size of rows for a budget of tokens. `tokens` is the rows' size in a pack, and `fed` is
    their size without sharing.

    The number of units counts too, because each unit has its own hidden state, and a tree of equal rows may
    have more units than tokens."""
    return max(tokens, units, fed // SEEN_PER_TOKEN)


def plant(
    rows: Sequence[TrainingRow], groups: NDArray[np.int64], budget: int, cost: RowCost = TOKENS_ALONE
) -> list[Tree]:
    """Return the rows as trees. Each tree either has at most `budget` tokens and units, or consists of one
    row. `groups` i64 [E] are the groups of the batch's episodes.

    If a tree would be too large, the next tree repeats its prefix."""
    if not rows:
        return []
    group = groups[[row.episode for row in rows]].tolist()
    order = sorted(range(len(rows)), key=lambda i: (group[i], _sorting(rows[i])))
    common = _common([rows[i] for i in order], [group[i] for i in order])
    trees: list[Tree] = []
    first = 0
    for end in [*(np.flatnonzero(common == 0) + 1).tolist(), len(order)]:
        own = [rows[i] for i in order[first:end]]
        shared = _worth_it([row.packed_length for row in own], [0, *common[first : end - 1]], cost)
        trees += _trees(own, shared, budget)
        first = end
    return trees


def _sorting(row: TrainingRow) -> bytes:
    """Return a sort key that makes rows with common prefixes neighbours. It joins the ids of all tokens, each
    with a hash of its routes if it has any. Tokens of an image have a hash of the image as id."""
    fed = row.fed.copy() if row.images else row.fed
    for image in row.images:
        fed[image.first : image.first + image.count] = crc32(image.digest.encode()) >> 1
    if row.routes is None:
        return fed.tobytes()
    flat = row.routes[: len(fed)].reshape(len(fed), -1)
    factors = 2 * np.random.default_rng(0).integers(1 << 62, size=flat.shape[1], dtype=np.uint64) + 1
    return np.stack([fed.astype(np.uint64), flat @ factors], axis=1).tobytes()


def _common(rows: Sequence[TrainingRow], group: Sequence[int]) -> NDArray[np.int64]:
    """Return i64 [R - 1]: number of leading tokens, with routes and images, that each row and the next one
    have in common. It is 0 across groups. No row may be empty."""
    tokens = [row.fed for row in rows]
    lengths = np.array([len(ids) for ids in tokens])
    starts = np.cumsum(lengths) - lengths
    window = np.minimum(lengths[:-1], lengths[1:])
    if not len(window):
        return window
    ends = np.cumsum(window)
    within = np.arange(ends[-1]) - np.repeat(ends - window, window)
    flat = np.concatenate(tokens)
    one, other = np.repeat(starts[:-1], window) + within, np.repeat(starts[1:], window) + within
    differs = flat[one] != flat[other]
    if any(row.routes is not None for row in rows):
        differs |= _routed_otherwise(rows, window)
    same = np.minimum.reduceat(np.where(differs, within, np.repeat(window, window)), ends - window)
    if any(row.images for row in rows):
        same = np.minimum(same, [_without_other_image(*pair) for pair in pairwise(rows)])
        same = np.array([_without_part_of_image(*pair) for pair in zip(rows, same.tolist(), strict=False)])
    return np.where(np.diff(group) == 0, same, 0)


def _without_other_image(one: TrainingRow, other: TrainingRow) -> int:
    """Return the number of tokens before the first image that the rows do not have in common."""
    for pair in zip_longest(one.images, other.images):
        here = [image for image in pair if image is not None]
        if len({(image.digest, image.first, image.count) for image in here}) > 1 or len(here) == 1:
            return min(image.first for image in here)
    return min(one.packed_length, other.packed_length)


def _without_part_of_image(row: TrainingRow, count: int) -> int:
    """Return `count` tokens of a row, or fewer if the last of them are the beginning of an image."""
    parted = [each.first for each in row.images if each.first < count < each.first + each.count]
    return min(parted, default=count)


def _routed_otherwise(rows: Sequence[TrainingRow], window: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool: for the first `window` i64 [R - 1] tokens of each row and the next one, whether their
    routes differ."""

    def differ(one: TrainingRow, other: TrainingRow, count: int) -> NDArray[np.bool_]:
        if one.routes is None or other.routes is None:
            return np.full(count, one.routes is not other.routes)
        found: NDArray[np.bool_] = (one.routes[:count] != other.routes[:count]).any((1, 2))
        return found

    return np.concatenate([differ(*pair, n) for pair, n in zip(pairwise(rows), window.tolist(), strict=True)])


def _worth_it(lengths: list[int], shared: list[int], cost: RowCost) -> list[int]:
    """Return how many shared tokens of neighbouring rows are packed once.

    A small tree has one mask over all pairs of its tokens, so either all shared tokens are packed once, or
    none. In a large tree, only long prefixes are packed once."""
    saved = sum(shared)
    tokens = sum(lengths) - saved
    if tokens > DENSE_TOKENS:
        return [n if n >= LEAST_BRANCH else 0 for n in shared]
    # Causal attention computes half of a row's pairs, so the coefficient is for half a pair.
    more_pairs = 2 * tokens * tokens - sum(length * length for length in lengths)
    return shared if cost.linear * saved >= cost.attention * more_pairs else [0] * len(shared)


def _trees(rows: list[TrainingRow], shared: list[int], budget: int) -> list[Tree]:
    """Return trees of neighbouring rows. Each row has `shared` tokens in common with the previous one."""
    trees: list[Tree] = []
    for row, n in zip(rows, shared, strict=True):
        if not n or not trees[-1].take(row, n, budget):
            trees.append(Tree.of(row))
    return trees


def places_of(
    rows: Sequence[TrainingRow], starts: NDArray[np.int64], *, before: int = 1
) -> NDArray[np.int64]:
    """Return i64 [S]: for each unit of the rows, the place in the pack of the previous token, which predicts
    the unit.

    With `before` 0, return the place of the unit's own token instead. `starts` i64 [R] are the places of each
    row's first own token."""
    shared = np.array([row.shared for row in rows], np.int64)
    row = np.repeat(np.arange(len(rows)), [len(each.position) for each in rows])
    at = np.concatenate([each.position for each in rows]) - before
    while (inherited := at < shared[row]).any():
        row[inherited] -= 1
    return starts[row] + at - shared[row]


@dataclass(frozen=True)
class Masked:
    """Attention mask for a run of small trees."""

    position: Tensor
    """i64 [count, length]"""
    mask: Tensor
    """bool [count, 1, length, length]: whether the token of the row attends to the token of the column."""


@dataclass(frozen=True)
class Branches:
    """One large tree as branches. A branch is a sequence of tokens that continues a prefix."""

    queries: list[int]
    """Number of tokens in each branch, in order."""
    cuts: list[int]
    """Number of tokens in each piece. Pieces are branches, cut at the beginnings of other branches."""
    sees: list[list[int]]
    """Pieces that each branch attends to: the pieces of its prefix and its own, in order."""


Branching = Masked | list[Branches] | None
"""Structure of a run. The value is None if every tree has a single row, so that plain causal attention is
correct."""


def branching_of(runs: Runs, position: NDArray[np.int64], device: torch.device | str) -> list[Branching]:
    """Return the structure of each run, from the positions i64 [T] of the pack's tokens."""
    found: list[Branching] = []
    start = 0
    for count, length in runs:
        of_run = position[start : start + count * length].reshape(count, length)
        start += count * length
        if (of_run == np.arange(length)).all():
            found.append(None)
        elif length <= DENSE_TOKENS:
            found.append(Masked(**on_device({"position": of_run, "mask": _mask(of_run)[:, None]}, device)))
        else:
            found.append([_branches(of_tree) for of_tree in of_run])
    return found


def _mask(position: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the attention mask bool [count, length, length] for positions [count, length]."""
    length = position.shape[1]
    after = np.tri(length, k=-1, dtype=np.bool_)  # [i, j]: i comes after j
    lowest = np.where(after, position[:, :, None], length)
    np.minimum.accumulate(lowest, axis=1, out=lowest)
    return (lowest > position[:, None, :]) & after | np.eye(length, dtype=np.bool_)


def paths_of(position: NDArray[np.int64], starts: list[int], ends: list[int]) -> list[list[tuple[int, int]]]:
    """Return, for each branch [start, end) of consecutive trees, the ranges [first, last) of tokens that it
    attends to, in order. The last range is the branch itself. `position` i64 [T] are the tokens' positions.
    """
    paths: list[list[tuple[int, int]]] = []
    path: list[tuple[int, int]] = []
    for start, end in zip(starts, ends, strict=True):
        depth, kept = int(position[start]), []
        for first, last in path:
            if depth > 0:
                kept.append((first, min(last, first + depth)))
            depth -= last - first
        path = [*kept, (start, end)]
        paths.append(path)
    return paths


def _branches(position: NDArray[np.int64]) -> Branches:
    """Return the branches of one tree with these positions [length]."""
    starts = [0, *(np.flatnonzero(np.diff(position) != 1) + 1).tolist(), len(position)]
    paths = paths_of(position, starts[:-1], starts[1:])
    edges = sorted({edge for path in paths for stretch in path for edge in stretch})
    index = {edge: number for number, edge in enumerate(edges)}
    return Branches(
        queries=[end - start for start, end in pairwise(starts)],
        cuts=[end - start for start, end in pairwise(edges)],
        sees=[[n for first, last in path for n in range(index[first], index[last])] for path in paths],
    )


def runs_of(lengths: Sequence[int]) -> Runs:
    """Return the lengths of packed trees, in order, as pairs of a count and a length: one pair for
    consecutive trees of equal length. Raises `ValueError` for a zero length."""
    if any(length < 1 for length in lengths):
        raise ValueError("a packed sequence holds at least one token")
    return [(sum(1 for _ in same), length) for length, same in groupby(lengths)]


def rows_of(position: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the complete rows of a pack whose tokens have these positions [T] within their rows.

    The first array is i64 [B, L]: the place in the pack of each token of a row. The last token of a row fills
    it up to the longest. The second array is i64 [T]: the index of each token of the pack in the flattened
    rows."""
    starts = np.flatnonzero(np.diff(position, prepend=-2) != 1)
    ends = np.append(starts[1:], len(position))
    longest = int(position.max()) + 1
    places = np.empty((len(starts), longest), np.int64)
    back = position + np.repeat(np.arange(len(starts)) * longest, ends - starts)
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        shared, length = position[start], position[end - 1] + 1
        places[number, :shared] = places[number - 1, :shared]
        places[number, shared:length] = np.arange(start, end)
        places[number, length:] = end - 1
    return places, back
