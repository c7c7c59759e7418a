"""`buffer`: the experience buffer, and the staleness bound that it enforces."""

from typing import Literal

from pydantic import Field

from areal_async.config.base import Section


class OvertakenSection(Section):
    """What step `v` does about a group with a live lease and minimum version `v - max_staleness`."""

    policy: Literal["wait", "drop"] = "wait"
    """`wait`: the step waits for the group and takes it in; `drop`: the group is dropped at once, counted."""
    limit_s: float = Field(default=60.0, gt=0)
    """Longest wait for such groups, in seconds; then they are dropped, counted."""


class GroupSection(Section):
    """What becomes of a group of which not all samples have come."""

    policy: Literal["complete", "deadline_drop", "deadline_partial"] = "complete"
    """`complete`: it is waited for; `deadline_drop`: it is dropped at the deadline, counted;
    `deadline_partial`: what has come by then is trained, the rest is given up."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from the group's first lease until its deadline."""
    min_samples: int = Field(default=1, ge=1)
    """Under `deadline_partial`, a group with fewer samples at the deadline is dropped, counted."""


class BufferSection(Section):
    redis: str = "embedded"
    """`embedded` starts a redis-server of the job's own; else a `redis://` or `unix://` URL."""
    durability: Literal["memory", "everysec", "always"] = "everysec"
    """What an acknowledged episode survives: the death of workers, scorers and trainer (`memory`), of Redis
    but for its last second (`everysec`), of Redis at any moment (`always`)."""
    max_staleness: int = Field(default=4, ge=0)
    """η: no token whose weights were more than so many steps older than the step's is ever in a gradient;
    0 is synchronous training."""
    batch_groups: int = Field(default=16, ge=1)
    """B: groups in one step."""
    on_overtaken: OvertakenSection = OvertakenSection()
    group: GroupSection = GroupSection()
    dynamic_filtering: bool = False
    """Drop a group whose rewards are all equal, counted, and generate another: it has no advantage to learn
    from."""
    lease_s: float = Field(default=30.0, gt=0)
    """A worker not heard of for so many seconds loses its groups; another generates what is missing."""
    max_groups: int = Field(default=4096, ge=1)
    """Most groups held at once, from their first lease to the checkpoint that holds them."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """Most bytes of episodes held at once."""
    max_age_s: float | None = Field(default=None, gt=0)
    """A group that is in no batch so many seconds after its first lease is dropped, counted, and its task
    tried again; null: the versions alone decide what is too old."""
