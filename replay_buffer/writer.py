"""Writes to Redis, in order and in groups.

Promises: writes reach Redis in the order of `submit`, each all or nothing; whatever has come up while Redis
was busy goes out together in one round trip (with tier `always` also in one fsync). After the first write
that is not confirmed no later one is tried: all fail alike, and `on_failure` is called at once, once.

A write carries the revision it was decided at, so none can pass that was built on one that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from replay_buffer.clock import RedisClock
from replay_buffer.errors import StoreError, StoreFenced, StoreUnavailable
from replay_buffer.keys import Argument, Commands

MOST_AT_ONCE = 64
"""Writes in one round trip."""


class Writer:
    """Runs the write script over one connection pool. `sha` is the script's, loaded before."""

    def __init__(
        self,
        redis: Redis,
        sha: str,
        front_epoch: int,
        clock: RedisClock,
        on_failure: Callable[[StoreError], None],
    ) -> None:
        self.tail: asyncio.Future[None] | None = None
        """Confirmation of the last write submitted: when it is there, so are all before it."""
        self.confirmed = 0
        """Revision of the ledger after the last confirmed write."""
        self._redis = redis
        self._sha = sha
        self._front_epoch = front_epoch
        self._clock = clock
        self._on_failure = on_failure
        self._queue: list[tuple[int, list[Argument], asyncio.Future[None]]] = []
        self._in_flight: list[asyncio.Future[None]] = []
        self._some = asyncio.Event()
        self._failure: StoreError | None = None
        self._task = asyncio.create_task(self._run(), name="buffer-writer")

    def submit(self, revision: int, commands: Commands) -> asyncio.Future[None]:
        """Queue a write that was decided at `revision`; the future ends when Redis has confirmed it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tail = future
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        keys = commands.keys
        call = ["EVALSHA", self._sha, len(keys), *keys, self._front_epoch, revision, *commands.arguments]
        self._queue.append((revision, call, future))
        self._some.set()
        return future

    async def close(self) -> None:
        """Write what is queued, then stop."""
        while self._failure is None and (self._queue or self._in_flight):
            await asyncio.wait([self.tail or self._task, self._task], return_when=asyncio.FIRST_COMPLETED)
        self._task.cancel()
        await asyncio.wait([self._task])
        self._fail(StoreUnavailable("the buffer stops"), tell=False)

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            batch, self._queue = self._queue[:MOST_AT_ONCE], self._queue[MOST_AT_ONCE:]
            if not self._queue:
                self._some.clear()
            self._in_flight = [future for _, _, future in batch]
            try:
                await self._write([call for _, call, _ in batch])
            except StoreError as error:
                self._fail(error)
                return
            self.confirmed = batch[-1][0] + 1
            for future in self._in_flight:
                if not future.done():
                    future.set_result(None)
            self._in_flight = []

    async def _write(self, calls: Sequence[list[Argument]]) -> None:
        sent_ms = self._clock.local_ms()
        try:
            if len(calls) == 1:
                answers: list[Any] = [await self._redis.execute_command(*calls[0])]
            else:
                pipeline = self._redis.pipeline(transaction=False)
                for call in calls:
                    pipeline.execute_command(*call)
                answers = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis did not confirm a write: {error}") from error
        received_ms = self._clock.local_ms()
        for answer in answers:
            check_answer(answer)
            self._clock.observe(answer[1], sent_ms, received_ms)

    def _fail(self, error: StoreError, *, tell: bool = True) -> None:
        if self._failure is None and tell:
            self._on_failure(error)
        self._failure = error
        for future in (*self._in_flight, *(future for _, _, future in self._queue)):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen: whoever asked may be gone
        self._in_flight, self._queue = [], []


def check_answer(answer: Any) -> None:
    """Raise what an answer of the write script means, unless it is the confirmation."""
    if isinstance(answer, Exception):
        raise StoreUnavailable(f"Redis refused a write: {answer}")
    if answer[0] == b"fenced":
        raise StoreFenced(
            f"another buffer front (epoch {answer[1].decode()}) has taken over this job; this one ends"
        )
    if answer[0] != b"ok":
        raise StoreUnavailable(
            f"the ledger in Redis is at revision {answer[1].decode()}, not where it was left"
        )
