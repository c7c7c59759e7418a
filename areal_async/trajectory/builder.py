"""Building an episode segment by segment, in the order in which things happened."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import chain
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from areal_async.rpc.schema import POLICY
from areal_async.trajectory.episode import Episode
from areal_async.trajectory.layout import (
    DEFAULT_LIMITS,
    F32,
    I32,
    I64,
    NO_ANCHOR,
    NO_PARENT,
    TABLE_COLUMNS,
    U8,
    Agent,
    Call,
    EpisodeHeader,
    EpisodeLimits,
    FinishReason,
    InvariantError,
    LogprobsOf,
    Media,
    Sampling,
    SegmentFlag,
    SegmentKind,
    Segments,
    Units,
)

OFFSET, LENGTH, FLAGS = map(TABLE_COLUMNS.index, ("offset", "length", "flags"))

Ints = Sequence[int] | NDArray[Any]
Floats = Sequence[float] | NDArray[Any]


def anchor_of(key: str | bytes) -> int:
    """i64 of a state key: blake2b-64, little-endian, never 0 (no anchor). Equal keys meet across episodes."""
    data = key.encode() if isinstance(key, str) else key
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


class EpisodeBuilder:
    """Collects segments and units; `build` checks every invariant and may be called more than once.

    Sequences are lists or 1-D arrays. What cannot be an i32 or a number raises InvariantError at once; what
    contradicts the rest does in `build`.
    """

    def __init__(
        self,
        job: str,
        task_id: str,
        group_id: str,
        sample: int,
        attempt: int = 0,
        policies: Sequence[str] = (POLICY,),
        agents: Iterable[tuple[str, int]] = (("main", 0),),
    ) -> None:
        """`agents` are (name, index of the agent's policy in `policies`)."""
        authors = [Agent(name, policy) for name, policy in agents]
        self._header = EpisodeHeader(
            job, task_id, group_id, sample, attempt, policies=list(policies), agents=authors
        )
        self._table: list[list[int]] = []  # One row a segment, as in `TABLE_COLUMNS`
        self._reward: list[float] = []
        self._anchor: list[int] = []
        self._token_id = array("i")
        self._logprob = array("f")
        self._version = array("i")
        self._mask = bytearray()
        self._columns: dict[str, dict[int, array[float]]] = {}

    def prompt(self, ids: Ints, parent: int | None = None, agent: int = 0, turn: int = 0) -> int:
        """Add a PROMPT segment; returns its index. Without a parent it starts a path."""
        return self.observed(SegmentKind.PROMPT, ids, parent, agent, turn)

    def observed(
        self, kind: SegmentKind, ids: Ints, parent: int | None, agent: int = 0, turn: int = 0
    ) -> int:
        """Add a segment that no policy sampled (a tool's answer, an environment's); returns its index."""
        if kind == SegmentKind.SAMPLED:
            raise InvariantError("a sampled segment is added with sampled()")
        tokens = _ints(ids, "ids")
        n = len(tokens)
        segment = self._add(kind, n, parent, agent, turn)
        self._token_id += tokens
        self._logprob.frombytes(bytes(4 * n))
        self._version.frombytes(b"\xff" * (4 * n))
        self._mask += bytes(n)
        return segment

    def sampled(
        self,
        ids: Ints,
        logprobs: Floats,
        versions: Ints | int,
        *,
        parent: int | None,
        sampling: Sampling,
        finish_reason: FinishReason,
        epoch: int | Ints = 0,
        agent: int = 0,
        turn: int = 0,
        policy: int | None = None,
        logprobs_of: LogprobsOf = "sampled",
        mask: Ints | None = None,
    ) -> int:
        """Add what one call generated from the path of `parent`; returns the segment's index.

        `versions` and `epoch` are per unit, or one value for all. `policy` defaults to the agent's.
        `mask` (0/1 per unit) leaves units out of training; by default all are trained. A masked-out unit that
        was not sampled (forced text) has version -1.
        """
        tokens = _ints(ids, "ids")
        n = len(tokens)
        probs = _floats(logprobs, "logprobs")
        if isinstance(versions, (int, np.integer)):
            vers = _ints((int(versions),), "versions") * n
        else:
            vers = _ints(versions, "versions")
        bits = b"\x01" * n if mask is None else _mask_bytes(mask)
        if not n == len(probs) == len(vers) == len(bits):
            raise InvariantError(
                f"{n} ids, {len(probs)} logprobs, {len(vers)} versions, {len(bits)} mask values do not match"
            )
        runs = _epoch_runs(epoch, bits)
        if policy is None:
            agents = self._header.agents
            policy = agents[agent].policy if 0 <= agent < len(agents) else 0
        start = len(self._token_id)
        segment = self._add(SegmentKind.SAMPLED, n, parent, agent, turn)
        self._token_id += tokens
        self._logprob += probs
        self._version += vers
        self._mask += bits
        self._header.calls.append(Call(segment, policy, sampling, finish_reason, logprobs_of))
        epochs = self._header.epochs
        for first, value in runs:
            if not epochs or epochs[-1][1] != value:
                epochs.append((start + first, value))
        return segment

    @property
    def began(self) -> tuple[int, int] | None:
        """Epoch and version of the weights that sampled the first unit to train; None before there is one."""
        if not self._header.epochs:
            return None
        first, epoch = self._header.epochs[0]
        return epoch, self._version[first]

    def reward(self, segment: int, value: float) -> None:
        """Set the reward of a segment."""
        self._reward[self._index(segment)] = value

    def episode_reward(self, name: str, value: float) -> None:
        """Set a named reward of the whole episode."""
        self._header.rewards[name] = value

    def anchor(self, segment: int, key: str | bytes) -> None:
        """Mark the state before a segment; equal keys can be compared across the episodes of a group."""
        self._anchor[self._index(segment)] = anchor_of(key)

    def flag(self, segment: int, flags: SegmentFlag) -> None:
        """Add flags to a segment."""
        self._table[self._index(segment)][FLAGS] |= int(flags)

    def column(self, name: str, segment: int, values: Floats) -> None:
        """Set an optional f32 column for the units of one segment; elsewhere it is NaN (unknown)."""
        data = _floats(values, name)
        if len(data) != (length := self._table[self._index(segment)][LENGTH]):
            raise InvariantError(f"column {name}: {len(data)} values for {length} units")
        self._columns.setdefault(name, {})[segment] = data

    def media(
        self, segment: int, digest: str, media_type: str, size_bytes: int, start: int = 0, n_units: int = 0
    ) -> None:
        """Refer to an attachment whose `n_units` placeholder units begin `start` units into `segment`."""
        first = self._table[self._index(segment)][OFFSET] + start
        self._header.media.append(Media(digest, media_type, size_bytes, segment, first, n_units))

    def text(self, prompt: str | None = None, response: str | None = None) -> None:
        """Set the readable prompt and/or response (what text rewards judge)."""
        if prompt is not None:
            self._header = replace(self._header, prompt_text=prompt)
        if response is not None:
            self._header = replace(self._header, response_text=response)

    def meta(self, **values: Any) -> None:
        """Add metadata; values must fit msgpack."""
        self._header.metadata.update(values)

    def build(self, *, limits: EpisodeLimits = DEFAULT_LIMITS) -> Episode:
        """The episode so far. Raises InvariantError or SizeError."""
        n_segments = len(self._table)
        try:
            table = array("i", chain.from_iterable(zip(*self._table, strict=True)))
            reward = array("f", self._reward)
        except (TypeError, OverflowError) as error:
            raise InvariantError(f"segment table: {error}") from error
        segments = Segments(
            np.frombuffer(table.tobytes(), I32).reshape(len(TABLE_COLUMNS), n_segments),
            np.frombuffer(reward.tobytes(), F32),
            np.frombuffer(array("q", self._anchor).tobytes(), I64),
        )
        units = Units(
            np.frombuffer(self._token_id.tobytes(), I32),
            np.frombuffer(bytes(self._mask), U8),
            np.frombuffer(self._logprob.tobytes(), F32),
            np.frombuffer(self._version.tobytes(), I32),
            {name: self._dense(spans) for name, spans in self._columns.items()},
        )
        # What is added from now on goes into lists of its own.
        held = {name: copy(getattr(self._header, name)) for name in EpisodeHeader.__struct_fields__}
        return Episode(EpisodeHeader(**held), segments, units, limits=limits)

    def _add(self, kind: int, n: int, parent: int | None, agent: int, turn: int) -> int:
        parent = NO_PARENT if parent is None else parent
        self._table.append([parent, int(kind), agent, turn, len(self._token_id), n, 0])
        self._reward.append(math.nan)
        self._anchor.append(NO_ANCHOR)
        return len(self._table) - 1

    def _dense(self, spans: dict[int, array[float]]) -> NDArray[np.float32]:
        column = np.full(len(self._token_id), np.nan, F32)
        for segment, data in spans.items():
            offset = self._table[segment][OFFSET]
            column[offset : offset + len(data)] = data
        return column

    def _index(self, segment: int) -> int:
        if not 0 <= segment < len(self._table):
            raise InvariantError(f"there is no segment {segment}")
        return segment


# What a caller hands in, as typed columns. Nothing is cut to fit: a float is no token id, and a value beyond
# 32 bits is refused.


def _epoch_runs(epoch: int | Ints, bits: bytes) -> list[tuple[int, int]]:
    """Runs (first unit, epoch) over the units of a segment whose bit is 1."""
    if isinstance(epoch, (int, np.integer)):
        first = bits.find(1)
        return [(first, int(epoch))] if first >= 0 else []
    epochs = _ints(epoch, "epoch")
    if len(epochs) != len(bits):
        raise InvariantError(f"{len(bits)} ids and {len(epochs)} epochs do not match")
    units = np.flatnonzero(np.frombuffer(bits, U8))
    values = np.frombuffer(epochs.tobytes(), I32)[units]
    changes = np.ones(len(units), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return list(zip(units[changes].tolist(), values[changes].tolist(), strict=True))


def _ints(values: Ints, what: str) -> array[int]:
    """Values as i32; a float, or what does not fit, is refused rather than cut."""
    out = array("i")
    try:
        if not isinstance(values, np.ndarray):
            if isinstance(values, (bytes, bytearray, memoryview)):
                values = list(values)  # array() would read bytes as raw memory
            return array("i", values)
        if values.dtype.kind not in "iub" or values.ndim != 1:
            raise InvariantError(f"{what}: a 1-D integer array is needed, not {values.dtype} {values.shape}")
        if values.dtype != I32:
            narrow = values.astype(I32)
            if not np.array_equal(narrow, values):
                raise InvariantError(f"{what}: a value does not fit 32 bits")
            values = narrow
        out.frombytes(values.tobytes())
    except (TypeError, OverflowError) as error:
        raise InvariantError(f"{what}: {error}") from error
    return out


def _floats(values: Floats, what: str) -> array[float]:
    """Values as f32."""
    out = array("f")
    try:
        if not isinstance(values, np.ndarray):
            return array("f", values)
        if values.dtype.kind != "f" or values.ndim != 1:
            raise InvariantError(f"{what}: a 1-D float array is needed, not {values.dtype} {values.shape}")
        out.frombytes(values.astype(F32, copy=False).tobytes())
    except (TypeError, OverflowError) as error:
        raise InvariantError(f"{what}: {error}") from error
    return out


def _mask_bytes(mask: Ints) -> bytes:
    try:
        return bytes(_ints(mask, "mask").tolist())
    except ValueError as error:
        raise InvariantError(f"mask: {error}") from error
