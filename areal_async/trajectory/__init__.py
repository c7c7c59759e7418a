"""The episode model that all services share: the contents of one rollout, their codec and their invariants.

build   EpisodeBuilder → Episode    ship, read back   pack, unpack
train   training_rows → Row         inspect           Episode.path, Episode.token_ids
routes  pack_routes, with_routes    refuse            TrajectoryError and its kinds, untrainable
"""

from areal_async.trajectory.builder import EpisodeBuilder
from areal_async.trajectory.codec import pack, unpack
from areal_async.trajectory.episode import Episode, PolicyVersions
from areal_async.trajectory.layout import (
    Call,
    CodecError,
    EpisodeLimits,
    InvariantError,
    Sampling,
    SchemaError,
    SegmentKind,
    SizeError,
    TrajectoryError,
)
from areal_async.trajectory.many import read_header, unpack_many
from areal_async.trajectory.one_call import PromptedGroup
from areal_async.trajectory.routes import pack_routes, with_routes
from areal_async.trajectory.rows import (
    Row,
    row_media,
    row_profile,
    row_sizes,
    seen_by,
    training_rows,
    untrainable,
)

__all__ = ["Call", "Episode", "EpisodeBuilder", "EpisodeLimits", "PolicyVersions", "PromptedGroup"]
__all__ += ["Row", "Sampling"]
__all__ += ["CodecError", "InvariantError", "SchemaError", "SegmentKind", "SizeError", "TrajectoryError"]
__all__ += ["pack", "pack_routes", "read_header", "row_media", "row_profile", "row_sizes", "seen_by"]
__all__ += ["training_rows", "unpack", "unpack_many", "untrainable", "with_routes"]
