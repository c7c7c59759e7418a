"""A lease as the worker holds it, and the buffer as the worker sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from areal_async.rpc.messages import HeartbeatAck, LeasedGroup, Leases, PutAck, VersionTag

DRAINED = "drained"
"""The reason of handing a lease over that nothing is wrong with: this worker stops."""


class Buffer(Protocol):
    """The part of `replay_buffer.client.BufferClient` that a worker needs."""

    async def lease(self, worker: str, capacity: int, serving: VersionTag, *, wait_ms: int = 0) -> Leases: ...

    async def heartbeat(self, worker: str, lease_ids: Sequence[str], serving: VersionTag) -> HeartbeatAck: ...

    async def release(self, worker: str, lease_id: str, reason: str, *, failed: bool = False) -> None: ...

    async def drain(self, worker: str, reason: str) -> None: ...

    async def put(self, lease_id: str, group_id: str, episodes: Mapping[int, bytes]) -> PutAck: ...


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
