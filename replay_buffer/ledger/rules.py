"""Fixed rules of one job's ledger, and the source of its tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from areal_async.base.records import ImageFile, Task
from areal_async.base.verdicts import VerdictKind
from areal_async.base.versions import POLICY
from areal_async.config.job import JobConfig
from areal_async.config.reward import Scope
from areal_async.config.reward_routing import Routing
from areal_async.data.tasks import TaskTable, pass_order, read_tasks

MAX_LEASES = 5
"""Most leases of one group. If no worker has finished the group by then, it ends with the samples it has
(`group_policy.py`)."""
MAX_ATTEMPTS = 3
"""Most groups made from one task in one pass. A task gets another group if its group was dropped for a reason
in `TRY_AGAIN` (`transaction.py`)."""


@dataclass(frozen=True)
class VerdictPolicy:
    """Treatment of a verdict without a score. The episode is scored again while it has at most `retries`
    verdicts without a score, of any kind. After that, the group is dropped, the episode is masked, or the job
    fails."""

    retries: int = 1
    then: Literal["drop_group", "mask", "fail_job"] = "drop_group"


@dataclass(frozen=True)
class ConsumerRules:
    """Rules of one trained policy. The letters are the symbols of the admission formula."""

    batch_groups: int  # B: groups in a step
    max_staleness: int  # η: most steps from a unit's version to the step that trains it
    steps: int = 1 << 40  # Steps of the whole training; no group is generated for a later step

    def lowest_version(self, step: int) -> int:
        """Return the oldest version that `step` may train."""
        return step - self.max_staleness


@dataclass(frozen=True)
class Rules:
    """Rules of the job file (`areal_async/config/job.py`), with durations in integer milliseconds."""

    group_size: int  # n: episodes in a group
    consumers: Mapping[str, ConsumerRules]  # The trained policies by name
    uses: Callable[[Task], Sequence[str]] | None = None
    """Function that returns the policies that sample in the episodes of a task. None: all policies do."""
    lease_ms: int = 30_000
    claim_ms: int = 50_000  # A scorer without a heartbeat for this long loses its claims
    call_ms: int = 10_000
    """Longest deadline of one scoring call, in ms. A claim lasts at most this time for each of its
    episodes, plus `claim_ms`."""
    on_timeout: VerdictPolicy = VerdictPolicy()
    on_error: VerdictPolicy = VerdictPolicy()
    on_abstain: VerdictPolicy = VerdictPolicy(retries=0)
    faults_at_start: int = 64
    """The job ends if this many answers in a row are at fault before the first success. 0 turns this limit
    off."""
    min_scored: int = 2
    routing: Routing | None = None
    """Rewards by task. None: every task has one scoring call per episode."""
    pacing: Literal["fresh", "full"] = "full"
    sampling: Literal["fifo", "freshest", "priority"] = "fifo"
    priority: Literal["reward_variance", "advantage"] = "reward_variance"
    max_reuse: int = 1
    overtaken_waits: bool = True
    overtaken_masks: bool = False
    """If true, a group is too old only when all its units are. In any other group, the trainer masks the
    units that are too old."""
    overtaken_ms: int = 60_000
    abandoned_trains: bool = False
    """If true, units from abandoned weights are trained, but count as older (`abandoned.py`)."""
    group_policy: Literal["complete", "deadline_drop", "deadline_partial"] = "complete"
    group_deadline_ms: int | None = None
    min_samples: int = 1
    dynamic_filtering: bool = False
    max_groups: int = 4096
    max_bytes: int = 1 << 30
    durability: Literal["memory", "everysec", "always"] = "everysec"
    first_success_ms: int = 5_000
    """Before the first success, the job ends if tries keep failing for this long (`transaction.py`)."""
    no_success_ms: int = 60_000  # The same after a success
    seed: int = 0

    @classmethod
    def alone(
        cls,
        *,
        batch_groups: int,
        max_staleness: int,
        steps: int = 1 << 40,
        policy: str = POLICY,
        **others: Any,
    ) -> Rules:
        """Return the rules of a job that trains one policy. `others` are fields of `Rules`."""
        return cls(consumers={policy: ConsumerRules(batch_groups, max_staleness, steps)}, **others)

    @classmethod
    def of(cls, job: JobConfig) -> Rules:
        buffer, reward = job.buffer, job.reward
        routing = Routing(reward)
        call_ms, lease_ms = _ms(max(spec.timeout_s for spec in routing.specs)), _ms(buffer.lease_s)
        longest_ms = _ms(max(spec.longest_s for spec in routing.specs))
        return cls(
            consumers={
                policy: ConsumerRules(own.buffer.batch_groups, own.buffer.max_staleness, own.trainer.steps)
                for policy, own in job.views.items()
            },
            group_size=job.rollout.group_size,
            lease_ms=lease_ms,
            # Twice, because a claim is renewed only after half of its time.
            claim_ms=2 * longest_ms + lease_ms,
            call_ms=call_ms,
            on_timeout=VerdictPolicy(reward.on_timeout.retries, reward.on_timeout.then),
            on_error=VerdictPolicy(reward.on_error.retries, reward.on_error.then),
            on_abstain=VerdictPolicy(reward.on_abstain.retries, reward.on_abstain.then),
            faults_at_start=reward.on_fault.end_after,
            min_scored=reward.min_scored,
            routing=routing,
            pacing=buffer.pacing,
            sampling=buffer.sampling,
            priority=buffer.priority,
            max_reuse=buffer.max_reuse,
            overtaken_waits=buffer.on_overtaken.policy == "wait",
            overtaken_masks=buffer.on_overtaken.policy == "mask",
            overtaken_ms=_ms(buffer.on_overtaken.limit_s),
            abandoned_trains=buffer.on_abandoned == "train" and buffer.on_overtaken.policy != "mask",
            group_policy=buffer.group.policy,
            group_deadline_ms=None if buffer.group.deadline_s is None else _ms(buffer.group.deadline_s),
            min_samples=buffer.group.min_samples,
            dynamic_filtering=buffer.dynamic_filtering,
            max_groups=buffer.max_groups,
            max_bytes=buffer.max_bytes,
            durability=buffer.durability,
            seed=job.seed,
        )

    def policies_of(self, task: Task) -> tuple[str, ...]:
        """Return the policies that train the episodes of `task`."""
        return tuple(self.consumers if self.uses is None else self.uses(task))

    def on(self, kind: VerdictKind) -> VerdictPolicy:
        """Return the treatment of a verdict of this kind without a score."""
        return {"timeout": self.on_timeout, "error": self.on_error, "abstain": self.on_abstain}[kind]

    def scope(self, task: Task) -> Scope:
        """Return whether the task's episodes are scored singly or as a group."""
        return "episode" if self.routing is None else self.routing.of(task).scope

    @property
    def scores_groups(self) -> bool:
        """Return whether the scope of any task is `group`."""
        return self.routing is not None and any(spec.scope == "group" for spec in self.routing.specs)

    def group_seed(self, task_id: str) -> int:
        """Return 48 bits that depend only on the job's seed and the task."""
        digest = hashlib.blake2b(f"{self.seed}:{task_id}".encode(), digest_size=6).digest()
        return int.from_bytes(digest, "little")


class Tasks(Protocol):
    """Tasks of the job, in training order."""

    @property
    def dataset_hash(self) -> str: ...

    def at(self, position: int) -> tuple[int, int] | None:
        """Return (row, pass) at a position of the cursor, or None after the last pass."""

    def task(self, row: int, pass_index: int) -> Task: ...

    def images(self, row: int) -> Sequence[ImageFile]:
        """Read the images of a row, with their bytes. Raises `TaskFileError` if they have changed."""


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


class TaskOrder:
    """Order of the tasks: all rows of the task table in each pass, shuffled by a seed for each pass.

    A position counts tasks from the start of the job. Its task depends only on the file, the seed and the
    position, so a cursor is one integer."""

    def __init__(self, table: TaskTable, *, seed: int, shuffle: bool, passes: int | None) -> None:
        self.table = table
        self.passes = passes
        self._order = lru_cache(maxsize=2)(
            lambda pass_index: pass_order(len(table), seed=seed, pass_index=pass_index, shuffle=shuffle)
        )
        self.task = lru_cache(maxsize=4096)(table.task)
        self.images = table.images

    @classmethod
    def of(cls, job: JobConfig) -> TaskOrder:
        """Read the job's task file. Raises `TaskFileError`."""
        tasks = job.tasks
        return cls(read_tasks(tasks.train), seed=job.seed, shuffle=tasks.shuffle, passes=tasks.passes)

    @property
    def dataset_hash(self) -> str:
        return self.table.dataset_hash

    def at(self, position: int) -> tuple[int, int] | None:
        """Return (row, pass) at `position`, or None after the last pass."""
        pass_index, offset = divmod(position, len(self.table))
        if self.passes is not None and pass_index >= self.passes:
            return None
        return self._order(pass_index)[offset], pass_index
