"""Where a server is found, which may change while its clients live."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Address:
    """The endpoint of one server, and the name of the key that it has (see `secret.py`).

    A server that comes up on another host has a new endpoint: `move` tells it to all that follow. Any thread
    may call."""

    def __init__(self, endpoint: str, server: str = "") -> None:
        self.endpoint = endpoint
        self.server = server
        self._followers: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self.endpoint

    def move(self, endpoint: str) -> None:
        """It is found at `endpoint` from now on; nothing happens where it was there before."""
        with self._lock:
            if endpoint == self.endpoint:
                return
            self.endpoint = endpoint
            followers = list(self._followers.values())
        for told in followers:
            told()

    def follow(self, told: Callable[[], None]) -> Callable[[], None]:
        """Have `told` called, by whatever thread, after each move; what is returned ends that."""
        with self._lock:
            self._followers[id(told)] = told

        def end() -> None:
            with self._lock:
                self._followers.pop(id(told), None)

        return end
