"""The episode model that all services agree on: what one rollout produced, its codec and its invariants.

build   EpisodeBuilder → Episode         read back   unpack (blob), decode (frames)
ship    pack (one blob), encode (frames)  inspect     summarise, Episode.path, Episode.token_ids
train   training_rows → Row              refuse      TrajectoryError and its kinds, untrainable
"""

from areal_async.trajectory.builder import EpisodeBuilder, anchor_of
from areal_async.trajectory.check import EpisodeFacts, PolicyVersions, check
from areal_async.trajectory.codec import EpisodeSummary, decode, encode, pack, summarise, unpack
from areal_async.trajectory.episode import Episode
from areal_async.trajectory.errors import (
    DEFAULT_LIMITS,
    CodecError,
    EpisodeLimits,
    InvariantError,
    SchemaError,
    SizeError,
    TrajectoryError,
)
from areal_async.trajectory.header import TRAJECTORY_SCHEMA, Agent, Call, EpisodeHeader, Media, Sampling
from areal_async.trajectory.rows import Row, training_rows, untrainable
from areal_async.trajectory.tables import SegmentFlag, SegmentKind, Segments, Units

__all__ = [
    "DEFAULT_LIMITS",
    "TRAJECTORY_SCHEMA",
    "Agent",
    "Call",
    "CodecError",
    "Episode",
    "EpisodeBuilder",
    "EpisodeFacts",
    "EpisodeHeader",
    "EpisodeLimits",
    "EpisodeSummary",
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
    "check",
    "decode",
    "encode",
    "pack",
    "summarise",
    "training_rows",
    "unpack",
    "untrainable",
]
