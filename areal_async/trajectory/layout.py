"""The contents of an episode: its header, its two tables, its limits and its errors.

Small values (`Agent`, `Sampling`, `Call`, `Media`) are encoded as msgpack arrays in field order. New fields
are appended with defaults, so older bytes stay readable. `EpisodeHeader` is encoded as a map that omits
fields with their default value. Therefore a default must never change within one schema. The tables are
structs of arrays, all read-only.

Building, packing or reading an episode raises only `TrajectoryError`. Limits are checked before memory of
that size is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.base.errors import ArealError

TRAJECTORY_SCHEMA = 1

FinishReason = Literal["stop", "length", "abort"]
LogprobsOf = Literal["sampled", "temperature", "raw"]
I32 = np.dtype("<i4")
I64 = np.dtype("<i8")
F32 = np.dtype("<f4")
U8 = np.dtype("u1")

_COLUMN_TYPES = ("f16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16")  # Kind and number of bits
COLUMN_DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(f"<{name[0]}{int(name[1:]) // 8}") for name in _COLUMN_TYPES
}
"""Element types of optional unit columns, by their names in the codec."""

NO_PARENT = -1
NO_VERSION = -1
NO_ANCHOR = 0
TABLE_COLUMNS = ("parent", "kind", "agent", "turn", "offset", "length", "flags")
CORE_COLUMNS = ("token_id", "logprob", "version", "mask")
MAX_NAME_CHARS = 64
ROUTES = "routes"
"""Name of the optional column that is sent beside the blob (`routes.py`)."""


class TrajectoryError(ArealError):
    """Base of the errors of this package."""


class CodecError(TrajectoryError):
    """Bytes are not an episode: they are truncated, altered or in another format."""


class SchemaError(TrajectoryError):
    """An episode has a schema that this process does not read."""


class SizeError(TrajectoryError):
    """A size is above its limit (`EpisodeLimits`). The error is raised before memory of that size is
    allocated."""


class InvariantError(TrajectoryError):
    """Contents of an episode contradict each other. `episode.py` lists the invariants."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits on the size of an episode. A service that expects only small episodes passes smaller limits."""

    blob_bytes: int = 1 << 30
    """Bytes of a whole packed episode."""
    head_bytes: int = 1 << 25
    """Bytes of the msgpack head, including texts and metadata."""
    units: int = 1 << 24
    segments: int = 1 << 16
    columns: int = 32
    """Number of optional unit columns."""
    column_width: int = 4096
    """Values per unit of an optional column."""
    row_units: int = 1 << 24
    """Units in all training rows of one episode. A shared prefix counts once per row."""
    row_segments: int = 1 << 20
    """Segments on the paths of all training rows of one episode."""


DEFAULT_LIMITS = EpisodeLimits()


class Agent(msgspec.Struct, frozen=True, array_like=True):
    """An author of segments. `policy` is an index into `EpisodeHeader.policies`."""

    name: str
    policy: int = 0


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of one call, in the common terms of the engines."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One generation call. It sampled segment `segment` from the path of that segment's parent.

    `logprobs_of` names the distribution to which the behaviour log-probs refer: `sampled` (from which the
    token was drawn, with temperature and truncation), `temperature` (with the temperature, but without top-p
    and top-k truncation), or `raw` (of the model, at temperature 1)."""

    segment: int = 0
    policy: int = 0
    sampling: Sampling = Sampling()
    finish_reason: FinishReason = "stop"
    logprobs_of: LogprobsOf = "sampled"


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A content-addressed attachment, such as an image or audio. Its bytes are stored outside the episode.

    `digest` is `<hash name>:<hex>`. The placeholder units are `n_units` units of segment `segment`, starting
    at row `first_unit` of the unit table."""

    digest: str
    media_type: str
    size_bytes: int
    segment: int
    first_unit: int = 0
    n_units: int = 0


class EpisodeHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """Identity and provenance of one episode."""

    job: str
    task_id: str
    group_id: str
    sample: int
    """Index of the episode in its group."""
    attempt: int = 0
    schema: int = msgspec.field(default_factory=lambda: TRAJECTORY_SCHEMA)
    """Always encoded, although other defaults are omitted: msgspec never omits a default that comes from a
    factory."""
    policies: list[str] = []
    """Names of the policies that sampled units. Each policy has its own versions."""
    agents: list[Agent] = []
    calls: list[Call] = []
    """One call per sampled segment, in segment order."""
    media: list[Media] = []
    rewards: dict[str, float] = {}
    """Named rewards of the whole episode, known at its end (from an environment). Verdicts are not
    included."""
    metadata: dict[str, Any] = {}
    """Any values that msgpack can encode."""
    prompt_text: str = ""
    response_text: str = ""
    epochs: list[tuple[int, int]] = []
    """Runs of units whose weights are from the same trainer epoch, as (first unit, epoch). Only units with
    mask 1 count; without such units the value is empty."""
    fault: str = ""
    """Reason of an early end that an answer caused, as `kind: message`. No reward judges the episode then."""

    @property
    def episode_id(self) -> str:
        """`<group id>.<sample>`"""
        return f"{self.group_id}.{self.sample}"


class SegmentKind(IntEnum):
    """Author of a segment. Only units of SAMPLED segments may have a version or mask 1."""

    PROMPT = 0
    SAMPLED = 1
    TOOL = 2
    ENVIRONMENT = 3


class SegmentFlag(IntFlag):
    """Reason of the end of an episode. TERMINAL: the environment ended it. TRUNCATED: a limit of the job
    ended it, so a value model bootstraps from the last state."""

    TERMINAL = 1
    TRUNCATED = 2


def frozen(array: NDArray) -> NDArray:
    """Return `array` itself if it is read-only, otherwise a read-only view of it."""
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array


def _column(row: int, meaning: str) -> Any:
    """Return a read-only property for one row of the segment table."""

    def column(segments: Segments) -> NDArray[np.int32]:
        return segments.table[row]

    return property(column, doc=meaning)


class Segments:
    """The segment table. It has S segments, and each continues the path of its parent.

    table:  i32 [7, S], rows in the order of TABLE_COLUMNS
    reward: f32 [S], NaN if none was given
    anchor: i64 [S], hash of a state key (`anchor_of`), 0 for none
    """

    __slots__ = ("anchor", "reward", "table")

    def __init__(
        self, table: NDArray[np.int32], reward: NDArray[np.float32], anchor: NDArray[np.int64]
    ) -> None:
        self.table = frozen(table)
        self.reward = frozen(reward)
        self.anchor = frozen(anchor)

    def __len__(self) -> int:
        return self.table.shape[1]

    parent = _column(0, "i32 [S]: index of the segment this one continues, -1 for a root.")
    kind = _column(1, "i32 [S]: SegmentKind.")
    agent = _column(2, "i32 [S]: index into EpisodeHeader.agents.")
    turn = _column(3, "i32 [S]: turn number, from 0.")
    offset = _column(4, "i32 [S]: first row of the segment in the unit table.")
    length = _column(5, "i32 [S]: rows of the segment in the unit table.")
    flags = _column(6, "i32 [S]: SegmentFlag bits.")


class Units:
    """The unit table: T units in segment order.

    token_id: i32 [T]
    mask:     u8 [T], 1 = trained
    logprob:  f32 [T], behaviour log-prob, 0 if version is -1
    version:  i32 [T], version of the weights that sampled the unit, -1 for none
    columns:  optional, name -> [T] or [T, width] of a COLUMN_DTYPES type; absent means unknown, not zero
    """

    __slots__ = ("columns", "logprob", "mask", "token_id", "version")

    def __init__(
        self,
        token_id: NDArray[np.int32],
        mask: NDArray[np.uint8],
        logprob: NDArray[np.float32],
        version: NDArray[np.int32],
        columns: Mapping[str, NDArray] | None = None,
    ) -> None:
        self.token_id = frozen(token_id)
        self.mask = frozen(mask)
        self.logprob = frozen(logprob)
        self.version = frozen(version)
        self.columns = {name: frozen(column) for name, column in (columns or {}).items()}

    def __len__(self) -> int:
        return len(self.token_id)
