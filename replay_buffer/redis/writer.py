"""Writes to Redis, in order, with many writes in flight.

Promises: writes reach Redis in the order of `submit`, each completely or not at all. With `durability:
always`, writes in flight share an fsync. After the first write that is not confirmed, no later write is
confirmed. All of them fail with the same error, and `on_failure` is called immediately, once.

A write contains the revision of the ledger at which it was decided. Redis can therefore refuse a write that
was based on a failed one.

    areal:{job}:meta       hash: schema, front, owner, revision, alive_ms, wall_ms, state (a `LedgerMeta`)
    areal:{job}:groups     hash: group id → `GroupRecord`
    areal:{job}:leases     hash: lease id → `LeaseRecord`
    areal:{job}:claims     hash: claim id → `ClaimRecord`
    areal:{job}:batches    hash: policy:step → `BatchPlan`
    areal:{job}:e:<group>  hash: sample → codec blob of the episode
    areal:{job}:large      hash: episode id → place of a large episode (`large.py`)
    areal:{job}:b:<n>      string: a chunk of a large episode
    areal:{job}:staged     set: written chunks that no record refers to yet

The job's name is the hash tag of every key. In a Redis Cluster, all keys of a job are therefore on one shard,
while different jobs may be on different shards.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hiredis
import msgspec

from areal_async.base.log import get_logger
from replay_buffer.ledger.index import WriteSet
from replay_buffer.redis.address import StoreError, StoreFenced, StoreUnavailable, refusal
from replay_buffer.redis.connection import Argument, RedisConnection, checked

CLOSE_LIMIT_S = 3.0  # How long closing waits for the last answers

log = get_logger("buffer")


class LedgerWriter:
    """Runner of the write script over its own connection. `sha` is the hash of the loaded script."""

    def __init__(
        self,
        connection: RedisConnection,
        sha: str,
        front_epoch: int,
        clock: LedgerClock,
        on_failure: Callable[[StoreError], None],
    ) -> None:
        self.tail: asyncio.Future[None] | None = None
        """Confirmation of the last submitted write. All earlier writes are confirmed before it."""
        self.confirmed = 0  # Revision of the ledger after the last confirmed write
        self._connection = connection
        self._sha = sha
        self._front_epoch = front_epoch
        self._clock = clock
        self._on_failure = on_failure
        self._under_way: deque[asyncio.Future[None]] = deque()
        self._failure: StoreError | None = None

    def submit(
        self, revision: int, commands: Commands, ahead: Sequence[Sequence[Argument]] = ()
    ) -> asyncio.Future[None]:
        """Send a write that was decided at `revision`. The future is done when Redis has confirmed it. The
        commands `ahead` go directly before it, and a refusal of one of them fails the write."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tail = future
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._under_way.append(future)
        for command in ahead:
            self._connection.call(*command).add_done_callback(self._went_ahead)
        fixed: tuple[Argument, ...] = (*commands.keys, self._front_epoch, revision, self._clock.now_ms())
        call = ("EVALSHA", self._sha, len(commands.keys), *fixed, *commands.arguments)
        self._connection.call(*call).add_done_callback(partial(self._answered, revision))
        return future

    async def close(self) -> None:
        """Wait until all writes are answered and their callers informed, then disconnect."""
        if self.tail is not None:
            await asyncio.wait([self.tail], timeout=CLOSE_LIMIT_S)
        self._failure = self._failure or StoreUnavailable("the buffer stops")
        self._connection.close()

    def _answered(self, revision: int, answer: asyncio.Future[Any]) -> None:
        if self._failure is not None:
            return
        try:
            check_answer(answer.result())
        except StoreError as error:
            self._fail(error)
            return
        self.confirmed = revision + 1
        future = self._under_way.popleft()
        if not future.done():
            future.set_result(None)

    def _went_ahead(self, answer: asyncio.Future[Any]) -> None:
        if self._failure is None and isinstance(refused := answer.result(), hiredis.ReplyError):
            self._fail(refusal(str(refused)))

    def _fail(self, error: StoreError) -> None:
        self._failure = error
        self._on_failure(error)
        under_way, self._under_way = self._under_way, deque()
        for future in under_way:
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: its caller may be gone


def fenced(epoch: int) -> StoreFenced:
    return StoreFenced(f"another buffer front (epoch {epoch}) has taken over this job; this one ends")


def check_answer(answer: Any) -> None:
    """Raise the exception for an answer of the write script, unless it confirms the write."""
    if checked(answer)[0] == b"fenced":
        raise fenced(int(answer[1]))
    if answer[0] == b"gone":
        raise StoreUnavailable("the ledger is not in Redis any more", "gone")
    if answer[0] == b"absent":
        raise StoreUnavailable(f"Redis does not hold {answer[1].decode()}, which was written just before")
    if answer[0] != b"ok":
        raise StoreUnavailable(
            f"the ledger in Redis is at revision {answer[1].decode()}, not where it was left"
        )


class LedgerClock:
    """Clock of a job's ledger, in milliseconds. While a front has the ledger, the clock follows the front's
    monotonic clock. Between two fronts it stands still, so the time left until a deadline does not shrink.
    Changes of the system clock do not affect it. The system clock only sets the first time of a new ledger.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._offset_ms: float | None = None

    def begin(self, alive_ms: int | None) -> int:
        """Continue from `alive_ms`, the time of the ledger's last write (None for a new ledger). A clock that
        is already running keeps its time. Return by how much the clock is ahead of `alive_ms`."""
        if self._offset_ms is None:
            began_ms = self._wall() * 1000 if alive_ms is None else alive_ms
            self._offset_ms = began_ms - self._monotonic() * 1000
        return 0 if alive_ms is None else max(0, self.now_ms() - alive_ms)

    def now_ms(self) -> int:
        if self._offset_ms is None:
            raise RuntimeError("the ledger's clock has not begun yet")
        return round(self._monotonic() * 1000 + self._offset_ms)


FILE = "confirmed"
_REVISION = struct.Struct("<q")


class ConfirmedRevision:
    """The last confirmed revision, in the file at `path`. The file is created if it is missing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> int:
        """Return the revision, or 0 if nothing was confirmed yet."""
        held = os.pread(self._fd, _REVISION.size, 0)
        return int(_REVISION.unpack(held)[0]) if held else 0

    def write(self, revision: int) -> None:
        try:
            os.pwrite(self._fd, _REVISION.pack(revision), 0)
        except OSError as error:  # Redis is on the same disk and reports failed writes itself
            log.warning("the newest confirmed revision is not written down", error=str(error))

    def close(self) -> None:
        os.close(self._fd)


MOST_ARGUMENTS = 2000  # Per command: Lua can unpack some thousand at once

_encode = msgspec.msgpack.Encoder().encode

Bytes = bytes | memoryview


class Keys:
    def __init__(self, job: str) -> None:
        self.prefix = f"areal:{{{job}}}:"
        self.meta = self.prefix + "meta"
        self.groups = self.prefix + "groups"
        self.leases = self.prefix + "leases"
        self.claims = self.prefix + "claims"
        self.batches = self.prefix + "batches"
        self.large = self.prefix + "large"
        self.staged = self.prefix + "staged"

    def blobs(self, group_id: str) -> str:
        return f"{self.prefix}e:{group_id}"

    def chunk(self, stem: str, number: int) -> str:
        return f"{self.prefix}b:{stem}.{number}"


class Commands:
    """Keys and arguments of one call of the write script."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.keys: list[str] = [keys.meta]
        self.arguments: list[Argument] = []
        self._number: dict[str, int] = {keys.meta: 1}

    def add(self, name: str, key: str, arguments: Sequence[Argument] = ()) -> None:
        """Add a command on a key. Very many arguments are split into several commands."""
        number = self._number.get(key)
        if number is None:
            self.keys.append(key)
            number = self._number[key] = len(self.keys)
        for start in range(0, len(arguments) or 1, MOST_ARGUMENTS):
            part = arguments[start : start + MOST_ARGUMENTS]
            self.arguments += (name, number, len(part), *part)

    def before_all(self, name: str, arguments: Sequence[Argument]) -> None:
        """Add a command on the meta hash, before all others."""
        self.arguments[:0] = (name, 1, len(arguments), *arguments)

    def table(self, key: str, records: Mapping[Any, Any]) -> None:
        """Add the records of one hash: records to set and records to delete."""
        gone = [name for name, record in records.items() if record is None]
        held: list[Argument] = []
        for name, record in records.items():
            if record is not None:
                held += (name, _encode(record))
        if gone:
            self.add("HDEL", key, gone)
        if held:
            self.add("HSET", key, held)

    def add_writes(
        self, writes: WriteSet, attachments: Sequence[Any], elsewhere: Container[tuple[str, int]]
    ) -> None:
        """Add a write set. Blobs come from the message's attachments, except those of the (group id, sample)
        in `elsewhere`, which are stored outside the group's hash. Commands that free memory come first, so
        that a Redis at its limit accepts the whole script."""
        for group_id, samples in writes.freed.items():
            if samples is None:
                self.add("UNLINK", self._keys.blobs(group_id))
            else:
                self.add("HDEL", self._keys.blobs(group_id), samples)
        for group_id, kept in writes.blobs.items():
            pairs: list[Argument] = []
            for sample, attachment in kept.items():
                if (group_id, sample) not in elsewhere:
                    pairs += (sample, attachments[attachment])
            if pairs:
                self.add("HSET", self._keys.blobs(group_id), pairs)
        self.table(self._keys.groups, writes.groups)
        self.table(self._keys.leases, writes.leases)
        self.table(self._keys.claims, writes.claims)
        batches = {f"{policy}:{step}": plan for (policy, step), plan in writes.batches.items()}
        self.table(self._keys.batches, batches)
        self.add("HSET", self._keys.meta, ("state", _encode(writes.meta)))
