"""Builder of an episode, which adds segments in the order in which they occur."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
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
    InvariantError,
    Media,
    SegmentFlag,
    SegmentKind,
    Segments,
    Units,
)
from areal_async.trajectory.one_call import PromptedGroup
from areal_async.trajectory.routes import Routes, no_route

Ints = Sequence[int] | NDArray[Any]
Floats = Sequence[float] | NDArray[Any]

_NO_REWARD, _NO_ANCHOR = array("f", [math.nan]).tobytes(), array("q", [NO_ANCHOR]).tobytes()
_SAMPLED = int(SegmentKind.SAMPLED)
_ONE_AGENT = (("main", 0),)
_PARENT, _OFFSET, _LENGTH, _FLAGS = map(TABLE_COLUMNS.index, ("parent", "offset", "length", "flags"))
PLAIN_CALL = Call()
UnitBytes = tuple[bytes, bytes, bytes, bytes]
"""The columns `token_id`, `logprob`, `version` and `mask` of one segment's units."""


def anchor_of(key: str | bytes) -> int:
    """Return the hash of a state key as an i64: blake2b-64, little-endian. It is never 0, because 0 means no
    anchor. Equal keys have equal anchors in all episodes."""
    data = key.encode() if isinstance(key, str) else key
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


class EpisodeBuilder:
    """Builder of an episode from segments and units. `build` checks every invariant and may be called several
    times.

    Sequences are lists or 1-D arrays. A value that is not a number, or does not fit i32, raises
    InvariantError at once. If values contradict each other, `build` raises InvariantError."""

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
        """`agents` are pairs (name, index of the agent's policy in `policies`)."""
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
        # Each segment has a row of the segment table here, and its unit columns as bytes.
        self._segments: list[list[int]] = []
        self._units: list[UnitBytes] = []
        self._n_units = 0
        # Values by segment. Few segments have them.
        self._reward: dict[int, float] = {}
        self._anchor: dict[int, int] = {}
        self._columns: dict[str, dict[int, bytes]] = {}
        self._routes: dict[int, Routes] = {}
        self._began: dict[int, tuple[int, int]] = {}

    def alike(self) -> PromptedGroup:
        """Return the group of this builder's prompt, the only segment so far, whose samples are one answer to
        it each."""
        (prompt,) = self._units
        job, task_id, group_id, _, attempt = self._identity
        ids = np.frombuffer(prompt[0], I32)
        speakers = self._policies, self._agents
        return PromptedGroup(job, task_id, group_id, attempt, *speakers, self._prompt_text, ids)

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies, in the order of their numbers."""
        return tuple(self._policies)

    def agent(self, name: str, policy: int | None = None) -> int:
        """Return the number of the agent called `name`. An unknown agent is added, with `policy` or the first
        policy. Raises InvariantError if the agent has another policy."""
        for index, agent in enumerate(self._agents):
            if agent.name == name:
                if policy not in (None, agent.policy):
                    raise InvariantError(f"agent {name!r} speaks for {self._policies[agent.policy]}")
                return index
        self._agents.append(Agent(name, policy or 0))
        return len(self._agents) - 1

    def agent_of(self, policy: int) -> int:
        """Return the number of the first agent of a policy. If the policy has no agent, add an agent with the
        policy's name."""
        found = (index for index, agent in enumerate(self._agents) if agent.policy == policy)
        index = next(found, None)
        return self.agent(self._policies[policy], policy) if index is None else index

    def policy_of(self, agent: int) -> int:
        """Return the number of an agent's policy."""
        return self._agents[agent].policy if 0 <= agent < len(self._agents) else 0

    def prompt(self, ids: Ints, parent: int | None = None, agent: int = 0, turn: int = 0) -> int:
        """Add a PROMPT segment and return its index. Without a parent it starts a path."""
        return self.observed(SegmentKind.PROMPT, ids, parent, agent, turn)

    def observed(
        self, kind: SegmentKind, ids: Ints, parent: int | None, agent: int = 0, turn: int = 0
    ) -> int:
        """Add a segment that no policy sampled, such as a tool's or an environment's answer. Return its
        index."""
        if kind == SegmentKind.SAMPLED:
            raise InvariantError("a sampled segment is added with sampled()")
        tokens = _ints(ids, "ids")
        n = len(tokens) // 4
        return self._add(kind, parent, agent, turn, (tokens, bytes(4 * n), b"\xff" * (4 * n), bytes(n)))

    def sampled(
        self,
        ids: Ints,
        logprobs: Floats,
        versions: Ints | int,
        *,
        parent: int | None,
        call: Call = PLAIN_CALL,
        epoch: int | Ints = 0,
        agent: int = 0,
        turn: int = 0,
        mask: Ints | None = None,
    ) -> int:
        """Add the tokens that one call generated from the path of `parent`. Return the segment's index.

        `versions` and `epoch` have one value per unit, or one value for all units. `call` has the sampling
        parameters; this method sets its segment and its policy. `mask` (0 or 1 per unit) excludes units from
        training; without it, all units are trained. A unit that was not sampled (forced text) has mask 0 and
        version -1."""
        tokens = _ints(ids, "ids")
        n = len(tokens) // 4
        probs = _floats(logprobs, "logprobs")
        if isinstance(versions, (int, np.integer)):
            vers = _ints((int(versions),), "versions") * n
        else:
            vers = _ints(versions, "versions")
        bits = b"\x01" * n if mask is None else _mask_bytes(mask)
        if not len(tokens) == len(probs) == len(vers) == 4 * len(bits):
            found = f"{n} ids, {len(probs) // 4} logprobs, {len(vers) // 4} versions, {len(bits)} mask values"
            raise InvariantError(f"{found} do not match")
        runs = _epoch_runs(epoch, bits)
        policy, start, epochs = self.policy_of(agent), self._n_units, self._epochs
        segment = self._add(_SAMPLED, parent, agent, turn, (tokens, probs, vers, bits))
        self._calls.append(Call(segment, policy, call.sampling, call.finish_reason, call.logprobs_of))
        for first, value in runs:
            if policy not in self._began:
                version = int.from_bytes(vers[4 * first : 4 * first + 4], "little", signed=True)
                self._began[policy] = value, version
            if not epochs or epochs[-1][1] != value:
                epochs.append((start + first, value))
        return segment

    def began(self, policy: int = 0) -> tuple[int, int] | None:
        """Return the epoch and version of the weights that sampled the first trained unit (mask 1) of the
        policy. Return None if the policy has no such unit yet."""
        return self._began.get(policy)

    def reward(self, segment: int, value: float) -> None:
        """Set the reward of a segment."""
        self._reward[self._index(segment)] = value

    def episode_reward(self, name: str, value: float) -> None:
        """Set a named reward of the whole episode."""
        self._rewards[name] = value

    def anchor(self, segment: int, key: str | bytes) -> None:
        """Mark the state before a segment. States with equal keys can be compared across the episodes of a
        group."""
        self._anchor[self._index(segment)] = anchor_of(key)

    def flag(self, segment: int, flags: SegmentFlag) -> None:
        """Add flags to a segment."""
        self._segments[self._index(segment)][_FLAGS] |= int(flags)

    def column(self, name: str, segment: int, values: Floats) -> None:
        """Set an optional f32 column for the units of one segment. Other units have NaN (unknown)."""
        data = _floats(values, name)
        if len(data) != 4 * (length := self._segments[self._index(segment)][_LENGTH]):
            raise InvariantError(f"column {name}: {len(data) // 4} values for {length} units")
        self._columns.setdefault(name, {})[segment] = data

    def routes(self, segment: int, found: Routes, first: int = 0) -> None:
        """Set routes for the units on the path down to `segment`, starting at unit `first` of the path.
        `found` has the shape [n, width] (see `routes.py`). A unit keeps its first routes, which belong to the
        pass that sampled the next unit. A later call may compute the same prefix again with other routes."""
        end = 0
        for at in self._path(segment):
            start, end = end, end + self._segments[at][_LENGTH]
            low, high = max(start, first), min(end, first + len(found))
            if low >= high:
                continue
            if at not in self._routes:
                self._routes[at] = np.full((end - start, found.shape[1]), no_route(found.dtype), found.dtype)
            held = self._routes[at]
            if held.dtype != found.dtype or held.shape[1] != found.shape[1]:
                raise InvariantError("routes: those of one episode are of one model")
            own = held[low - start : high - start]
            empty = (own == no_route(own.dtype)).all(1)
            own[empty] = found[low - first : high - first][empty]

    def routed(self, segment: int) -> int:
        """Return how many units at the start of the path down to `segment` have routes without a gap."""
        count = 0
        for at in self._path(segment):
            held = self._routes.get(at)
            known = 0 if held is None else int((held != no_route(held.dtype)).any(1).cumprod().sum())
            count += known
            if known < self._segments[at][_LENGTH]:
                break
        return count

    def media(
        self, segment: int, digest: str, media_type: str, size_bytes: int, start: int = 0, n_units: int = 0
    ) -> None:
        """Add a reference to an attachment. Its `n_units` placeholder units begin at unit `start` of
        `segment`."""
        first = self._segments[self._index(segment)][_OFFSET] + start
        self._media.append(Media(digest, media_type, size_bytes, segment, first, n_units))

    def text(self, prompt: str | None = None, response: str | None = None) -> None:
        """Set the readable prompt, the response, or both. Text rewards judge these texts."""
        if prompt is not None:
            self._prompt_text = prompt
        if response is not None:
            self._response_text = response

    def meta(self, **values: Any) -> None:
        """Add metadata; values must fit msgpack."""
        self._metadata.update(values)

    @property
    def answered(self) -> bool:
        """Return whether a policy has sampled a segment."""
        return bool(self._calls)

    def fail(self, fault: str) -> None:
        """Record that the episode ended early because an answer was at fault. `fault` is `kind: message`."""
        self._fault = fault

    def keep_first_answer(self) -> None:
        """Keep only the first answer and the path to it, without texts, metadata and rewards. The kept part
        passes the checks of `build`, even if a later answer made the episode invalid."""
        n = self._calls[0].segment + 1
        del self._segments[n:], self._units[n:], self._calls[1:]
        self._n_units = units = self._segments[-1][_OFFSET] + self._segments[-1][_LENGTH]
        self._epochs = [run for run in self._epochs if run[0] < units]
        self._media = [media for media in self._media if media.segment < n]
        self._columns, self._routes, self._metadata, self._rewards = {}, {}, {}, {}
        self._reward, self._anchor = {}, {}
        self._prompt_text = self._response_text = ""

    def build(self, *, limits: EpisodeLimits = DEFAULT_LIMITS) -> Episode:
        """Return an episode with everything added so far. Raises InvariantError or SizeError."""
        header = EpisodeHeader(
            *self._identity,
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
        n_segments = len(self._segments)
        try:
            cells = chain.from_iterable(zip(*self._segments, strict=True))
            table = np.frombuffer(array("i", cells).tobytes(), I32).reshape(len(TABLE_COLUMNS), n_segments)
            reward = np.frombuffer(_sparse(self._reward, "f", _NO_REWARD, n_segments), F32)
            anchor = np.frombuffer(_sparse(self._anchor, "q", _NO_ANCHOR, n_segments), I64)
        except (TypeError, OverflowError) as error:
            raise InvariantError(f"segment table: {error}") from error
        parts: Iterable[Iterable[bytes]] = zip(*self._units, strict=True) if self._units else ((),) * 4
        token_id, logprob, version, mask = map(b"".join, parts)
        units = Units(
            np.frombuffer(token_id, I32),
            np.frombuffer(mask, U8),
            np.frombuffer(logprob, F32),
            np.frombuffer(version, I32),
            self._dense_columns(),
        )
        return Episode(header, Segments(table, reward, anchor), units, limits=limits)

    def _add(self, kind: int, parent: int | None, agent: int, turn: int, units: UnitBytes) -> int:
        n = len(units[-1])
        parent = NO_PARENT if parent is None else parent
        self._segments.append([parent, int(kind), agent, turn, self._n_units, n, 0])
        self._units.append(units)
        self._n_units += n
        return len(self._segments) - 1

    def _dense_columns(self) -> dict[str, NDArray[Any]]:
        columns: dict[str, NDArray[Any]] = {}
        for name, spans in self._columns.items():
            columns[name] = np.full(self._n_units, np.nan, F32)
            for segment, data in spans.items():
                first = self._segments[segment][_OFFSET]
                columns[name][first : first + len(data) // 4] = np.frombuffer(data, F32)
        for segment, held in self._routes.items():
            if ROUTES not in columns:
                shape = (self._n_units, held.shape[1])
                columns[ROUTES] = np.full(shape, no_route(held.dtype), held.dtype)
            first = self._segments[segment][_OFFSET]
            columns[ROUTES][first : first + len(held)] = held
        return columns

    def _path(self, segment: int) -> list[int]:
        """Return the indexes of the segments from the root down to `segment`."""
        path = []
        while segment != NO_PARENT:
            path.append(segment)
            segment = self._segments[self._index(segment)][_PARENT]
        return path[::-1]

    def _index(self, segment: int) -> int:
        if not 0 <= segment < len(self._segments):
            raise InvariantError(f"there is no segment {segment}")
        return segment


# The functions below convert a caller's values to typed columns. They truncate nothing: they refuse a float
# as a token id, and a value that does not fit 32 bits.


def _epoch_runs(epoch: int | Ints, bits: bytes) -> list[tuple[int, int]]:
    """Return runs of equal epochs, as (first unit, epoch), over the units of a segment with mask 1."""
    n = len(bits)
    epochs = (
        _ints((int(epoch),), "epoch") * n if isinstance(epoch, (int, np.integer)) else _ints(epoch, "epoch")
    )
    if len(epochs) != 4 * n:
        raise InvariantError(f"{n} ids and {len(epochs) // 4} epochs do not match")
    if epochs == epochs[:4] * n:  # the usual case
        first = bits.find(1)
        return [(first, int.from_bytes(epochs[:4], "little", signed=True))] if first >= 0 else []
    units = np.flatnonzero(np.frombuffer(bits, U8))
    values = np.frombuffer(epochs, I32)[units]
    changes = np.ones(len(units), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return list(zip(units[changes].tolist(), values[changes].tolist(), strict=True))


def _sparse(values: dict[int, Any], code: str, nothing: bytes, n: int) -> bytes:
    """Return `n` numbers as bytes of the array type `code`. Indexes without a value get `nothing`."""
    if not values:
        return nothing * n
    dense = array(code, nothing * n)
    for index, value in values.items():
        dense[index] = value
    return dense.tobytes()


def _ints(values: Ints, what: str) -> bytes:
    """Return values as i32 bytes. Raises InvariantError for a float or a value that does not fit."""
    return _typed(values, what, "i", I32, "iub")


def _floats(values: Floats, what: str) -> bytes:
    """Return values as f32 bytes."""
    return _typed(values, what, "f", F32, "f")


def _typed(values: Ints | Floats, what: str, code: str, dtype: np.dtype, kinds: str) -> bytes:
    """Return the bytes of an array of type `code`. `values` is a list or a 1-D array whose dtype has one of
    the `kinds`."""
    try:
        if not isinstance(values, np.ndarray):
            if isinstance(values, (bytes, bytearray, memoryview)):
                values = list(values)  # array() would read bytes as raw memory
            return array(code, values).tobytes()
        if values.dtype.kind not in kinds or values.ndim != 1:
            name = "float" if code == "f" else "integer"
            raise InvariantError(f"{what}: a 1-D {name} array is needed, not {values.dtype} {values.shape}")
        narrow = values.astype(dtype, copy=False)
        if code == "i" and narrow is not values and not np.array_equal(narrow, values):
            raise InvariantError(f"{what}: a value does not fit 32 bits")
        return narrow.tobytes()
    except (TypeError, OverflowError) as error:
        raise InvariantError(f"{what}: {error}") from error


def _mask_bytes(mask: Ints) -> bytes:
    try:
        return bytes(np.frombuffer(_ints(mask, "mask"), I32).tolist())
    except ValueError as error:
        raise InvariantError(f"mask: {error}") from error
