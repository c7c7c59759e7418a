"""The class Episode, a header and two consistent tables, and the checks of all invariants.

An `Episode` is checked when it is created. Its arrays are read-only, so it stays valid.

segments      there is at least one; parents precede children (-1: a root), so the table is a forest in
              topological order; agent, kind, turn and flags are in range; a reward is finite or NaN (none)
tiling        offsets and lengths tile the unit table: every unit belongs to exactly one segment
calls         call i made the i-th SAMPLED segment, from the path of its parent: a root-to-leaf path is
              exactly what the engine saw; policies are in range, sampling parameters are finite
units         token ids >= 0; log-probs finite and <= LOGPROB_SLACK; versions >= -1; mask 1 => version >= 0;
              a unit outside a SAMPLED segment has mask 0 and version -1
epochs        runs over the units with mask 1: each run starts at a unit with mask 1, and the first run at
              the first of them; starts rise; neighbours differ; empty if and only if no unit has mask 1
media         spans lie inside their segment; digests are `<hash>:<hex>`
columns       optional columns have one value (or a row of values) per unit and a known type

`training_rows` ensures the last invariant: each unit with mask 1 is trained in exactly one row. The segment
table is checked row by row, the unit table in whole columns."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.layout import (
    COLUMN_DTYPES,
    CORE_COLUMNS,
    DEFAULT_LIMITS,
    F32,
    I32,
    I64,
    MAX_NAME_CHARS,
    NO_PARENT,
    NO_VERSION,
    TABLE_COLUMNS,
    TRAJECTORY_SCHEMA,
    U8,
    Call,
    EpisodeHeader,
    EpisodeLimits,
    InvariantError,
    Media,
    SchemaError,
    SegmentFlag,
    SegmentKind,
    Segments,
    SizeError,
    Units,
)

LOGPROB_SLACK = 1e-3  # Log-probs may exceed 0 by this much: engines add float32 rounding to a log-softmax

SHORT = 64  # Longest array for which Python's lists are faster than numpy
_INT32_MAX = 2**31 - 1
_NONE_BYTE = b"\xff"  # Each byte of an i32 version -1
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1
SAMPLED = int(SegmentKind.SAMPLED)
MAX_KIND = int(max(SegmentKind))
ALL_FLAGS = int(~SegmentFlag(0))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_DIGEST = re.compile(r"[a-z0-9_-]+:[0-9a-f]+\Z")
_COLUMN_DTYPES = frozenset(COLUMN_DTYPES.values())


class PolicyVersions(NamedTuple):
    """Range of versions of one policy: the versions that sampled an episode's units with mask 1."""

    oldest: int
    newest: int
    epoch: int
    """The smallest trainer epoch of these weights."""


class Trained(NamedTuple):
    """Figures of an episode's units with mask 1. The others are -1 if there are no such units."""

    n_sampled: int
    """Number of these units."""
    min_version: int
    max_version: int
    min_epoch: int
    """The smallest trainer epoch of their weights."""


def _versions_of_each(header: EpisodeHeader, segments: Segments, units: Units) -> dict[str, PolicyVersions]:
    starts, epochs = np.array(header.epochs, np.int64).T
    found: dict[str, list[PolicyVersions]] = {}
    for call in header.calls:
        first = int(segments.offset[call.segment])
        end = first + int(segments.length[call.segment])
        rows = first + np.flatnonzero(units.mask[first:end])
        if not len(rows):
            continue
        version = units.version[rows]
        epoch = epochs[np.searchsorted(starts, rows, side="right") - 1]
        mine = PolicyVersions(int(version.min()), int(version.max()), int(epoch.min()))
        found.setdefault(header.policies[call.policy], []).append(mine)
    columns = {name: list(zip(*of_calls, strict=True)) for name, of_calls in found.items()}
    return {name: PolicyVersions(min(o), max(n), min(e)) for name, (o, n, e) in columns.items()}


def check_header(header: EpisodeHeader) -> None:
    if header.schema != TRAJECTORY_SCHEMA:
        raise SchemaError(f"the episode has schema {header.schema}, this process reads {TRAJECTORY_SCHEMA}")
    if not header.group_id or not (0 <= header.sample <= _INT32_MAX and 0 <= header.attempt <= _INT32_MAX):
        raise InvariantError("header: group_id must not be empty, sample and attempt must be >= 0")
    policies, agents = header.policies, header.agents
    if len(set(policies)) != len(policies) or len({agent.name for agent in agents}) != len(agents):
        raise InvariantError("header: policy names and agent names must be unique")
    for agent in agents:
        if not 0 <= agent.policy < len(policies):
            raise InvariantError(f"agent {agent.name!r}: policy {agent.policy} of {len(policies)}")
    if header.rewards and not all(map(math.isfinite, header.rewards.values())):
        raise InvariantError("header: named rewards must be finite")


def _check_arrays(segments: Segments, units: Units, limits: EpisodeLimits) -> None:
    n_segments, n_units = len(segments), len(units)
    if not n_segments:
        raise InvariantError("an episode has at least one segment")
    n_columns = len(units.columns)
    for n, name in ((n_segments, "segments"), (n_units, "units"), (n_columns, "columns")):
        if n > (most := getattr(limits, name)):
            raise SizeError(f"{n} {name}, the limit is {most}")
    table, reward, anchor = segments.table, segments.reward, segments.anchor
    if table.dtype != I32 or reward.dtype != F32 or anchor.dtype != I64:
        raise InvariantError("the segment table is i32, rewards are f32, anchors are i64")
    if table.shape != (len(TABLE_COLUMNS), n_segments) or not reward.shape == anchor.shape == (n_segments,):
        raise InvariantError("the columns of the segment table differ in length")
    token_id, mask, logprob, version = units.token_id, units.mask, units.logprob, units.version
    if token_id.dtype != I32 or mask.dtype != U8 or logprob.dtype != F32 or version.dtype != I32:
        raise InvariantError("token_id and version are i32, mask is u8, logprob is f32")
    if not token_id.shape == mask.shape == logprob.shape == version.shape == (n_units,):
        raise InvariantError("the columns of the unit table differ in length")
    for name, column in units.columns.items():
        if len(name) > MAX_NAME_CHARS or name in CORE_COLUMNS or not _NAME.match(name):
            raise InvariantError(f"column name {name[:MAX_NAME_CHARS]!r} is not a free identifier")
        if column.dtype not in _COLUMN_DTYPES or column.ndim not in (1, 2) or column.shape[0] != n_units:
            raise InvariantError(f"column {name}: {column.dtype} {column.shape} is not one value per unit")
        if column.ndim == 2 and not 1 <= column.shape[1] <= limits.column_width:
            raise SizeError(f"column {name}: width {column.shape[1]}, the limit is {limits.column_width}")


def _check_units(units: Units) -> tuple[int, int, int]:
    """Return the number of units with mask 1, and their lowest and highest version."""
    version, mask = units.version, units.mask
    if not len(units):
        return 0, NO_VERSION, NO_VERSION
    if (lowest := _range(version)[0]) < NO_VERSION:
        raise InvariantError(f"version: {lowest}; a version is >= 0, or -1 for none")
    if (lowest := _range(units.token_id)[0]) < 0:
        raise InvariantError(f"token_id: {lowest}; token ids are >= 0")
    lowest, most = _range(units.logprob)
    if not (lowest > -math.inf and most <= LOGPROB_SLACK):  # The comparison is false for NaN
        raise InvariantError(f"logprob: {lowest} to {most}; log-probs are finite, at most {LOGPROB_SLACK}")
    if _range(mask)[1] > 1:
        raise InvariantError("mask: a mask is 0 or 1")
    trained = version[mask.view(np.bool_)]
    if not len(trained):
        return 0, NO_VERSION, NO_VERSION
    lowest, highest = _range(trained)
    if lowest < 0:
        raise InvariantError("version: a unit with mask 1 has the version that sampled it")
    return len(trained), int(lowest), int(highest)


def _range(values: NDArray[Any]) -> tuple[Any, Any]:
    """Return the smallest and the largest value, or NaN twice if there is one. For short arrays, numpy's
    reductions take several times as long as lists."""
    if len(values) > SHORT:
        return values.min(), values.max()
    cells = values.tolist()
    if (total := sum(cells)) != total:
        return math.nan, math.nan
    return min(cells), max(cells)


def _check_segments(segments: Segments, n_units: int, versions: bytes, n_agents: int) -> list[int]:
    """Return the indexes of the sampled segments. `versions` are the bytes of the version column; none is
    below -1."""
    sampled = []
    end = 0
    rows = zip(*segments.table.tolist(), strict=True)
    for i, (parent, kind, agent, turn, offset, length, flags) in enumerate(rows):
        if not NO_PARENT <= parent < i:
            raise InvariantError(f"segment {i}: parent {parent} is neither an earlier segment nor -1")
        if not 0 <= kind <= MAX_KIND:
            raise InvariantError(f"segment {i}: kind {kind} is unknown")
        if not 0 <= agent < n_agents:
            raise InvariantError(f"segment {i}: agent {agent} of {n_agents}")
        if turn < 0:
            raise InvariantError(f"segment {i}: turn {turn}, turns count from 0")
        if not 0 <= flags <= ALL_FLAGS:
            raise InvariantError(f"segment {i}: flags {flags:#x}, the known bits are {ALL_FLAGS:#x}")
        if offset != end or length < 0:
            raise InvariantError(f"segment {i}: offset {offset}, length {length}; {end} units came before it")
        end += length
        if kind == SAMPLED:
            sampled.append(i)
        elif versions[4 * offset : 4 * end].strip(_NONE_BYTE):  # Covers the mask too: mask 1 needs a version
            raise InvariantError(f"segment {i}: it is not sampled, so its units have mask 0 and version -1")
    if end != n_units:
        raise InvariantError(f"segments: their lengths sum to {end}, there are {n_units} units")
    rewards = segments.reward.tolist()
    if math.inf in rewards or -math.inf in rewards:
        raise InvariantError("reward: a reward is finite, or NaN for none")
    return sampled


def check_calls(calls: list[Call], sampled: list[int], n_policies: int) -> None:
    if len(calls) != len(sampled):
        raise InvariantError(f"calls: {len(calls)} for {len(sampled)} sampled segments")
    for call, segment in zip(calls, sampled, strict=True):
        if call.segment != segment:
            raise InvariantError(f"calls: segment {segment} was sampled next, not {call.segment}")
        if not 0 <= call.policy < n_policies:
            raise InvariantError(f"call of segment {segment}: policy {call.policy} of {n_policies}")
        s = call.sampling
        # Chained comparisons are false for NaN, so NaN is refused too.
        if not (0 <= s.temperature < math.inf and 0 < s.top_p <= 1):
            raise InvariantError(f"call of segment {segment}: temperature {s.temperature}, top_p {s.top_p}")
        if s.top_k < 0 or s.max_new_tokens < 0 or not _SEED_MIN <= s.seed <= _SEED_MAX:
            raise InvariantError(f"call of segment {segment}: top_k, max_new_tokens or seed out of range")


def _check_media(media: Media, segments: Segments) -> None:
    if not _DIGEST.match(media.digest) or media.size_bytes < 0:
        raise InvariantError(f"media {media.digest[:64]!r}: a digest is <hash>:<hex>, a size >= 0")
    segment, first = media.segment, media.first_unit
    if not 0 <= segment < len(segments) or media.n_units < 0:
        raise InvariantError(f"media {media.digest}: {media.n_units} units in segment {segment}")
    offset, length = int(segments.offset[segment]), int(segments.length[segment])
    if not offset <= first <= first + media.n_units <= offset + length:
        raise InvariantError(f"media {media.digest}: its units lie outside segment {segment}")


def check_epochs(epochs: list[tuple[int, int]], mask: bytes, n_sampled: int) -> int:
    """Return the smallest epoch, or -1 if no unit has mask 1."""
    if not n_sampled:
        if epochs:
            raise InvariantError("epochs: no unit has mask 1")
        return -1
    if not epochs or epochs[0][0] != mask.find(1):
        raise InvariantError("epochs: the first run starts at the first unit with mask 1")
    last_unit, last_epoch, smallest = -1, -1, _INT32_MAX
    for first_unit, epoch in epochs:
        if not last_unit < first_unit < len(mask) or mask[first_unit] != 1:
            raise InvariantError("epochs: runs start at units with mask 1, in rising order")
        if not 0 <= epoch <= _INT32_MAX or epoch == last_epoch:
            raise InvariantError("epochs: an epoch is >= 0 and differs from its neighbours")
        last_unit, last_epoch = first_unit, epoch
        smallest = min(smallest, epoch)
    return smallest


class Episode:
    """Everything that one rollout produced. Raises InvariantError, SchemaError or SizeError unless every
    invariant above holds."""

    def __init__(
        self,
        header: EpisodeHeader,
        segments: Segments,
        units: Units,
        *,
        limits: EpisodeLimits = DEFAULT_LIMITS,
    ) -> None:
        check_header(header)
        _check_arrays(segments, units, limits)
        n_sampled, min_version, max_version = _check_units(units)
        sampled = _check_segments(segments, len(units), units.version.tobytes(), len(header.agents))
        check_calls(header.calls, sampled, len(header.policies))
        for media in header.media:
            _check_media(media, segments)
        epoch = check_epochs(header.epochs, units.mask.tobytes(), n_sampled)
        self._set(header, segments, units, Trained(n_sampled, min_version, max_version, epoch))

    @classmethod
    def of_checked(cls, header: EpisodeHeader, segments: Segments, units: Units, trained: Trained) -> Self:
        """Return an episode whose invariants the caller has checked."""
        episode = cls.__new__(cls)
        episode._set(header, segments, units, trained)
        return episode

    def _set(self, header: EpisodeHeader, segments: Segments, units: Units, trained: Trained) -> None:
        self.header = header
        self.segments = segments
        self.units = units
        self.n_sampled, self.min_version, self.max_version, self.min_epoch = trained
        self.versions: dict[str, PolicyVersions] = {}
        """Versions of the units with mask 1, by policy. A policy without such units is missing."""
        if len(header.policies) == 1 and trained.n_sampled:
            self.versions = {header.policies[0]: PolicyVersions(*trained[1:])}
        elif trained.n_sampled:
            self.versions = _versions_of_each(header, segments, units)

    @property
    def episode_id(self) -> str:
        return self.header.episode_id

    @property
    def n_units(self) -> int:
        return len(self.units)

    def path(self, segment: int) -> list[int]:
        """Return the segments from the root to `segment`, including both."""
        parent = self.segments.parent
        path = []
        while segment >= 0:
            path.append(segment)
            segment = int(parent[segment])
        return path[::-1]

    def token_ids(self, segment: int) -> NDArray[np.int32]:
        """Return the tokens of the path down to `segment`, as i32. They are the engine's context after the
        call that sampled `segment`."""
        offset, length = self.segments.offset, self.segments.length
        spans = [self.units.token_id[offset[s] : offset[s] + length[s]] for s in self.path(segment)]
        return spans[0] if len(spans) == 1 else np.concatenate(spans)

    def __eq__(self, other: object) -> bool:
        """Return whether the headers are equal and the tables are equal bit for bit (so NaN equals NaN)."""
        if not isinstance(other, Episode):
            return NotImplemented
        return self.header == other.header and _bits(self) == _bits(other)

    __hash__ = None  # type: ignore[assignment]


def _bits(episode: Episode) -> list[object]:
    units, segments = episode.units, episode.segments
    arrays = [segments.table, segments.reward, segments.anchor]
    arrays += [units.token_id, units.mask, units.logprob, units.version]
    named = sorted(units.columns.items())
    return [a.tobytes() for a in arrays] + [(n, a.dtype.str, a.shape, a.tobytes()) for n, a in named]
