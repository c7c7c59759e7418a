"""What a job file may say, but will regret: warnings, printed before the job starts. Nothing fails for them.

Pure, as `config/checks.py`. The rules on pacing are read off the tables of `docs/staleness.md`.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.config.rewardcheck import programs_run

RUNNING_PER_STALENESS = 0.25
"""Groups that may run at once, in batches per step of max_staleness. At this line the worst case of the sweep
drops 5 % of the groups and keeps 71 to 86 % of the throughput; beyond it both get worse quickly."""


def advise(job: JobConfig) -> list[Mistake]:
    """Every warning about `job`."""
    return [*_groups_finish_within_the_bound(job), *_programs_unprotected(job)] if job.kind == "rl" else []


def _programs_unprotected(job: JobConfig) -> Iterator[Mistake]:
    for field, arguments in programs_run(job):
        if arguments.get("sandbox") == "none":
            yield Mistake(
                f"{field}.sandbox",
                "programs that the model writes run without any protection: they may do whatever the reward "
                "service may do on its machine",
                "Remove it, so that they are isolated (docs/sandbox.md)",
            )


def running_groups(job: JobConfig) -> float:
    """Groups that all workers together run at once."""
    return engines(job) * job.rollout.max_concurrent / job.rollout.group_size


def engines(job: JobConfig) -> int:
    """Of all workers."""
    return job.rollout.workers * job.rollout.replicas


def _groups_finish_within_the_bound(job: JobConfig) -> Iterator[Mistake]:
    """With more groups under way, too many are overtaken by younger ones before they are finished. At η = 0
    there is nothing to overtake: workers and trainer take turns."""
    eta, batch, running = job.buffer.max_staleness, job.buffer.batch_groups, running_groups(job)
    most = RUNNING_PER_STALENESS * eta * batch
    if eta == 0 or running <= most:
        return
    needed = -(-running // (RUNNING_PER_STALENESS * batch))
    concurrent = int(most * job.rollout.group_size / engines(job))
    fix = "Raise"
    if concurrent >= job.rollout.group_size:
        fix = f"Lower rollout.max_concurrent to {concurrent}, if the engine is no slower for it, or raise"
    yield Mistake(
        "buffer.max_staleness",
        f"{eta} is little for {running:.0f} groups running at once (rollout.workers × replicas × "
        f"max_concurrent / group_size), {running / batch:.1f} times buffer.batch_groups = {batch}: when "
        "durations vary, long groups become too old before they are finished, and are dropped or waited for",
        f"{fix} max_staleness to {needed:.0f}, or buffer.batch_groups (docs/staleness.md)",
        (
            "rollout.workers",
            "rollout.replicas",
            "rollout.max_concurrent",
            "rollout.group_size",
            "buffer.batch_groups",
        ),
    )
