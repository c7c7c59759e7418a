"""Writes to Redis, in order and without waiting for one another.

Promises: writes reach Redis in the order of `submit`, each all or nothing; many are under way at once, so
with tier `always` they share an fsync. From the first write that is not confirmed on, none is: all fail
alike, and `on_failure` is called at once, once.

A write carries the revision it was decided at, so none can pass that was built on one that failed.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hiredis

from replay_buffer.errors import StoreError, StoreFenced, StoreUnavailable, refusal
from replay_buffer.redis.connection import Argument, RedisConnection
from replay_buffer.redis.keys import Commands

CLOSE_LIMIT_S = 3.0
"""How long closing waits for the last answers."""


class LedgerWriter:
    """Runs the write script over a pipe of its own. `sha` is the script's, loaded before."""

    def __init__(
        self,
        pipe: RedisConnection,
        sha: str,
        front_epoch: int,
        clock: RedisClock,
        on_failure: Callable[[StoreError], None],
    ) -> None:
        self.tail: asyncio.Future[None] | None = None
        """Confirmation of the last write submitted: when it is there, so are all before it."""
        self.confirmed = 0
        """Revision of the ledger after the last confirmed write."""
        self._pipe = pipe
        self._sha = sha
        self._front_epoch = front_epoch
        self._clock = clock
        self._on_failure = on_failure
        self._under_way: deque[asyncio.Future[None]] = deque()
        self._failure: StoreError | None = None

    def submit(
        self, revision: int, commands: Commands, ahead: Sequence[Sequence[Argument]] = ()
    ) -> asyncio.Future[None]:
        """Send a write that was decided at `revision`; the future ends when Redis has confirmed it. The
        commands `ahead` go right before it, and a refusal of one of them fails the write."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tail = future
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._under_way.append(future)
        for command in ahead:
            self._pipe.call(*command).add_done_callback(self._went_ahead)
        answer = self._pipe.call(*script_call(self._sha, self._front_epoch, revision, commands))
        answer.add_done_callback(partial(self._answered, revision, self._clock.local_ms()))
        return future

    async def close(self) -> None:
        """Wait until what was sent is answered and whoever waits for it was told; then disconnect."""
        if self.tail is not None:
            await asyncio.wait([self.tail], timeout=CLOSE_LIMIT_S)
        self._failure = self._failure or StoreUnavailable("the buffer stops")
        self._pipe.close()

    def give_up(self, error: StoreError) -> None:
        """Fail what is under way and all that comes, because of `error`."""
        if self._failure is None:
            self._fail(error)
            self._pipe.close(str(error))

    def _answered(self, revision: int, sent_ms: float, answer: asyncio.Future[Any]) -> None:
        if self._failure is not None:
            return
        try:
            check_answer(answer.result())
        except StoreError as error:
            self._fail(error)
            return
        self._clock.observe(answer.result()[1], sent_ms, self._clock.local_ms())
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
                future.exception()  # marks it as seen: whoever asked may be gone


def script_call(sha: str, front_epoch: int, revision: int, commands: Commands) -> list[Any]:
    keys = commands.keys
    return ["EVALSHA", sha, len(keys), *keys, front_epoch, revision, *commands.arguments]


def fenced(epoch: int) -> StoreFenced:
    return StoreFenced(f"another buffer front (epoch {epoch}) has taken over this job; this one ends")


def check_answer(answer: Any) -> None:
    """Raise what an answer of the write script means, unless it is the confirmation."""
    if isinstance(answer, hiredis.ReplyError):
        raise refusal(str(answer))
    if answer[0] == b"fenced":
        raise fenced(int(answer[1]))
    if answer[0] == b"gone":
        raise StoreUnavailable("the ledger is not in Redis any more", "gone")
    if answer[0] == b"absent":
        raise StoreUnavailable(f"Redis does not hold {answer[1].decode()}, which was written just before")
    if answer[0] != b"ok":
        raise StoreUnavailable(
            f"the ledger in Redis is at revision {answer[1].decode()}, not where it was left"
        )


class RedisClock:
    """Milliseconds of Redis TIME, carried on by the local monotonic clock; never runs backwards.

    Every reply that names Redis's time bounds the difference between the two clocks: the reading was taken
    after the request was sent and before its reply came. A difference within the bounds is kept, so the clock
    does not jitter with the delay of replies."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset_ms: float | None = None
        self._last_ms = 0

    def local_ms(self) -> float:
        return self._monotonic() * 1000

    def observe(self, redis_ms: int, sent_ms: float, received_ms: float) -> None:
        """Redis said `redis_ms` to a request sent and answered at these local times."""
        low, high = redis_ms - received_ms, redis_ms + 1 - sent_ms
        if self._offset_ms is None:
            self._offset_ms = (low + high) / 2
        else:
            self._offset_ms = min(max(self._offset_ms, low), high)

    def now_ms(self) -> int:
        if self._offset_ms is None:
            raise RuntimeError("Redis has not been asked for its time yet")
        self._last_ms = max(self._last_ms, int(self.local_ms() + self._offset_ms))
        return self._last_ms


FILE = "confirmed"
_REVISION = struct.Struct("<q")


class ConfirmedRevision:
    """The mark in the file at `path`, which is made when it is not there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self) -> int:
        """0 where nothing was confirmed yet."""
        held = os.pread(self._fd, _REVISION.size, 0)
        return int(_REVISION.unpack(held)[0]) if held else 0

    def write(self, revision: int) -> None:
        os.pwrite(self._fd, _REVISION.pack(revision), 0)

    def close(self) -> None:
        os.close(self._fd)
