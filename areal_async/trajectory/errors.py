"""Why an episode is refused, and the caps on what one may hold, checked before that much is allocated.

Nothing but a `TrajectoryError` escapes from building, packing or reading an episode.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_async.errors import ArealError


class TrajectoryError(ArealError):
    """Base of every refusal of this package."""


class CodecError(TrajectoryError):
    """The bytes are not an episode: truncated, altered, or not ours."""


class SchemaError(TrajectoryError):
    """The bytes are an episode of a schema this process does not read."""


class SizeError(TrajectoryError):
    """A size is above its limit (`EpisodeLimits`); nothing of that size was allocated."""


class InvariantError(TrajectoryError):
    """The contents contradict each other (`check.py` lists the invariants)."""


MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """One set of caps. A service that knows its episodes are small passes tighter ones."""

    blob_bytes: int = 1 << 30
    """Bytes of a whole packed episode."""
    head_bytes: int = 1 << 25
    """Bytes of the msgpack head: texts and metadata included."""
    units: int = 1 << 24
    segments: int = 1 << 16
    columns: int = 32
    """Optional unit columns."""
    column_width: int = 4096
    """Values per unit of an optional column."""
    row_units: int = 1 << 24
    """Units of all training rows of one episode together: shared prefixes count once per row."""
    row_segments: int = 1 << 20
    """Segments on the paths of all training rows of one episode together."""


DEFAULT_LIMITS = EpisodeLimits()
