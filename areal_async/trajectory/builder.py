"""Building an episode segment by segment, in the order in which things happened."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_async.base.versions import POLICY
from areal_async.trajectory.episode import Episode
from areal_async.trajectory.layout import (
    DEFAULT_LIMITS,
    F32,
    I32,
    I64,
    NO_ANCHOR,
    NO_PARENT,
    ROUTES,
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
from areal_async.trajectory.routes import Routes, no_route

Ints = Sequence[int] | NDArray[Any]
Floats = Sequence[float] | NDArray[Any]

_NO_REWARD, _NO_ANCHOR = array("f", [math.nan]).tobytes(), array("q", [NO_ANCHOR]).tobytes()
_SAMPLED = int(SegmentKind.SAMPLED)
_ONE_AGENT = (("main", 0),)


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
        agents: Iterable[tuple[str, int]] = _ONE_AGENT,
    ) -> None:
        """`agents` are (name, index of the agent's policy in `policies`)."""
        self._identity = (job, task_id, group_id, sample, attempt)
        self._policies = [*policies]
        self._agents = [Agent(name, policy) for name, policy in agents]
        self._calls: list[Call] = []
        self._epochs: list[tuple[int, int]] = []
        self._media: list[Media] = []
        self._rewards: dict[str, float] = {}
        self._metadata: dict[str, Any] = {}
        self._fault = ""
        self._prompt_text = self._response_text = ""
        # The segment table by column, and what few segments have.
        self._parent: list[int] = []
        self._kind: list[int] = []
        self._agent: list[int] = []
        self._turn: list[int] = []
        self._offset: list[int] = []
        self._length: list[int] = []
        self._flags: list[int] = []
        self._reward: dict[int, float] = {}
        self._anchor: dict[int, int] = {}
        # The unit table by column: the bytes of each segment.
        self._n_units = 0
        self._token_id: list[bytes] = []
        self._logprob: list[bytes] = []
        self._version: list[bytes] = []
        self._mask: list[bytes] = []
        self._columns: dict[str, dict[int, bytes]] = {}
        self._routes: dict[int, Routes] = {}
        self._began: dict[int, tuple[int, int]] = {}

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that may speak, in the order in which they are numbered."""
        return tuple(self._policies)

    def agent(self, name: str, policy: int | None = None) -> int:
        """The number of the agent called `name`. One that there is none of is added, as one of `policy`, by
        default the first; raises InvariantError where it is another policy's."""
        for index, agent in enumerate(self._agents):
            if agent.name == name:
                if policy not in (None, agent.policy):
                    raise InvariantError(f"agent {name!r} speaks for {self._policies[agent.policy]}")
                return index
        self._agents.append(Agent(name, policy or 0))
        return len(self._agents) - 1

    def agent_of(self, policy: int) -> int:
        """The number of the first agent of a policy; where there is none, of a new one of its name."""
        found = (index for index, agent in enumerate(self._agents) if agent.policy == policy)
        index = next(found, None)
        return self.agent(self._policies[policy], policy) if index is None else index

    def policy_of(self, agent: int) -> int:
        """The number of an agent's policy."""
        return self._agents[agent].policy if 0 <= agent < len(self._agents) else 0

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
        n = len(tokens) // 4
        return self._add(kind, parent, agent, turn, tokens, bytes(4 * n), b"\xff" * (4 * n), bytes(n))

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
        n = len(tokens) // 4
        probs = _floats(logprobs, "logprobs")
        if isinstance(versions, (int, np.integer)):
            vers = _ints((int(versions),), "versions") * n
        else:
            vers = _ints(versions, "versions")
        bits = b"\x01" * n if mask is None else _mask_bytes(mask)
        if not len(tokens) == len(probs) == len(vers) == 4 * len(bits):
            raise InvariantError(
                f"{n} ids, {len(probs) // 4} logprobs, {len(vers) // 4} versions, {len(bits)} mask values "
                "do not match"
            )
        runs = _epoch_runs(epoch, bits)
        policy = self.policy_of(agent) if policy is None else policy
        start, epochs = self._n_units, self._epochs
        segment = self._add(_SAMPLED, parent, agent, turn, tokens, probs, vers, bits)
        self._calls.append(Call(segment, policy, sampling, finish_reason, logprobs_of))
        for first, value in runs:
            if policy not in self._began:
                version = int.from_bytes(vers[4 * first : 4 * first + 4], "little", signed=True)
                self._began[policy] = value, version
            if not epochs or epochs[-1][1] != value:
                epochs.append((start + first, value))
        return segment

    def began(self, policy: int = 0) -> tuple[int, int] | None:
        """Epoch and version of the weights that sampled a policy's first unit to train; None before there is
        one."""
        return self._began.get(policy)

    def reward(self, segment: int, value: float) -> None:
        """Set the reward of a segment."""
        self._reward[self._index(segment)] = value

    def episode_reward(self, name: str, value: float) -> None:
        """Set a named reward of the whole episode."""
        self._rewards[name] = value

    def anchor(self, segment: int, key: str | bytes) -> None:
        """Mark the state before a segment; equal keys can be compared across the episodes of a group."""
        self._anchor[self._index(segment)] = anchor_of(key)

    def flag(self, segment: int, flags: SegmentFlag) -> None:
        """Add flags to a segment."""
        self._flags[self._index(segment)] |= int(flags)

    def column(self, name: str, segment: int, values: Floats) -> None:
        """Set an optional f32 column for the units of one segment; elsewhere it is NaN (unknown)."""
        data = _floats(values, name)
        if len(data) != 4 * (length := self._length[self._index(segment)]):
            raise InvariantError(f"column {name}: {len(data) // 4} values for {length} units")
        self._columns.setdefault(name, {})[segment] = data

    def routes(self, segment: int, found: Routes, first: int = 0) -> None:
        """Set the routes [n, width] of units from `first` on of the path down to `segment`, as `routes.py`
        has them. A unit keeps those that it was given first: of the pass that sampled what follows it, where
        an engine computes a prefix again for a later call."""
        end = 0
        for at in self._path(segment):
            start, end = end, end + self._length[at]
            low, high = max(start, first), min(end, first + len(found))
            if low >= high:
                continue
            held = self._routes.get(at)
            if held is None:
                nothing = np.full((end - start, found.shape[1]), no_route(found.dtype), found.dtype)
                held = self._routes[at] = nothing
            if held.dtype != found.dtype or held.shape[1] != found.shape[1]:
                raise InvariantError("routes: those of one episode are of one model")
            own = held[low - start : high - start]
            empty = (own == no_route(own.dtype)).all(1)
            own[empty] = found[low - first : high - first][empty]

    def routed(self, segment: int) -> int:
        """How many units the path down to `segment` begins with that have routes."""
        count = 0
        for at in self._path(segment):
            held = self._routes.get(at)
            known = 0 if held is None else int((held != no_route(held.dtype)).any(1).cumprod().sum())
            count += known
            if known < self._length[at]:
                break
        return count

    def media(
        self, segment: int, digest: str, media_type: str, size_bytes: int, start: int = 0, n_units: int = 0
    ) -> None:
        """Refer to an attachment whose `n_units` placeholder units begin `start` units into `segment`."""
        first = self._offset[self._index(segment)] + start
        self._media.append(Media(digest, media_type, size_bytes, segment, first, n_units))

    def text(self, prompt: str | None = None, response: str | None = None) -> None:
        """Set the readable prompt and/or response (what text rewards judge)."""
        if prompt is not None:
            self._prompt_text = prompt
        if response is not None:
            self._response_text = response

    def meta(self, **values: Any) -> None:
        """Add metadata; values must fit msgpack."""
        self._metadata.update(values)

    @property
    def answered(self) -> bool:
        """Return whether a policy has sampled anything."""
        return bool(self._calls)

    def fail(self, fault: str) -> None:
        """Note that the episode ended early by the fault of its answers (`kind: message`)."""
        self._fault = fault

    def keep_first_answer(self) -> None:
        """Forget all but the first answer and what it follows: texts, metadata and rewards too. What is left
        can be built whatever an answer led to afterwards."""
        n = self._calls[0].segment + 1
        units = self._offset[n - 1] + self._length[n - 1]
        tables: tuple[list[Any], ...] = (
            *(self._parent, self._kind, self._agent, self._turn, self._offset, self._length, self._flags),
            *(self._token_id, self._logprob, self._version, self._mask),
        )
        for table in tables:
            del table[n:]
        self._n_units = units
        self._calls = self._calls[:1]
        self._epochs = [run for run in self._epochs if run[0] < units]
        self._media = [media for media in self._media if media.segment < n]
        self._columns, self._routes, self._metadata, self._rewards = {}, {}, {}, {}
        self._reward, self._anchor = {}, {}
        self._prompt_text = self._response_text = ""

    def build(self, *, limits: EpisodeLimits = DEFAULT_LIMITS) -> Episode:
        """The episode so far. Raises InvariantError or SizeError."""
        job, task_id, group_id, sample, attempt = self._identity
        header = EpisodeHeader(
            job,
            task_id,
            group_id,
            sample,
            attempt,
            policies=self._policies.copy(),
            agents=self._agents.copy(),
            calls=self._calls.copy(),
            media=self._media.copy(),
            rewards=self._rewards.copy(),
            metadata=self._metadata.copy(),
            prompt_text=self._prompt_text,
            response_text=self._response_text,
            epochs=self._epochs.copy(),
            fault=self._fault,
        )
        n_segments = len(self._parent)
        try:
            table = array(
                "i",
                self._parent
                + self._kind
                + self._agent
                + self._turn
                + self._offset
                + self._length
                + self._flags,
            ).tobytes()
            reward = _sparse(self._reward, "f", _NO_REWARD, n_segments)
            anchor = _sparse(self._anchor, "q", _NO_ANCHOR, n_segments)
        except (TypeError, OverflowError) as error:
            raise InvariantError(f"segment table: {error}") from error
        segments = Segments(
            np.frombuffer(table, I32).reshape(len(TABLE_COLUMNS), n_segments),
            np.frombuffer(reward, F32),
            np.frombuffer(anchor, I64),
        )
        token_id, mask = b"".join(self._token_id), b"".join(self._mask)
        logprob, version = b"".join(self._logprob), b"".join(self._version)
        units = Units(
            np.frombuffer(token_id, I32),
            np.frombuffer(mask, U8),
            np.frombuffer(logprob, F32),
            np.frombuffer(version, I32),
            {name: self._dense(spans) for name, spans in self._columns.items()} | self._dense_routes(),
        )
        return Episode(header, segments, units, limits=limits)

    def _add(
        self,
        kind: int,
        parent: int | None,
        agent: int,
        turn: int,
        token_id: bytes,
        logprob: bytes,
        version: bytes,
        mask: bytes,
    ) -> int:
        segment, n = len(self._parent), len(mask)
        self._parent.append(NO_PARENT if parent is None else parent)
        self._kind.append(int(kind))
        self._agent.append(agent)
        self._turn.append(turn)
        self._offset.append(self._n_units)
        self._length.append(n)
        self._flags.append(0)
        self._n_units += n
        self._token_id.append(token_id)
        self._logprob.append(logprob)
        self._version.append(version)
        self._mask.append(mask)
        return segment

    def _dense(self, spans: dict[int, bytes]) -> NDArray[np.float32]:
        column = np.full(self._n_units, np.nan, F32)
        for segment, data in spans.items():
            offset = self._offset[segment]
            column[offset : offset + self._length[segment]] = np.frombuffer(data, F32)
        return column

    def _dense_routes(self) -> dict[str, Routes]:
        if not self._routes:
            return {}
        one = next(iter(self._routes.values()))
        column = np.full((self._n_units, one.shape[1]), no_route(one.dtype), one.dtype)
        for segment, held in self._routes.items():
            offset = self._offset[segment]
            column[offset : offset + len(held)] = held
        return {ROUTES: column}

    def _path(self, segment: int) -> list[int]:
        """Segments from the root down to `segment`."""
        path = []
        while segment != NO_PARENT:
            path.append(segment)
            segment = self._parent[self._index(segment)]
        return path[::-1]

    def _index(self, segment: int) -> int:
        if not 0 <= segment < len(self._parent):
            raise InvariantError(f"there is no segment {segment}")
        return segment


# What a caller hands in, as typed columns. Nothing is cut to fit: a float is no token id, and a value beyond
# 32 bits is refused.


def _epoch_runs(epoch: int | Ints, bits: bytes) -> list[tuple[int, int]]:
    """Runs (first unit, epoch) over the units of a segment whose bit is 1."""
    n = len(bits)
    if isinstance(epoch, (int, np.integer)):
        return _one_run(int(epoch), bits)
    epochs = _ints(epoch, "epoch")
    if n and epochs == epochs[:4] * n:
        return _one_run(int.from_bytes(epochs[:4], "little", signed=True), bits)
    if len(epochs) != 4 * n:
        raise InvariantError(f"{n} ids and {len(epochs) // 4} epochs do not match")
    units = np.flatnonzero(np.frombuffer(bits, U8))
    values = np.frombuffer(epochs, I32)[units]
    changes = np.ones(len(units), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return list(zip(units[changes].tolist(), values[changes].tolist(), strict=True))


def _one_run(epoch: int, bits: bytes) -> list[tuple[int, int]]:
    first = bits.find(1)
    return [(first, epoch)] if first >= 0 else []


def _sparse(values: dict[int, Any], code: str, nothing: bytes, n: int) -> bytes:
    """`n` numbers of an array's type `code`, `nothing` where there is no value."""
    if not values:
        return nothing * n
    dense = array(code, nothing * n)
    for index, value in values.items():
        dense[index] = value
    return dense.tobytes()


def _ints(values: Ints, what: str) -> bytes:
    """Values as i32; a float, or what does not fit, is refused rather than cut."""
    try:
        if not isinstance(values, np.ndarray):
            if isinstance(values, (bytes, bytearray, memoryview)):
                values = list(values)  # array() would read bytes as raw memory
            return array("i", values).tobytes()
        if values.dtype.kind not in "iub" or values.ndim != 1:
            raise InvariantError(f"{what}: a 1-D integer array is needed, not {values.dtype} {values.shape}")
        if values.dtype != I32:
            narrow = values.astype(I32)
            if not np.array_equal(narrow, values):
                raise InvariantError(f"{what}: a value does not fit 32 bits")
            values = narrow
        return values.tobytes()
    except (TypeError, OverflowError) as error:
        raise InvariantError(f"{what}: {error}") from error


def _floats(values: Floats, what: str) -> bytes:
    """Values as f32."""
    try:
        if not isinstance(values, np.ndarray):
            return array("f", values).tobytes()
        if values.dtype.kind != "f" or values.ndim != 1:
            raise InvariantError(f"{what}: a 1-D float array is needed, not {values.dtype} {values.shape}")
        return values.astype(F32, copy=False).tobytes()
    except (TypeError, OverflowError) as error:
        raise InvariantError(f"{what}: {error}") from error


def _mask_bytes(mask: Ints) -> bytes:
    try:
        return bytes(np.frombuffer(_ints(mask, "mask"), I32).tolist())
    except ValueError as error:
        raise InvariantError(f"mask: {error}") from error
