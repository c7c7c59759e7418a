"""The parts that a job names, and what they say against the job.

A part stands in a field of the job file (`rollout.workflow`) with its arguments beside it
(`rollout.workflow_args`). Its arguments and its `check_job` are its own: this module asks every named part
through the registry of its kind (see `areal_async/registry.py`), and knows none of them. What a part names in
its arguments, such as the environment of a workflow, is for that part to check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_async import registry
from areal_async.config.base import Section
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.config.rewardcheck import asked
from areal_async.registry import Registry


@dataclass(frozen=True)
class NamedPart:
    """A part as a job names it. `field` holds its name, `args_field` its arguments."""

    registry: Registry
    name: str
    arguments: Mapping[str, Any]
    field: str
    args_field: str

    @property
    def is_own(self) -> bool:
        """Whether it is in a file of the user's, whose code is not run by a check."""
        return self.name not in self.registry.names and ".py:" in self.name


def named_parts(job: JobConfig) -> Iterator[NamedPart]:
    """Every part that `job` names in a field of its own."""
    yield _in_section(registry.BACKENDS, job.trainer, "trainer", "backend")
    objective = job.trainer.objective
    yield _in_section(registry.LOSSES, objective, "trainer.objective", "loss")
    yield _in_section(registry.NORMALISERS, objective, "trainer.objective", "normaliser")
    if job.kind != "rl":
        return
    yield _in_section(registry.ADVANTAGES, objective, "trainer.objective", "advantage")
    yield _in_section(registry.CORRECTIONS, objective, "trainer.objective", "correction")
    yield _in_section(registry.ENGINES, job.rollout, "rollout", "engine")
    if job.tasks.evaluation is not None and job.evaluation.engine != "same":
        yield _in_section(registry.ENGINES, job.evaluation, "evaluation", "engine")
    yield _in_section(registry.WORKFLOWS, job.rollout, "rollout", "workflow")
    yield _in_section(registry.CHANNELS, job.weights, "weights", "channel")
    for field, section in asked(job.reward):
        yield NamedPart(registry.REWARDS, section.name, section.args, f"{field}.name", f"{field}.args")


def _in_section(kind: Registry, section: Section, section_field: str, field: str) -> NamedPart:
    arguments = getattr(section, f"{field}_args", {})
    return NamedPart(
        kind, getattr(section, field), arguments, f"{section_field}.{field}", f"{section_field}.{field}_args"
    )


def part_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """What is wrong with the built-in and installed parts of `job`, and with names that nothing has."""
    for part in named_parts(job):
        if part.is_own:
            continue
        broken = list(_mistakes(part))
        yield from broken
        if part.name in part.registry.names and not broken:
            check_job = getattr(part.registry.find(part.name), "check_job", None)
            if check_job is not None:
                yield from check_job(job, part.arguments, part.args_field)


def own_part_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """What is wrong with the parts of `job` that are in files of the user's; reads them, and runs nothing."""
    for part in named_parts(job):
        if part.is_own:
            yield from _mistakes(part)


def _mistakes(part: NamedPart) -> Iterator[Mistake]:
    return part.registry.mistakes(part.name, part.arguments, field=part.field, args_field=part.args_field)
