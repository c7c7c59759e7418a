"""`buffer`: the experience buffer, and the staleness bound that it enforces."""

from typing import Literal

from pydantic import Field

from areal_async.config.base import Section


class OvertakenSection(Section):
    """What step `v` does about a group with a live lease and minimum version `v - max_staleness`."""

    policy: Literal["wait", "drop"] = "wait"
    limit_s: float = Field(default=60.0, gt=0)
    """Longest wait for such groups; then they are dropped, counted."""


class BufferSection(Section):
    redis: str = "embedded"
    """`embedded` starts a redis-server of the job's own; else a `redis://` or `unix://` URL."""
    durability: Literal["memory", "everysec", "always"] = "everysec"
    max_staleness: int = Field(default=4, ge=0)
    """η: no unit with staleness above it is ever in a gradient."""
    batch_groups: int = Field(default=16, ge=1)
    """B: groups in one step."""
    on_overtaken: OvertakenSection = OvertakenSection()
    lease_s: float = Field(default=30.0, gt=0)
    """A lease not renewed by a heartbeat for this long is re-queued."""
    max_groups: int = Field(default=4096, ge=1)
    """Groups held at once, in any state before COMMITTED."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Episode payload held at once, in bytes."""
