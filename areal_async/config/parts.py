"""The parts that a job names, and what each has against the job.

A part is asked through the registry of its kind (`areal_async/registry.py`), and judges its own arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from areal_async import registry
from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.config.rewardcheck import asked
from areal_async.registry import Registry

ANY_KIND: Mapping[str, Registry] = {
    "trainer.backend": registry.BACKENDS,
    "trainer.objective.loss": registry.LOSSES,
    "trainer.objective.normaliser": registry.NORMALISERS,
}
PART_FIELDS: Mapping[str, Registry] = {
    **ANY_KIND,
    "trainer.objective.advantage": registry.ADVANTAGES,
    "trainer.objective.correction": registry.CORRECTIONS,
    "rollout.engine": registry.ENGINES,
    "evaluation.engine": registry.ENGINES,
    "rollout.workflow": registry.WORKFLOWS,
    "weights.channel": registry.CHANNELS,
}
"""Every field that names a part, but for those of rewards; the others than `ANY_KIND` count in an rl job."""


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
    for field, kind in PART_FIELDS.items() if job.kind == "rl" else ANY_KIND.items():
        section, _, last = field.rpartition(".")
        if section == "evaluation" and (job.tasks.evaluation is None or job.evaluation.engine == "same"):
            continue
        arguments = getattr(attrgetter(section)(job), f"{last}_args", {})
        yield NamedPart(kind, attrgetter(field)(job), arguments, field, f"{field}_args")
    for field, reward in asked(job.reward) if job.kind == "rl" else ():
        yield NamedPart(registry.REWARDS, reward.name, reward.args, f"{field}.name", f"{field}.args")


def part_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """What is wrong with the built-in and installed parts of `job`, and with names that nothing has."""
    for part in named_parts(job):
        if part.is_own:
            continue
        broken = list(_mistakes_of(part))
        yield from broken
        if part.name in part.registry.names and not broken:
            check_job = getattr(part.registry.find(part.name), "check_job", None)
            if check_job is not None:
                yield from check_job(job, part.arguments, part.args_field)


def own_part_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """What is wrong with the parts of `job` that are in files of the user's; reads them, and runs nothing."""
    for part in named_parts(job):
        if part.is_own:
            yield from _mistakes_of(part)


def _mistakes_of(part: NamedPart) -> Iterator[Mistake]:
    return part.registry.mistakes(part.name, part.arguments, field=part.field, args_field=part.args_field)
