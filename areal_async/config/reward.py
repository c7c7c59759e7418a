"""`reward`: how episodes are scored."""

from typing import Annotated, Any, Literal

from pydantic import Field

from areal_async.config.base import Section

Scope = Literal["episode", "group"]
FOLDER_OR_NAME = "a folder, or a name that is none"
FolderOrName = Annotated[str, FOLDER_OR_NAME]
"""An argument of a reward that names a folder, which is relative to the job file, or something else."""


class PolicySection(Section):
    """What a group does about a verdict that is no score."""

    retries: int = Field(default=1, ge=0, le=1000)
    """How often the call is made again before the verdict counts."""
    then: Literal["drop_group", "mask", "fail_job"] = "drop_group"
    """`drop_group`: the whole group is dropped. `mask`: the episode alone is, and the group goes on with the
    others, if at least `reward.min_scored` of them are left. `fail_job`: the job ends with an error that
    names the episode and the verdict."""


class AbstainSection(PolicySection):
    """What a group does about a verdict `abstain`."""

    retries: int = Field(default=0, ge=0, le=1000)
    """How often the call is made again before the verdict counts; who declined is likely to do so again."""


class FaultSection(Section):
    """Score of answers that cannot be judged by their own fault, such as one too long for the judge."""

    score: float = Field(default=0.0, allow_inf_nan=False)
    """Score of an answer that cannot be judged by its own fault. Set it to no more than the worst that the
    reward gives otherwise."""
    end_after: int = Field(default=64, ge=0, le=1_000_000)
    """Answers at fault in a row, from the first one of a run on, that end the job: then the agent,
    environment or limit is likely to be wrong, and not the answers. 0: none do."""


class RouteSection(Section):
    """One reward for some of the tasks. Patterns are those of a shell: `gsm8k*`, `code/?`."""

    data_source: str = "*"
    """Pattern that the task's `data_source` matches."""
    ability: str = "*"
    """Pattern that the task's `ability` matches."""
    tag: str | None = None
    """Pattern that the task's `extra_info.tag` matches, or one of them where it is a list."""
    name: str
    """Reward of these tasks: a built-in one, `path.py:name`, or the name of one in an installed package."""
    args: dict[str, Any] = Field(default_factory=dict)
    """What the reward of these tasks takes, by name."""
    scope: Scope = "episode"
    """Whether that reward is called for each `episode`, or once for all episodes of a `group`."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Deadline of one call for these tasks, in seconds; `reward.timeout_s` where none is given."""


class RewardSection(Section):
    name: str = "exact_match"
    """A built-in reward (see docs/rewards.md), `path.py:name` of a function marked `@reward`, or the name
    of one in an installed package (entry point group `areal_async.rewards`)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """What the reward takes, by name; for one of your own, its keyword arguments."""
    scope: Scope = "episode"
    """`episode`: one call for each episode. `group`: one call for all episodes of a group, once they are
    there; the reward must be made for it."""
    routes: tuple[RouteSection, ...] = ()
    """Other rewards for some of the tasks: the first route that matches counts; else `reward.name`."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Scoring processes."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one call, in seconds; past it its process is killed and the verdict is `timeout`."""
    worker_memory_mb: int = Field(default=4096, ge=0, le=1 << 24)
    """Most memory of one scoring process, in MiB; 0: no limit. One that comes near it is renewed between
    calls; a call that goes beyond it is ended, with the verdict `error`."""
    on_timeout: PolicySection = PolicySection()
    """What a group does about the verdict `timeout`."""
    on_error: PolicySection = PolicySection()
    """What a group does about the verdict `error`."""
    on_abstain: AbstainSection = AbstainSection()
    """What a group does about the verdict `abstain`."""
    on_fault: FaultSection = FaultSection()
    """Score of answers that cannot be judged by their own fault."""
    min_scored: int = Field(default=2, ge=1)
    """Fewest episodes with a score that a group is trained with where others of it were masked."""
