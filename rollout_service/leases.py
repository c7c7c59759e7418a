"""A lease as the worker holds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from areal_async.rpc.messages import LeasedGroup

DRAINED = "drained"
"""The reason of handing a lease over that nothing is wrong with: this worker stops."""


@dataclass
class Held:
    """A lease, and the episodes of it that are not finished."""

    group: LeasedGroup
    episodes: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    stored: int = 0
    """Samples that the buffer has acknowledged under this lease."""
    turn: int = 0
    """Leases of this worker in the order in which they began: the oldest goes first."""
    failure: str = ""
    """Why one of its samples will not come."""
    at_fault: bool = False
    """Whether that is what its episodes do, and no trouble of the engine or of this worker."""

    @property
    def whole(self) -> bool:
        """With its last sample stored, a group has ended its lease by itself."""
        return self.stored >= len(self.group.missing)
