"""The episode model that all services agree on: what one rollout produced, its codec and its invariants.

build   EpisodeBuilder → Episode         read back   unpack (blob), decode (frames)
ship    pack (one blob), encode (frames)  inspect     summarise, Episode.path, Episode.token_ids
train   training_rows → Row              refuse      TrajectoryError and its kinds, untrainable
"""

from areal_async.trajectory.blob import EpisodeSummary, pack, summarise, unpack
from areal_async.trajectory.builder import EpisodeBuilder, anchor_of
from areal_async.trajectory.check import Facts, check
from areal_async.trajectory.codec import decode, encode
from areal_async.trajectory.episode import Episode
from areal_async.trajectory.errors import (
    CodecError,
    InvariantError,
    SchemaError,
    SizeError,
    TrajectoryError,
)
from areal_async.trajectory.header import TRAJECTORY_SCHEMA, Agent, Call, Header, Media, Sampling
from areal_async.trajectory.limits import DEFAULT_LIMITS, Limits
from areal_async.trajectory.rows import Row, training_rows
from areal_async.trajectory.tables import SegmentFlag, SegmentKind, Segments, Units
from areal_async.trajectory.trainable import untrainable

__all__ = [
    "DEFAULT_LIMITS",
    "TRAJECTORY_SCHEMA",
    "Agent",
    "Call",
    "CodecError",
    "Episode",
    "EpisodeBuilder",
    "EpisodeSummary",
    "Facts",
    "Header",
    "InvariantError",
    "Limits",
    "Media",
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
