"""What waits for a model: bounded, in order of arrival, emptied when it is closed."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """At most `most` items; `put` waits while it is full. `news` is set when something
    arrives. All methods belong to one event loop."""

    def __init__(self, most: int) -> None:
        self.items: deque[T] = deque()
        self.closed = False
        self._most = most
        self._room = asyncio.Event()
        self.news = asyncio.Event()

    async def put(self, item: T) -> bool:
        """False when the inbox is closed, before or while this waited."""
        while len(self.items) >= self._most and not self.closed:
            self._room.clear()
            await self._room.wait()
        if self.closed:
            return False
        self.items.append(item)
        self.news.set()
        return True

    async def get(self) -> T:
        """The oldest; waits while there is none."""
        while not self.items:
            self.news.clear()
            await self.news.wait()
        item = self.items.popleft()
        self._room.set()
        return item

    def taken(self) -> None:
        """To be called after items were taken from `items` itself."""
        self._room.set()

    def close(self) -> list[T]:
        """Wake who waits, and return what is left. Nothing gets in any more."""
        self.closed = True
        left = list(self.items)
        self.items.clear()
        self._room.set()
        return left
