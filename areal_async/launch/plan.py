"""Which processes a job needs, how each is started, and in which order they start and stop. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_async.config.engines import declared_engine
from areal_async.config.job import JobConfig
from areal_async.runtime.context import Role, ServicePlace

MODULES: Mapping[Role, str] = {
    "buffer": "replay_buffer",
    "trainer": "trainer_service",
    "reward": "reward_service",
    "rollout": "rollout_service",
    "evaluator": "rollout_service.evaluator",
}

STOP_STAGES: tuple[tuple[Role, ...], ...] = (("rollout", "evaluator", "trainer"), ("reward",), ("buffer",))
"""Producers and the trainer first, so that the buffer can store and acknowledge until the end."""


def services_of(job: JobConfig, modules: Mapping[Role, str] = MODULES) -> list[ServicePlace]:
    """The processes of `job` in start order. Metrics ports are consecutive from `observe.metrics_port`."""
    roles: list[tuple[Role, str, int]] = []
    if job.kind == "sft":
        roles.append(("trainer", "trainer", 0))
    else:
        roles += [("buffer", "buffer", 0), ("trainer", "trainer", 0), ("reward", "reward", 0)]
        roles += [("rollout", f"rollout-{index}", index) for index in range(job.rollout.workers)]
        if job.tasks.evaluation is not None:
            roles.append(("evaluator", "evaluator", 0))
    first = job.observe.metrics_port
    return [
        ServicePlace(
            name,
            role,
            index,
            modules[role],
            first + offset if first else 0,
            job.weights.nodes.get(name, job.weights.node_id),
        )
        for offset, (role, name, index) in enumerate(roles)
    ]


def awaited_first(services: Sequence[ServicePlace]) -> list[str]:
    """Names of those that must serve before the others are started: the buffer, if there is one."""
    return [service.name for service in services if service.role == "buffer"]


def ends_the_job(services: Sequence[ServicePlace]) -> list[str]:
    """Names of those that end by themselves; the job is done when all of them have, with status 0."""
    return [service.name for service in services if service.role in ("trainer", "evaluator")]


def thread_count(job: JobConfig, role: Role) -> int:
    """Native threads that a process of `role` may use."""
    threads: Mapping[Role, int] = {
        "trainer": job.trainer.torch_threads,
        "rollout": job.rollout.torch_threads,
        "evaluator": job.evaluation.torch_threads,
    }
    return threads.get(role, 1)


def ready_limit_s(job: JobConfig) -> float:
    """The longest time from starting a service until it serves. An engine's server begins to load only once
    the trainer serves, and has a limit of its own."""
    server = job.kind == "rl" and declared_engine(job.rollout.engine).is_server
    return job.supervisor.ready_s + (job.rollout.server.ready_s if server else 0.0)


def supervisor_port(job: JobConfig, services: Sequence[ServicePlace]) -> int:
    """The port after the services', for the supervisor's own metrics; 0: any free one."""
    first = job.observe.metrics_port
    return first + len(services) if first else 0
