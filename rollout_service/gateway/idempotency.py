"""One execution per idempotency key.

    same key, same body     joins the call while it runs, gets its answer afterwards
    same key, other body    422
    a call that failed      is forgotten, so that a repetition tries again

Bounded: the oldest finished calls are forgotten first; with `limit` calls running a new key is refused (429).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollout_service.gateway.errors import ApiError

T = TypeVar("T")

MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    body: bytes
    """Digest of what was asked for."""
    task: asyncio.Task[T]


class IdempotencyCache(Generic[T]):
    """Remembers the calls of one session."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, _Entry[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def call(
        self, key: str, body: bytes, execute: Callable[[], Coroutine[Any, Any, T]]
    ) -> tuple[asyncio.Task[T], bool]:
        """The task that is, or was, the call of `key`, and whether it has just begun. Raises `ApiError`."""
        if len(key) > MAX_KEY_CHARS:
            raise ApiError(400, f"Idempotency-Key has more than {MAX_KEY_CHARS} characters")
        if (known := self._known.get(key)) is not None:
            if known.body != body:
                raise ApiError(
                    422,
                    "this Idempotency-Key was used for another request: send a new key with a new body",
                    code="idempotency_key_reused",
                )
            self._known.move_to_end(key)
            return known.task, False
        self._make_room()
        task = asyncio.ensure_future(execute())
        self._known[key] = _Entry(body, task)
        task.add_done_callback(lambda done: self._ended(key, done))
        return task, True

    def _make_room(self) -> None:
        for key, known in list(self._known.items()):
            if len(self._known) < self._limit:
                return
            if known.task.done():
                del self._known[key]
        if len(self._known) >= self._limit:
            raise ApiError(429, f"{self._limit} calls with idempotency keys are running in this session")

    def _ended(self, key: str, task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._known.pop(key, None)

    async def close(self) -> None:
        """End what runs."""
        tasks = [known.task for known in self._known.values()]
        self._known.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
