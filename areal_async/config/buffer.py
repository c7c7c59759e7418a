"""`buffer`: the experience buffer, and the staleness bound that it enforces."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from areal_async.config.base import Section


class OvertakenSection(Section):
    """What step `v` does about a group with a live lease and minimum version `v - max_staleness`."""

    policy: Literal["wait", "drop", "mask"] = "wait"
    """`wait`: the step waits for the group and takes it in; `drop`: the group is dropped at once, counted;
    `mask`: it is trained later without its tokens that are too old by then."""
    limit_s: float = Field(default=60.0, gt=0)
    """Longest wait for such groups, in seconds; then they are dropped, counted."""


class RedisLoginSection(Section):
    """How to log in to a Redis given by URL. The user's name is in the URL; passwords are never in a job
    file, which is copied into the run folder."""

    password_env: str = ""
    """Environment variable that holds the password."""
    password_file: Path | None = None
    """File that holds the password and nothing else. It is read at each connection, so it may change."""
    sentinel_username: str = ""
    """User to log in to the Sentinels as, where they want one."""
    sentinel_password_env: str = ""
    """Environment variable that holds the Sentinels' password, where they have one of their own."""
    sentinel_password_file: Path | None = None
    """File that holds it."""


class RedisTlsSection(Section):
    """Certificates for `rediss://` and `sentinels://`. The server's certificate is always checked."""

    ca_file: Path | None = None
    """PEM file of the authority that signed the server's certificate; the system's authorities without."""
    cert_file: Path | None = None
    """PEM file of the client certificate, where the server asks for one."""
    key_file: Path | None = None
    """PEM file of its key, without a passphrase."""
    check_hostname: bool = True
    """Whether the certificate must be for the host in the URL (with Sentinel: the address they name)."""


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
    """`embedded` starts a redis-server of the job's own; else a URL: `redis://`, `rediss://` (TLS), `unix://`,
    `sentinel://HOST:PORT,HOST:PORT/SERVICE` or `sentinels://` (see docs/redis.md)."""
    redis_login: RedisLoginSection = RedisLoginSection()
    redis_tls: RedisTlsSection = RedisTlsSection()
    durability: Literal["memory", "everysec", "always"] = "everysec"
    """What an acknowledged episode survives: the death of every process but Redis (`memory`); of Redis too,
    where a machine that fails may lose two seconds (`everysec`); of the machine as well (`always`)."""
    max_staleness: int = Field(default=4, ge=0, le=10_000)
    """η: no token whose weights were more than so many steps older than the step's is ever in a gradient;
    0 is synchronous training."""
    batch_groups: int = Field(default=16, ge=1, le=1_000_000)
    """B: groups in one step."""
    sampling: Literal["fifo", "freshest", "priority"] = "fifo"
    """Which scored groups a step takes: those of the oldest version (`fifo`), of the newest (`freshest`), or
    of the highest `priority`. Under each, what would otherwise become too old goes first."""
    priority: Literal["reward_variance", "advantage"] = "reward_variance"
    """What `sampling: priority` goes by: the variance of the group's rewards, or the mean size of their
    differences from the group's mean."""
    max_reuse: int = Field(default=1, ge=1, le=10_000)
    """Most steps that one group is trained in. Above 1, groups trained before fill the places of a step that
    new ones leave free, while they are young enough."""
    on_overtaken: OvertakenSection = OvertakenSection()
    group: GroupSection = GroupSection()
    dynamic_filtering: bool = False
    """Drop a group whose rewards are all equal, counted, and generate another: it has no advantage to learn
    from."""
    lease_s: float = Field(default=30.0, gt=0)
    """A worker not heard of for so many seconds loses its groups; another generates what is missing."""
    max_groups: int = Field(default=4096, ge=1, le=100_000_000)
    """Most groups held at once, from their first lease to the checkpoint that holds them."""
    max_bytes: int = Field(default=1 << 30, ge=1 << 20, le=1 << 50)
    """Most bytes of episodes held at once."""
    max_age_s: float | None = Field(default=None, gt=0)
    """A group that is in no batch so many seconds after its first lease is dropped, counted, and its task
    tried again; null: the versions alone decide what is too old."""
