"""The invariants of an episode, all of them, and nowhere else.

segments      there is at least one; parents precede children (-1: a root), so the table is a forest in
              topological order; agent, kind, turn and flags are in range; a reward is finite or NaN (none)
tiling        offsets and lengths tile the unit table: every unit belongs to exactly one segment
calls         call i made the i-th SAMPLED segment, from the path of its parent: a root-to-leaf path is
              exactly what the engine saw; policies are in range, sampling parameters are finite
units         token ids >= 0; log-probs finite and <= LOGPROB_SLACK; versions >= -1; mask 1 => version >= 0;
              a unit outside a SAMPLED segment has mask 0 and version -1
epochs        run-length over the units with mask 1: every run starts at one, the first run at the first one,
              starts rise, neighbours differ; empty exactly when no unit has mask 1
media         spans lie inside their segment; digests are `<hash>:<hex>`
columns       optional columns have one value (or a row of values) per unit and a known type

`training_rows` adds the last one: each unit with mask 1 is trained in exactly one row.

The work is done on whole columns: reductions in numpy on the unit table, C-level list and byte-string
operations on the small ones, where numpy's cost per call would dominate a ten-token episode.
"""

from __future__ import annotations

import math
import operator
import re
from itertools import accumulate
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from areal_async.trajectory.errors import InvariantError, SchemaError, SizeError
from areal_async.trajectory.header import TRAJECTORY_SCHEMA, Call, Header, Media
from areal_async.trajectory.limits import DEFAULT_LIMITS, MAX_NAME_CHARS, Limits
from areal_async.trajectory.tables import (
    COLUMN_DTYPES,
    CORE_COLUMNS,
    F32,
    I32,
    I64,
    NO_PARENT,
    NO_VERSION,
    TABLE_COLUMNS,
    U8,
    U32,
    SegmentFlag,
    SegmentKind,
    Segments,
    Units,
)

LOGPROB_SLACK = 1e-3
"""A log-prob may exceed 0 by this much: engines add float32 rounding to a log-softmax."""

_SMALL = 128
"""Columns up to this length are faster to reduce as a list."""

_INT32_MAX = 2**31 - 1
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1
_SAMPLED = int(SegmentKind.SAMPLED)
_MAX_KIND = int(max(SegmentKind))
_ALL_FLAGS = int(~SegmentFlag(0))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_DIGEST = re.compile(r"[a-z0-9_-]+:[0-9a-f]+\Z")
_COLUMN_DTYPES = frozenset(COLUMN_DTYPES.values())


class Facts(NamedTuple):
    """What the check learned on its way. Versions and epoch are over units with mask 1, -1 without any."""

    n_sampled: int
    min_version: int
    max_version: int
    min_epoch: int


def check(header: Header, segments: Segments, units: Units, limits: Limits = DEFAULT_LIMITS) -> Facts:
    """Raise InvariantError, SchemaError or SizeError unless every invariant above holds."""
    _check_header(header)
    _check_arrays(segments, units, limits)
    parent, kind, agent, turn, offset, length, flags = segments.table.tolist()
    n_segments = len(parent)

    if min(map(operator.sub, range(n_segments), parent)) < 1 or min(parent) < NO_PARENT:
        _fail("parent", "a parent must be an earlier segment, or -1")
    if min(kind) < 0 or max(kind) > _MAX_KIND:
        _fail("kind", f"kinds are 0 to {_MAX_KIND}")
    if min(agent) < 0 or max(agent) >= len(header.agents):
        _fail("agent", f"the header has {len(header.agents)} agents")
    if min(turn) < 0:
        _fail("turn", "turns count from 0")
    if min(flags) < 0 or max(flags) > _ALL_FLAGS:
        _fail("flags", f"known bits are {_ALL_FLAGS:#x}")
    rewards = segments.reward.tolist()
    if math.inf in rewards or -math.inf in rewards:
        _fail("reward", "a reward is finite, or NaN for none")

    ends = list(accumulate(length))
    if min(length) < 0 or offset[0] != 0 or offset[1:] != ends[:-1] or ends[-1] != len(units):
        _fail("offset, length", f"segments must tile the {len(units)} units in order")

    sampled = [i for i, k in enumerate(kind) if k == _SAMPLED]
    if [call.segment for call in header.calls] != sampled:
        raise InvariantError(f"calls: one per sampled segment, in order, is needed (segments {sampled[:8]})")
    for call in header.calls:
        _check_call(call, len(header.policies))
    for media in header.media:
        _check_media(media, offset, ends)
    return _check_units(header, units, kind, offset, ends)


def _check_header(header: Header) -> None:
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


def _check_arrays(segments: Segments, units: Units, limits: Limits) -> None:
    n_segments, n_units = len(segments), len(units)
    if not n_segments:
        raise InvariantError("an episode has at least one segment")
    if n_segments > limits.segments:
        raise SizeError(f"{n_segments} segments, the limit is {limits.segments}")
    if n_units > limits.units:
        raise SizeError(f"{n_units} units, the limit is {limits.units}")
    if len(units.columns) > limits.columns:
        raise SizeError(f"{len(units.columns)} optional columns, the limit is {limits.columns}")
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


def _check_call(call: Call, n_policies: int) -> None:
    if not 0 <= call.policy < n_policies:
        raise InvariantError(f"call of segment {call.segment}: policy {call.policy} of {n_policies}")
    s = call.sampling
    # Chained comparisons are false for NaN, so these refuse it too.
    if not (0 <= s.temperature < math.inf and 0 < s.top_p <= 1):
        raise InvariantError(f"call of segment {call.segment}: temperature {s.temperature}, top_p {s.top_p}")
    if s.top_k < 0 or s.max_new_tokens < 0 or not _SEED_MIN <= s.seed <= _SEED_MAX:
        raise InvariantError(f"call of segment {call.segment}: top_k, max_new_tokens or seed out of range")


def _check_media(media: Media, offset: list[int], ends: list[int]) -> None:
    if not _DIGEST.match(media.digest) or media.size_bytes < 0:
        raise InvariantError(
            f"media {media.digest[:MAX_NAME_CHARS]!r}: a digest is <hash>:<hex>, a size >= 0"
        )
    segment, first = media.segment, media.first_unit
    if not 0 <= segment < len(ends) or media.n_units < 0:
        raise InvariantError(f"media {media.digest}: segment {segment} of {len(ends)}")
    if not offset[segment] <= first <= first + media.n_units <= ends[segment]:
        raise InvariantError(f"media {media.digest}: its units lie outside segment {segment}")


def _check_units(header: Header, units: Units, kind: list[int], offset: list[int], ends: list[int]) -> Facts:
    if not len(units):
        if header.epochs:
            raise InvariantError("epochs: there is no unit")
        return Facts(0, NO_VERSION, NO_VERSION, -1)
    version = units.version
    lowest, max_version = _extremes(version)
    if lowest < NO_VERSION:
        _fail("version", "a version is >= 0, or -1 for none")
    if _extremes(units.token_id)[0] < 0:
        _fail("token_id", "token ids are >= 0")
    lowest, highest = _extremes(units.logprob, may_be_nan=True)
    if not (lowest > -math.inf and highest <= LOGPROB_SLACK):  # false for NaN
        _fail("logprob", f"log-probs are finite and <= {LOGPROB_SLACK}")

    mask = units.mask.tobytes()
    versioned = (version >= 0).tobytes()
    n_sampled = int(np.count_nonzero(units.mask))
    if versioned == mask:
        # As unsigned, -1 is the largest value: the minimum is that of the real versions.
        min_version = int(_extremes(version.view(U32))[0]) if n_sampled else NO_VERSION
    else:
        if units.mask.max() > 1:
            _fail("mask", "a mask is 0 or 1")
        trained = version[units.mask.view(np.bool_)]
        min_version, max_version = (int(trained.min()), int(trained.max())) if n_sampled else (-1, -1)
        if n_sampled and min_version < 0:
            _fail("version", "a unit with mask 1 has the version that sampled it")
    # Mask 1 implies a version by now, so looking for versions finds both.
    for i, k in enumerate(kind):
        if k != _SAMPLED and (
            mask.find(1, offset[i], ends[i]) >= 0 or versioned.find(1, offset[i], ends[i]) >= 0
        ):
            _fail("mask, version", f"segment {i} is not sampled, so its units have mask 0 and version -1")
    return Facts(n_sampled, min_version, int(max_version), _check_epochs(header.epochs, mask, n_sampled))


def _extremes(column: NDArray, may_be_nan: bool = False) -> tuple[float, float]:
    """Smallest and largest value of a column, exact for i32 and f32; (nan, nan) when it holds a NaN."""
    if len(column) > _SMALL:
        return column.min(), column.max()
    values = column.tolist()
    if may_be_nan and math.isnan(sum(values)):
        return math.nan, math.nan  # the order decides what min() makes of a NaN
    return min(values), max(values)


def _check_epochs(epochs: list[tuple[int, int]], mask: bytes, n_sampled: int) -> int:
    """The smallest epoch, -1 without sampled units."""
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


def _fail(column: str, rule: str) -> NoReturn:
    raise InvariantError(f"{column}: {rule}")
