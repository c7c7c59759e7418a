"""`reward`: the scoring of episodes."""

from typing import Annotated, Any, Literal

from pydantic import Field

from areal_async.config.base import Section

Scope = Literal["episode", "group"]
FOLDER_OR_NAME = "a folder, or a name that is none"
FolderOrName = Annotated[str, FOLDER_OR_NAME]
"""An argument of a reward that is a folder relative to the job file, or a name of something else."""


class PolicySection(Section):
    """Handling of a verdict that is not a score."""

    retries: int = Field(default=1, ge=0, le=1000)
    """Retries before the verdict counts."""
    then: Literal["drop_group", "mask", "fail_job"] = "drop_group"
    """Action: `drop_group`, `fail_job`, or `mask` (leave out the episode; drop the group if fewer than
    `reward.min_scored` scores remain)."""


class AbstainSection(PolicySection):
    """Handling of the verdict `abstain`."""

    retries: int = Field(default=0, ge=0, le=1000)
    """Retries before the verdict counts."""


class FaultSection(Section):
    """Score of answers at fault: they cannot be judged, such as an answer too long for the judge."""

    score: float = Field(default=0.0, allow_inf_nan=False)
    """Score of an answer at fault, which makes its own scoring or agent fail (see
    docs/rewards.md#whose-fault-it-is). It must not exceed the reward's lowest score."""
    end_after: int = Field(default=64, ge=0, le=1_000_000)
    """Number of answers at the start of a run that end the job if all are at fault; 0 disables this."""


class RouteSection(Section):
    """A reward for some tasks, selected by shell patterns such as `gsm8k*` or `code/?`."""

    data_source: str = "*"
    """Pattern of the task's `data_source`."""
    ability: str = "*"
    """Pattern of the task's `ability`."""
    tag: str | None = None
    """Pattern of `extra_info.tag`; in a list, one item must match."""
    name: str
    """A built-in or installed reward, or `path.py:name`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    scope: Scope = "episode"
    """Unit of a call."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Timeout of a call, in seconds; null means `reward.timeout_s`."""


class RewardSection(Section):
    name: str = "exact_match"
    """A built-in reward (see docs/rewards.md), an entry point in `areal_async.rewards`, or `path.py:name` of
    a `@reward` function."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reward."""
    scope: Scope = "episode"
    """Unit of a call: an `episode` or a complete `group`."""
    routes: tuple[RouteSection, ...] = ()
    """Rewards of some tasks. The first match applies, otherwise `reward.name`."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Scoring processes."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of a call, in seconds. After it the verdict is `timeout`."""
    worker_memory_mb: int = Field(default=4096, ge=0, le=1 << 24)
    """Memory limit of a process, in MiB (0: none). A call above it gets the verdict `error`."""
    on_timeout: PolicySection = PolicySection()
    """Handling of the verdict `timeout`."""
    on_error: PolicySection = PolicySection()
    """Handling of the verdict `error`."""
    on_abstain: AbstainSection = AbstainSection()
    """Handling of the verdict `abstain`."""
    on_fault: FaultSection = FaultSection()
    """Score of answers at fault."""
    min_scored: int = Field(default=2, ge=1)
    """Minimum scored episodes that must remain in a group after `mask`."""
