"""The parts that a job names, and what each has against the job.

A part is asked through the registry of its kind (`areal_async/config/registry.py`), and judges its own
arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from areal_async.base.mistakes import Mistake
from areal_async.config import registry
from areal_async.config.base import Section
from areal_async.config.job import JobConfig
from areal_async.config.parallel import parallel_mistakes
from areal_async.config.presets import OBJECTIVE, PRESETS
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

    def mistakes(self, job: JobConfig, *, run_own: bool = False) -> Iterator[Mistake]:
        """What the part has against its arguments, and if nothing, against `job`. Where it is in a file of
        the user's, that is run only with `run_own`; else its text is looked at."""
        broken = list(
            self.registry.mistakes(
                self.name,
                self.arguments,
                field=self.field,
                args_field=self.args_field,
                run_own=run_own,
            )
        )
        if broken and (meant := self._meant()):
            broken = [replace(broken[0], fix=f"Write {', or '.join(meant)}")]
        yield from broken
        if not broken and (run_own or not self.is_own):
            part = self.registry.find(self.name)
            if self.registry is registry.BACKENDS:
                yield from parallel_mistakes(job.trainer, getattr(part, "axes", ("shard",)))
                if job.trainer.lora.rank:
                    yield from _adapters_are_trained(part, self.name)
                if job.rollout.routes == "replay":
                    yield from _routes_are_replayed(part, self.name)
            check_job = getattr(part, "check_job", None)
            if check_job is not None:
                yield from check_job(job, self.arguments, self.args_field)

    def _meant(self) -> list[str]:
        """Where in the objective a part or a preset has this name, which none of this kind has."""
        word = self.name.lower()
        if self.is_own or self.name in self.registry.names or not self.field.startswith(OBJECTIVE):
            return []
        parts = {field.removeprefix(OBJECTIVE): kind for field, kind in PART_FIELDS.items()}
        preset = [f"preset: {word}"] if word in PRESETS else []
        return preset + [f"{name}: {word}" for name, kind in parts.items() if word in kind.names]


def _adapters_are_trained(backend: Any, name: str) -> Iterator[Mistake]:
    """Whether a back end trains adapters: it says so in `trains_adapters`, and is then called with `lora` and
    `seed`."""
    if not getattr(backend, "trains_adapters", False):
        problem = f"trainer.backend {name} trains no adapters"
        yield Mistake(
            "trainer.lora.rank", problem, "Set it to 0, or use another back end", ("trainer.backend",)
        )


def _routes_are_replayed(backend: Any, name: str) -> Iterator[Mistake]:
    """Whether a back end replays routes: it says so in `replays_routes`, and then looks at
    `MicroBatch.routes`."""
    if not getattr(backend, "replays_routes", False):
        problem = f"trainer.backend {name} replays no routes"
        yield Mistake(
            "rollout.routes", problem, "Set it to off, or use another back end", ("trainer.backend",)
        )


def named_part(job: JobConfig, field: str) -> NamedPart:
    """The part that `job` names in `field`, one of `PART_FIELDS`."""
    name, arguments = attrgetter(field, f"{field}_args")(job)
    if name == "same" and field == "evaluation.engine":
        name = job.rollout.engine
    return NamedPart(PART_FIELDS[field], name, arguments, field, f"{field}_args")


def named_parts(job: JobConfig) -> Iterator[NamedPart]:
    """Every part that `job` names in a field of its own."""
    evaluation = job.evaluation
    for field in PART_FIELDS if job.kind == "rl" else ANY_KIND:
        if field == "evaluation.engine" and (
            job.tasks.evaluation is None or (evaluation.engine == "same" and not evaluation.engine_args)
        ):
            continue  # there is none, or it is as the rollout's
        yield named_part(job, field)
    for number, logger in enumerate(job.observe.loggers):
        field = f"observe.loggers.{number}"
        yield NamedPart(registry.LOGGERS, logger.name, logger.args, f"{field}.name", f"{field}.args")
    for field, reward in asked(job.reward) if job.kind == "rl" else ():
        yield NamedPart(registry.REWARDS, reward.name, reward.args, f"{field}.name", f"{field}.args")


def arguments_of(kind: Registry, name: str) -> type[Section]:
    """The `Arguments` of a part that is known; none where it has no such section."""
    return getattr(kind.known(name), "Arguments", None) or Section


def load_part(job: JobConfig, field: str) -> Any:
    """The part that `job` names in `field`, for the service that uses it. One in a file of the user's, which
    reading the job file does not run, is asked first. Raises `PartError`."""
    part = named_part(job, field)
    for mistake in part.mistakes(job, run_own=True) if part.is_own else ():
        raise PartError(f"{mistake.field}: {mistake.problem}. {mistake.fix}.")
    return part.registry.find(part.name)


def part_mistakes(job: JobConfig) -> Iterator[Mistake]:
    """What is wrong with the built-in and installed parts of `job`, and with names that nothing has."""
    return (mistake for part in named_parts(job) if not part.is_own for mistake in part.mistakes(job))


def own_part_mistakes(job: JobConfig, *, run: bool = False) -> Iterator[Mistake]:
    """What is wrong with the parts of `job` that are in files of the user's. Reads them, or with `run` runs
    them and asks each, and then those parts again that ask what these are."""
    for part in named_parts(job):
        if part.is_own or run:
            yield from part.mistakes(job, run_own=run)
