"""The contents of an episode: its header, its two tables, its caps, and the errors that refuse one.

Small values (`Agent`, `Sampling`, `Call`, `Media`) travel as msgpack arrays in field order; later fields are
appended with defaults, so older bytes stay readable. `EpisodeHeader` travels as a map without its default
fields; a default therefore never changes within one schema. The tables are struct-of-arrays, all read-only.

Nothing but a `TrajectoryError` escapes from building, packing or reading an episode; caps are checked before
that much is allocated.
"""

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

_COLUMN_TYPES = ("f16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16")  # Letter and bits
COLUMN_DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(f"<{name[0]}{int(name[1:]) // 8}") for name in _COLUMN_TYPES
}
"""Element types of optional unit columns, by their name in the codec."""

NO_PARENT = -1
NO_VERSION = -1
NO_ANCHOR = 0
TABLE_COLUMNS = ("parent", "kind", "agent", "turn", "offset", "length", "flags")
CORE_COLUMNS = ("token_id", "logprob", "version", "mask")
MAX_NAME_CHARS = 64
ROUTES = "routes"
"""The optional column that travels beside the blob (`routes.py`)."""


class TrajectoryError(ArealError):
    """Base of every refusal of this package."""


class CodecError(TrajectoryError):
    """The bytes are not an episode: truncated, altered, or not ours."""


class SchemaError(TrajectoryError):
    """The bytes are an episode of a schema this process does not read."""


class SizeError(TrajectoryError):
    """A size is above its limit (`EpisodeLimits`); nothing of that size was allocated."""


class InvariantError(TrajectoryError):
    """The contents contradict each other (`episode.py` lists the invariants)."""


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


class Agent(msgspec.Struct, frozen=True, array_like=True):
    """An author of segments. `policy` indexes `EpisodeHeader.policies`."""

    name: str
    policy: int = 0


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of one call, in the engines' common terms."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One generation call: it produced segment `segment` from the path of that segment's parent.

    `logprobs_of` names the distribution of the behaviour log-probs: `sampled` is the one the token was drawn
    from (temperature and truncation applied), `temperature` has the temperature but no top-p/top-k
    truncation, `raw` is the model's own at temperature 1.
    """

    segment: int = 0
    policy: int = 0
    sampling: Sampling = Sampling()
    finish_reason: FinishReason = "stop"
    logprobs_of: LogprobsOf = "sampled"


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A content-addressed attachment (image, audio …). Its bytes live outside the episode.

    `digest` is `<hash name>:<hex>`. The placeholder units are `n_units` units from `first_unit` (a row of the
    unit table) inside segment `segment`.
    """

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
    """Always written: a default from a factory is never omitted."""
    policies: list[str] = []
    """Names of the policies that sampled; versions count per policy."""
    agents: list[Agent] = []
    calls: list[Call] = []
    """One per sampled segment, in segment order."""
    media: list[Media] = []
    rewards: dict[str, float] = {}
    """Named rewards of the whole episode, known when it ended (an environment's). Verdicts are not here."""
    metadata: dict[str, Any] = {}
    """Anything msgpack can hold."""
    prompt_text: str = ""
    response_text: str = ""
    epochs: list[tuple[int, int]] = []
    """Runs (first unit, trainer epoch of the weights) over the units with mask 1; empty without any."""
    fault: str = ""
    """Why the episode ended early, by the fault of its answers, as `kind: message`; no reward judges it."""

    @property
    def episode_id(self) -> str:
        """`<group id>.<sample>`"""
        return f"{self.group_id}.{self.sample}"


class SegmentKind(IntEnum):
    """Who wrote a segment. Only SAMPLED segments may hold units with a version or a mask."""

    PROMPT = 0
    SAMPLED = 1
    TOOL = 2
    ENVIRONMENT = 3


class SegmentFlag(IntFlag):
    """TERMINAL: the environment ended the episode here. TRUNCATED: a limit of ours did (value bootstraps)."""

    TERMINAL = 1
    TRUNCATED = 2


def frozen(array: NDArray) -> NDArray:
    """`array` itself when read-only, else a read-only view of it."""
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array


def _column(row: int, meaning: str) -> Any:
    """Return a read-only property: one row of the segment table."""

    def column(segments: Segments) -> NDArray[np.int32]:
        return segments.table[row]

    return property(column, doc=meaning)


class Segments:
    """The segment table: S segments, each a delta over the path of its parent.

    table:  i32 [7, S], rows in the order of TABLE_COLUMNS
    reward: f32 [S], NaN where none was given
    anchor: i64 [S], hash of a state key (`anchor_of`), 0 where none
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
    logprob:  f32 [T], behaviour log-prob, 0 where version is -1
    version:  i32 [T], of the weights that sampled the unit, -1 where none did
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
