"""Waiting for something to become possible, without asking again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from replay_buffer.ledger.index import Edge

EDGES: tuple[Edge, ...] = ("lease", "claim", "batch")


class Edges:
    """One event per edge, replaced when it fires. Take the event before looking, wait on it after."""

    def __init__(self) -> None:
        self._events = {edge: asyncio.Event() for edge in EDGES}

    def next(self, edge: Edge) -> asyncio.Event:
        """The event that the next `fire` of `edge` sets."""
        return self._events[edge]

    def fire(self, edges: Iterable[Edge] = EDGES) -> None:
        for edge in edges:
            self._events[edge].set()
            self._events[edge] = asyncio.Event()
