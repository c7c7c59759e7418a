"""One episode: a header and two tables that are known to agree.

An `Episode` that exists has passed `check`; its arrays are read-only, so it stays that way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.check import check
from areal_async.trajectory.errors import DEFAULT_LIMITS, EpisodeLimits
from areal_async.trajectory.header import EpisodeHeader
from areal_async.trajectory.tables import Segments, Units


class Episode:
    """Everything one rollout produced. Raises InvariantError (or SizeError) when the parts disagree."""

    __slots__ = (
        "header",
        "max_version",
        "min_epoch",
        "min_version",
        "n_sampled",
        "segments",
        "units",
        "versions",
    )

    def __init__(
        self,
        header: EpisodeHeader,
        segments: Segments,
        units: Units,
        *,
        limits: EpisodeLimits = DEFAULT_LIMITS,
    ) -> None:
        facts = check(header, segments, units, limits)
        self.header = header
        self.segments = segments
        self.units = units
        self.n_sampled = facts.n_sampled
        """Units with mask 1."""
        self.min_version = facts.min_version
        """Over units with mask 1; -1 when there are none."""
        self.max_version = facts.max_version
        self.min_epoch = facts.min_epoch
        """Smallest trainer epoch behind a unit with mask 1; -1 when there are none."""
        self.versions = facts.versions
        """By policy, over its units with mask 1."""

    @property
    def episode_id(self) -> str:
        return self.header.episode_id

    @property
    def n_units(self) -> int:
        return len(self.units)

    def path(self, segment: int) -> list[int]:
        """Segments from the root to `segment`, both included."""
        parent = self.segments.parent
        path = []
        while segment >= 0:
            path.append(segment)
            segment = int(parent[segment])
        return path[::-1]

    def token_ids(self, segment: int) -> NDArray[np.int32]:
        """i32: the tokens of the path down to `segment`: the engine's context after the call that made it."""
        offset, length = self.segments.offset, self.segments.length
        spans = [self.units.token_id[offset[s] : offset[s] + length[s]] for s in self.path(segment)]
        return spans[0] if len(spans) == 1 else np.concatenate(spans)

    def with_columns(
        self, columns: Mapping[str, NDArray], *, limits: EpisodeLimits = DEFAULT_LIMITS
    ) -> Episode:
        """A copy that has these optional unit columns too (same name: replaced). The rest is shared."""
        units = self.units
        merged = {**units.columns, **columns}
        return Episode(
            self.header,
            self.segments,
            Units(units.token_id, units.mask, units.logprob, units.version, merged),
            limits=limits,
        )

    def __eq__(self, other: object) -> bool:
        """Same header and, bit for bit, the same tables (so NaN equals NaN)."""
        if not isinstance(other, Episode):
            return NotImplemented
        return self.header == other.header and _bits(self) == _bits(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Episode({self.episode_id!r}, segments={len(self.segments)}, units={self.n_units}, "
            f"sampled={self.n_sampled}, versions={self.min_version}..{self.max_version})"
        )


def _bits(episode: Episode) -> list[object]:
    units, segments = episode.units, episode.segments
    arrays = [segments.table, segments.reward, segments.anchor]
    arrays += [units.token_id, units.mask, units.logprob, units.version]
    named = sorted(units.columns.items())
    return [a.tobytes() for a in arrays] + [(n, a.dtype.str, a.shape, a.tobytes()) for n, a in named]
