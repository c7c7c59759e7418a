"""The parts that a job names, and their mistakes.

The registry of its kind finds a part (`areal_async/config/registry.py`). Each part checks its own
arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from areal_async.base.mistakes import Mistake
from areal_async.config import registry
from areal_async.config.job import JobConfig
from areal_async.config.parallel import parallel_mistakes
from areal_async.config.registry import PartError, Registry
from areal_async.config.rewardcheck import asked

ANY_KIND: Mapping[str, Registry] = {"trainer.backend": registry.BACKENDS}
PART_FIELDS: Mapping[str, Registry] = {
    **ANY_KIND,
    "trainer.objective.loss": registry.LOSSES,
    "trainer.objective.normaliser": registry.NORMALISERS,
    "trainer.objective.advantage": registry.ADVANTAGES,
    "trainer.objective.correction": registry.CORRECTIONS,
    "rollout.engine": registry.ENGINES,
    "evaluation.engine": registry.ENGINES,
    "rollout.workflow": registry.WORKFLOWS,
    "weights.channel": registry.CHANNELS,
}
"""Fields that name a part, except the fields of rewards and loggers. In a job of another kind than rl, only
`ANY_KIND` applies."""


@dataclass(frozen=True)
class NamedPart:
    """A part that a job names. `field` is the field with its name, `args_field` the field with its
    arguments."""

    registry: Registry
    name: str
    arguments: Mapping[str, Any]
    field: str
    args_field: str

    @property
    def is_own(self) -> bool:
        """Whether the part is in a user's file. A check does not run such a file."""
        return self.name not in self.registry.names and ".py:" in self.name

    def mistakes(self, job: JobConfig, *, run_own: bool = False) -> Iterator[Mistake]:
        """Yield the mistakes in the part's arguments. If there are none, yield the part's mistakes about
        `job`. A user's file is run only with `run_own`; otherwise only its text is checked."""
        fields = {"field": self.field, "args_field": self.args_field}
        broken = list(self.registry.mistakes(self.name, self.arguments, **fields, run_own=run_own))
        yield from broken
        if not broken and (run_own or not self.is_own):
            part = self.registry.find(self.name)
            if self.registry is registry.BACKENDS:
                yield from self._mistakes_of_backend(job, part)
            if (check_job := getattr(part, "check_job", None)) is not None:
                yield from check_job(job, self.arguments, self.args_field)

    def _mistakes_of_backend(self, job: JobConfig, backend: Any) -> Iterator[Mistake]:
        """Check `job` against the back end's attributes `axes`, `trains_adapters` and `replays_routes`. A
        back end with `trains_adapters` accepts `lora` and `seed`. A back end with `replays_routes` reads
        `MicroBatch.routes`."""
        yield from parallel_mistakes(job.trainer, getattr(backend, "axes", ("shard",)))
        named = f"trainer.backend {self.name}"
        if job.trainer.lora.rank and not getattr(backend, "trains_adapters", False):
            fix = "Set it to 0, or use another back end"
            yield Mistake("trainer.lora.rank", f"{named} trains no adapters", fix)
        if job.rollout.routes == "replay" and not getattr(backend, "replays_routes", False):
            fix = "Set it to off, or use another back end"
            yield Mistake("rollout.routes", f"{named} replays no routes", fix)


def named_part(job: JobConfig, field: str) -> NamedPart:
    """Return the part that `job` names in `field`, one of `PART_FIELDS`."""
    name, arguments = attrgetter(field, f"{field}_args")(job)
    if name == "same" and field == "evaluation.engine":
        name = job.rollout.engine
    return NamedPart(PART_FIELDS[field], name, arguments, field, f"{field}_args")


def named_parts(job: JobConfig) -> Iterator[NamedPart]:
    """Yield every part that `job` names."""
    evaluation, evaluated = job.evaluation, job.tasks.evaluation is not None
    as_rollout = evaluation.engine == "same" and not evaluation.engine_args
    for field in PART_FIELDS if job.kind == "rl" else ANY_KIND:
        if field != "evaluation.engine" or (evaluated and not as_rollout):
            yield named_part(job, field)
    loggers = [(registry.LOGGERS, f"observe.loggers.{n}", each) for n, each in enumerate(job.observe.loggers)]
    rewards = [(registry.REWARDS, *each) for each in asked(job.reward)] if job.kind == "rl" else []
    for kind, field, section in (*loggers, *rewards):
        yield NamedPart(kind, section.name, section.args, f"{field}.name", f"{field}.args")


def load_part(job: JobConfig, field: str) -> Any:
    """Load the part that `job` names in `field`, for the service that uses it. A part in a user's file is
    checked first, because its file was not run when the job file was read. Raises `PartError`."""
    part = named_part(job, field)
    for mistake in part.mistakes(job, run_own=True) if part.is_own else ():
        raise PartError(f"{mistake.field}: {mistake.problem}. {mistake.fix}.")
    return part.registry.find(part.name)


def part_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """Yield the mistakes in the built-in and installed parts of `job`, and in unknown names."""
    return (mistake for part in named_parts(job) if not part.is_own for mistake in part.mistakes(job))


def own_part_mistakes(job: JobConfig, *, run: bool = False) -> Iterator[Mistake]:
    """Yield the mistakes in the parts of `job` that are in users' files. This reads the files. With `run`,
    run the files and check all parts, because a part may refer to other parts."""
    for part in named_parts(job):
        if part.is_own or run:
            yield from part.mistakes(job, run_own=run)
