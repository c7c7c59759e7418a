"""The episode model that all services agree on: what one rollout produced, its codec and its invariants.

build   EpisodeBuilder → Episode    ship, read back   pack, unpack
train   training_rows → Row         inspect           Episode.path, Episode.token_ids
                                    refuse            TrajectoryError and its kinds, untrainable
"""

from areal_async.trajectory.builder import EpisodeBuilder, anchor_of
from areal_async.trajectory.codec import pack, unpack
from areal_async.trajectory.episode import Episode, PolicyVersions
from areal_async.trajectory.layout import (
    DEFAULT_LIMITS,
    TRAJECTORY_SCHEMA,
    Agent,
    Call,
    CodecError,
    EpisodeHeader,
    EpisodeLimits,
    InvariantError,
    Media,
    Sampling,
    SchemaError,
    SegmentFlag,
    SegmentKind,
    Segments,
    SizeError,
    TrajectoryError,
    Units,
)
from areal_async.trajectory.rows import Row, training_rows, untrainable

__all__ = [
    "DEFAULT_LIMITS",
    "TRAJECTORY_SCHEMA",
    "Agent",
    "Call",
    "CodecError",
    "Episode",
    "EpisodeBuilder",
    "EpisodeHeader",
    "EpisodeLimits",
    "InvariantError",
    "Media",
    "PolicyVersions",
    "Row",
    "Sampling",
    "SchemaError",
    "SegmentFlag",
    "SegmentKind",
    "Segments",
    "SizeError",
    "TrajectoryError",
    "Units",
    "anchor_of",
    "pack",
    "training_rows",
    "unpack",
    "untrainable",
]
