"""Why an episode was refused. Nothing else escapes from building, packing or reading one."""

from __future__ import annotations

from areal_async.errors import ArealError


class TrajectoryError(ArealError):
    """Base of every refusal of this package."""


class CodecError(TrajectoryError):
    """The bytes are not an episode: truncated, altered, or not ours."""


class SchemaError(TrajectoryError):
    """The bytes are an episode of a schema this process does not read."""


class SizeError(TrajectoryError):
    """A size is above its limit (`limits.py`); nothing of that size was allocated."""


class InvariantError(TrajectoryError):
    """The contents contradict each other (`check.py` lists the invariants)."""
