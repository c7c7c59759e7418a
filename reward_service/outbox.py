"""How many verdicts go into the next message: a pure function of those that wait."""

from __future__ import annotations

from collections.abc import Sequence

from areal_async.rpc.messages import EpisodeVerdict
from areal_async.rpc.verdicts import Score

MAX_VERDICTS = 512
"""Verdicts in one message, unless one claim has more."""
MAX_BYTES = 16 << 20
"""A message is ended by the verdict that brings it here; the wire takes four times as much."""
VALUE_BYTES = 9
"""A float in msgpack."""


def portion(waiting: Sequence[EpisodeVerdict]) -> int:
    """The length of the next message, 0 only where nothing waits.

    Verdicts of one claim that follow each other stay together: of a group that is judged as one, half would
    be masked or dropped before the other half says that it is to be judged again."""
    size_bytes = 0
    for index, verdict in enumerate(waiting):
        full = index >= MAX_VERDICTS or size_bytes >= MAX_BYTES
        if full and verdict.claim_id != waiting[index - 1].claim_id:
            return index
        size_bytes += _size_bytes(verdict)
    return len(waiting)


def _size_bytes(item: EpisodeVerdict) -> int:
    """About: what can be large is counted."""
    parts = item.verdict.parts if isinstance(item.verdict, Score) else None
    values = 0 if parts is None else len(parts.units) + 2 * (len(parts.segments) + len(parts.agents))
    return len(item.episode_id) + len(item.claim_id) + VALUE_BYTES * values
