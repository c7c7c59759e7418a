"""Training rows of an episode: its root-to-leaf paths. Each sampled unit is trained in exactly one row.

`untrainable` finds units that were not sampled from the distribution that is trained. The manifest of a batch
needs the size of each row after units of old versions are masked. `row_sizes` computes these sizes from the
data that `row_profile` returns."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.episode import Episode, PolicyVersions
from areal_async.trajectory.layout import DEFAULT_LIMITS, Call, EpisodeLimits, Media, SizeError, Units


class Row(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One root-to-leaf path of T tokens, as the engine saw it.

    mask[t] == 1 means that token t was sampled and is trained in this row. logprobs[t] is its behaviour
    log-prob, given tokens < t. Arrays are read-only and may be views of the episode."""

    token_ids: NDArray[np.int32]
    """i32 [T]"""
    mask: NDArray[np.uint8]
    """u8 [T]"""
    logprobs: NDArray[np.float32]
    """f32 [T], 0 if no version sampled the unit"""
    versions: NDArray[np.int32]
    """i32 [T], -1 for none"""
    columns: Mapping[str, NDArray]
    """Optional columns of the episode, [T] or [T, width]."""
    path: tuple[int, ...]
    """Segments from root to leaf."""
    lengths: tuple[int, ...]
    """Units of each segment of the path. Their sum is T."""


def seen_by(episode: Episode, policy: str) -> Episode:
    """Return the episode as the trainer of `policy` sees it. Units that other policies sampled become context
    (mask 0)."""
    if episode.versions.keys() <= {policy}:
        return episode
    header, segments, units = episode.header, episode.segments, episode.units
    mask = units.mask.copy()
    for call in header.calls:
        if header.policies[call.policy] != policy:
            first = segments.offset[call.segment]
            mask[first : first + segments.length[call.segment]] = 0
    held = episode.versions.get(policy, PolicyVersions(-1, -1, -1))
    seen = copy(episode)
    seen.units = Units(units.token_id, mask, units.logprob, units.version, units.columns)
    seen.n_sampled = int(mask.sum())
    seen.min_version, seen.max_version, seen.min_epoch = held
    seen.versions = {policy: held} if policy in episode.versions else {}
    return seen


def training_rows(episode: Episode, *, limits: EpisodeLimits = DEFAULT_LIMITS) -> list[Row]:
    """Return the rows of an episode, in the order of their leaves.

    If several leaves share a segment, the row of the first leaf trains it. In the other rows the segment is
    context (mask 0), so each unit with mask 1 is trained in exactly one row. A path without units of its own
    to train gives no row. Raises SizeError if shared prefixes make the rows larger than `limits`."""
    units = episode.units
    if not episode.n_sampled:
        return []
    segments = episode.segments
    parent, _, _, _, offset, length, _ = segments.table.tolist()
    if _is_chain(parent):
        columns = units.token_id, units.mask, units.logprob, units.version, units.columns
        return [Row(*columns, tuple(range(len(parent))), tuple(length))]
    mask = units.mask.tobytes()
    owned_paths = _owned_paths(parent, length, offset, mask, limits)
    return [_row(episode, path, owned, offset, length) for path, owned in owned_paths]


def row_media(episode: Episode, row: Row) -> list[tuple[Media, int]]:
    """Return the media that have units in a row of the episode, in the order of the tokens. With each comes
    the position of its first unit in the row."""
    return _media_of(episode, row.path, row.lengths)


def _media_of(episode: Episode, path: Sequence[int], lengths: Iterable[int]) -> list[tuple[Media, int]]:
    """Return the same for the row whose path has segments of these lengths."""
    if not episode.header.media:
        return []
    starts = dict(zip(path, accumulate(lengths, initial=0), strict=False))
    offset = episode.segments.offset
    found = [
        (media, starts[media.segment] + media.first_unit - int(offset[media.segment]))
        for media in episode.header.media
        if media.n_units and media.segment in starts
    ]
    return sorted(found, key=lambda each: each[1])


def _is_chain(parent: list[int]) -> bool:
    """Return whether each segment continues the segment before it. Then the unit table itself is the only
    row."""
    return parent == list(range(-1, len(parent) - 1))


def _owned_paths(
    parent: list[int], length: list[int], offset: list[int], mask: bytes, limits: EpisodeLimits
) -> list[tuple[list[int], int]]:
    """Return, for each leaf with units to train, its path and the position in the path of the first segment
    that the leaf's row trains. A row trains a suffix of its path, because all segments before this position
    belong to earlier leaves."""
    n_segments = len(parent)
    has_child = bytearray(n_segments)
    depth = [1] * n_segments
    path_units = length[:]
    for i, p in enumerate(parent):
        if p >= 0:
            has_child[p] = 1
            depth[i] += depth[p]
            path_units[i] += path_units[p]
    taken = bytearray(n_segments)
    chosen: list[tuple[list[int], int]] = []
    n_units = n_steps = 0
    for leaf in range(n_segments):
        if has_child[leaf]:
            continue
        own = []
        segment = leaf
        while segment >= 0 and not taken[segment]:
            taken[segment] = 1
            own.append(segment)
            segment = parent[segment]
        if not any(mask.find(1, offset[s], offset[s] + length[s]) >= 0 for s in own):
            continue
        n_units += path_units[leaf]
        n_steps += depth[leaf]
        if n_units > limits.row_units or n_steps > limits.row_segments:
            raise SizeError(
                f"training rows of more than {limits.row_units} units or {limits.row_segments} segments"
            )
        shared = []
        while segment >= 0:
            shared.append(segment)
            segment = parent[segment]
        chosen.append((shared[::-1] + own[::-1], len(shared)))
    return chosen


def _row(episode: Episode, path: list[int], owned: int, offset: list[int], length: list[int]) -> Row:
    units = episode.units
    spans = [slice(offset[s], offset[s] + length[s]) for s in path]

    def join(column: NDArray) -> NDArray:
        joined = np.concatenate([column[span] for span in spans])
        joined.setflags(write=False)
        return joined

    mask = np.concatenate([units.mask[span] for span in spans])
    mask[: sum(length[s] for s in path[:owned])] = 0
    mask.setflags(write=False)
    columns = {name: join(column) for name, column in units.columns.items()}
    lengths = tuple(length[s] for s in path)
    of_units = join(units.token_id), mask, join(units.logprob), join(units.version), columns
    return Row(*of_units, tuple(path), lengths)


_PROFILE_ENTRY = struct.Struct("<5i")
"""Row, version, its trained units in the row, position of the last, units of images before this position."""


def row_profile(episode: Episode, *, limits: EpisodeLimits = DEFAULT_LIMITS) -> bytes:
    """Return the sizes of the episode's training rows by version. There are 20 bytes for each version of each
    row, in the order of `training_rows`. Raises SizeError as `training_rows` does."""
    if not episode.n_sampled:
        return b""
    units, segments = episode.units, episode.segments
    offset, length = segments.offset.tolist(), segments.length.tolist()
    if episode.min_version == episode.max_version and _is_chain(segments.parent.tolist()):
        last = units.mask.tobytes().rfind(1)
        images = _units_of(_media_of(episode, range(len(length)), length), last)
        return _PROFILE_ENTRY.pack(0, episode.min_version, episode.n_sampled, last, images)
    paths = _owned_paths(segments.parent.tolist(), length, offset, units.mask.tobytes(), limits)
    entries = []
    for row, (path, owned) in enumerate(paths):
        place = np.concatenate([np.arange(offset[s], offset[s] + length[s]) for s in path[owned:]])
        trained = np.flatnonzero(units.mask[place])
        versions, positions = units.version[place[trained]], trained + sum(length[s] for s in path[:owned])
        media = _media_of(episode, path, (length[s] for s in path))
        for version in np.unique(versions).tolist():
            found = positions[versions == version]
            size = len(found), found[-1], _units_of(media, found[-1])
            entries.append(_PROFILE_ENTRY.pack(row, version, *size))
    return b"".join(entries)


def _units_of(media: Sequence[tuple[Media, int]], before: int) -> int:
    """Return the number of units of media that begin before a position of the row."""
    return sum(each.n_units for each, first in media if first < before)


def row_sizes(profile: bytes, lowest_version: int = 0) -> list[tuple[int, int, int]]:
    """Return (tokens fed, units trained, tokens fed for images) of each training row after units with
    versions below `lowest_version` are masked.

    A row ends at its last trained unit. This unit is predicted but not fed. The result is (0, 0, 0) for a row
    without trained units."""
    sizes: list[tuple[int, int, int]] = []
    for row, version, n_units, last, of_images in _PROFILE_ENTRY.iter_unpack(profile):
        if row == len(sizes):
            sizes.append((0, 0, 0))
        if version >= lowest_version:
            tokens, units, images = sizes[row]
            sizes[row] = (max(tokens, last), units + n_units, max(images, of_images))
    return sizes


def untrainable(episode: Episode) -> str:
    """Return a message about the first call with units that were not sampled from the trained distribution,
    or "" if there is no such call. Only units with mask 1 count, because units with mask 0 are context.

    The trainer weighs each unit by softmax(logits / temperature) of the trained weights, at the temperature
    of the unit's call. Other sampling (greedy, truncated, or log-probs at another temperature) has another
    distribution, so the unit's weight would be wrong, and no error would show it."""
    segments = episode.segments
    for call in episode.header.calls:
        how = _other_than_trained(call)
        first = segments.offset[call.segment] if how else 0
        if how and episode.units.mask[first : first + segments.length[call.segment]].any():
            return f"segment {call.segment} of episode {episode.episode_id} was sampled {how}"
    return ""


def _other_than_trained(call: Call) -> str:
    sampling = call.sampling
    if sampling.temperature <= 0:
        return "greedily (temperature 0)"
    if sampling.top_p != 1:
        return f"with top_p {sampling.top_p:g}"
    if sampling.top_k != 0:
        return f"with top_k {sampling.top_k}"
    if call.logprobs_of == "raw" and sampling.temperature != 1:
        return f"at temperature {sampling.temperature:g}, but its log-probs are those of temperature 1"
    return ""
