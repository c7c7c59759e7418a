"""Reading of many short episodes at once, and reading of a header alone.

`unpack_many` joins the columns of all episodes and checks them together, because calls of numpy are most of
the cost of a short episode. A blob that this module does not accept goes to `unpack`. So an episode is
accepted if and only if `unpack` accepts it, and each error comes from `unpack`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.codec import (
    CORE_FRAMES,
    SEGMENT_BYTES,
    Buffer,
    EpisodeHead,
    opened,
    read_head,
    unpack,
)
from areal_async.trajectory.episode import (
    ALL_FLAGS,
    LOGPROB_SLACK,
    MAX_KIND,
    SAMPLED,
    Episode,
    Trained,
    check_calls,
    check_epochs,
    check_header,
)
from areal_async.trajectory.layout import (
    DEFAULT_LIMITS,
    F32,
    I32,
    I64,
    NO_PARENT,
    NO_VERSION,
    TABLE_COLUMNS,
    U8,
    EpisodeHeader,
    EpisodeLimits,
    Segments,
    TrajectoryError,
    Units,
)

SHORT_BYTES = 16 << 10
"""Size up to which the bytes of an episode are copied to be read together with others."""


class OpenBlob(NamedTuple):
    """An episode whose head is read. `spans` has (offset, size) of each frame in `view`."""

    view: memoryview
    spans: list[tuple[int, int]]
    head: EpisodeHead


def unpack_many(
    blobs: Sequence[Buffer], *, limits: EpisodeLimits = DEFAULT_LIMITS
) -> list[Episode | TrajectoryError]:
    """Return the episode of each blob, or the error that `unpack` raises for it.

    The arrays of short episodes are views of joined columns, and those of other episodes are views of their
    blobs."""
    found: list[Episode | TrajectoryError | None] = [None] * len(blobs)
    alike: dict[int, list[tuple[int, OpenBlob]]] = {}
    for index, blob in enumerate(blobs):
        if len(blob) <= SHORT_BYTES and (each := _open(blob, limits)) is not None:
            alike.setdefault(each.head.segments, []).append((index, each))
    for segments, members in alike.items():
        episodes = _read(segments, [each for _, each in members])
        for (index, _), episode in zip(members, episodes, strict=False):
            found[index] = episode
    return [_alone(blob, limits) if each is None else each for blob, each in zip(blobs, found, strict=True)]


def read_header(blob: Buffer, *, limits: EpisodeLimits = DEFAULT_LIMITS) -> tuple[EpisodeHeader, int]:
    """Return the header of a blob and its number of units with mask 1, without a look at the other columns.

    This is for readers of texts. Raises TrajectoryError if the bytes were altered, but does not check the
    invariants of an episode, which the buffer has checked."""
    view, spans = opened(blob, limits)
    head = read_head(view, spans, limits)
    at, size = spans[CORE_FRAMES - 1]
    return head.header, bytes(view[at : at + size]).count(1)


def _alone(blob: Buffer, limits: EpisodeLimits) -> Episode | TrajectoryError:
    try:
        return unpack(blob, limits=limits)
    except TrajectoryError as error:
        return error


def _open(blob: Buffer, limits: EpisodeLimits) -> OpenBlob | None:
    """Return an episode without optional columns and attachments whose header is valid, else None."""
    try:
        view, spans = opened(blob, limits)
        head = read_head(view, spans, limits)
        check_header(head.header)
    except TrajectoryError:
        return None
    plain = head.segments > 0 and head.units > 0 and len(spans) == CORE_FRAMES and not head.header.media
    return OpenBlob(view, spans, head) if plain else None


def _read(n_segments: int, members: Sequence[OpenBlob]) -> list[Episode]:
    """Return the episodes of members with equally many segments, or nothing if one of them is not valid."""
    n, width = len(members), len(TABLE_COLUMNS)
    frames = zip(
        *([each.view[at : at + size] for at, size in each.spans[1:]] for each in members), strict=True
    )
    tables, token_id, logprob, version, mask = (b"".join(parts) for parts in frames)
    rows = np.frombuffer(tables, U8).reshape(n, n_segments * SEGMENT_BYTES)
    table_at, reward_at = n_segments * I64.itemsize, n_segments * (I64.itemsize + width * I32.itemsize)
    anchor = np.ascontiguousarray(rows[:, :table_at]).view(I64)
    table = np.ascontiguousarray(rows[:, table_at:reward_at]).view(I32).reshape(n, width, n_segments)
    reward = np.ascontiguousarray(rows[:, reward_at:]).view(F32)
    units = Units(
        np.frombuffer(token_id, I32),
        np.frombuffer(mask, U8),
        np.frombuffer(logprob, F32),
        np.frombuffer(version, I32),
    )
    n_units = np.array([each.head.units for each in members])
    n_agents = np.array([len(each.head.header.agents) for each in members])
    is_sampled = table[:, TABLE_COLUMNS.index("kind")] == SAMPLED
    if not (_are_segments(table, reward, n_units, n_agents) and _are_units(units, table, is_sampled)):
        return []
    for array in (anchor, table, reward):
        array.setflags(write=False)
    ends = np.cumsum(n_units)
    found = _ranges(units, ends - n_units)
    calls_of: list[list[int]] = [[i for i, each in enumerate(row) if each] for row in is_sampled.tolist()]
    episodes = []
    try:
        for k, (each, end) in enumerate(zip(members, ends.tolist(), strict=True)):
            header, own = each.head.header, slice(end - each.head.units, end)
            n_sampled, lowest, highest = found[k]
            check_calls(header.calls, calls_of[k], len(header.policies))
            epoch = check_epochs(header.epochs, mask[own], n_sampled)
            trained = Trained(n_sampled, lowest, highest, epoch)
            columns = Units(units.token_id[own], units.mask[own], units.logprob[own], units.version[own])
            segments = Segments(table[k], reward[k], anchor[k])
            episodes.append(Episode.of_checked(header, segments, columns, trained))
    except TrajectoryError:
        return []
    return episodes


def _are_segments(
    table: NDArray[np.int32], reward: NDArray[np.float32], n_units: NDArray, n_agents: NDArray
) -> bool:
    """Return whether the invariants of segments hold. `table` is i32 [N, 7, S]."""
    parent, kind, agent, turn, offset, length, flags = (table[:, row] for row in range(len(TABLE_COLUMNS)))
    ends = np.cumsum(length, axis=1)
    return bool(
        (parent >= NO_PARENT).all()
        and (parent < np.arange(parent.shape[1])).all()
        and ((kind >= 0) & (kind <= MAX_KIND)).all()
        and ((agent >= 0) & (agent < n_agents[:, None])).all()
        and (turn >= 0).all()
        and ((flags >= 0) & (flags <= ALL_FLAGS)).all()
        and (length >= 0).all()
        and (offset == ends - length).all()
        and (ends[:, -1] == n_units).all()
        and not np.isinf(reward).any()
    )


def _are_units(units: Units, table: NDArray[np.int32], is_sampled: NDArray[np.bool_]) -> bool:
    """Return whether the invariants of units hold. The lengths of `table` are valid."""
    version, logprob = units.version, units.logprob
    of_sampled = np.repeat(is_sampled.ravel(), table[:, TABLE_COLUMNS.index("length")].ravel())
    return bool(
        version.min() >= NO_VERSION
        and units.token_id.min() >= 0
        and logprob.min() > -math.inf
        and logprob.max() <= LOGPROB_SLACK
        and units.mask.max() <= 1
        and not ((units.mask == 1) & (version < 0)).any()
        and not ((version >= 0) & ~of_sampled).any()
    )


def _ranges(units: Units, starts: NDArray) -> list[tuple[int, int, int]]:
    """Return the number of units with mask 1 of each episode, and their lowest and highest version."""
    trained = units.mask == 1
    count = np.add.reduceat(trained, starts, dtype=np.int64)
    lowest = np.minimum.reduceat(np.where(trained, units.version, np.iinfo(np.int32).max), starts)
    highest = np.maximum.reduceat(np.where(trained, units.version, NO_VERSION), starts)
    lowest[count == 0] = NO_VERSION
    return list(zip(count.tolist(), lowest.tolist(), highest.tolist(), strict=True))
