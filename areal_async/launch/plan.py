"""The processes of a job, their order of start and stop, and the workers that join or leave later.

The module is pure, except for the check of names in use. If workers leave, the newest leaves first. A new
worker takes the lowest free number, which keeps the number of names, logs and metric series small."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from areal_async.base.errors import FaultError
from areal_async.base.own_files import is_locked
from areal_async.base.topology import Role, RunHost, ServicePlace
from areal_async.config.devices import first_threads
from areal_async.config.engines import engine_part
from areal_async.config.job import JobConfig

MODULES: Mapping[Role, str] = {
    "buffer": "replay_buffer",
    "trainer": "trainer_service",
    "reward": "reward_service",
    "rollout": "rollout_service",
    "evaluator": "rollout_service.evaluator",
}

STOP_STAGES: tuple[tuple[Role, ...], ...] = (("rollout", "evaluator", "trainer"), ("reward",), ("buffer",))
"""Services in each stage of a stop. Producers and the trainer stop first, so that the buffer can store and
acknowledge their last messages."""


def rank_name(rank: int, policy: str = "") -> str:
    """Return the process name of one rank of the trainer. `policy` is empty if the job has a single
    policy."""
    name = f"trainer-{policy}" if policy else "trainer"
    return f"{name}-{rank}" if rank else name


def services_of(job: JobConfig, modules: Mapping[Role, str] = MODULES) -> list[ServicePlace]:
    """Return the processes of `job` in start order. Metrics ports are consecutive from
    `observe.metrics_port`.

    Each rank of the trainer is one process: `trainer`, `trainer-1` …. The index is the rank. With several
    policies, each policy has its own trainer."""
    roles: list[tuple[Role, str, int, str]] = [
        ("trainer", rank_name(rank, name), rank, name)
        for policy, view in job.views.items()
        for name in (policy if job.policies else "",)
        for rank in range(view.trainer.ranks)
    ]
    if job.kind == "rl":
        roles = [("buffer", "buffer", 0, ""), *roles, ("reward", "reward", 0, "")]
        roles += [("rollout", f"rollout-{index}", index, "") for index in range(job.rollout.workers)]
        if job.tasks.evaluation is not None and job.placement.share is None:
            roles.append(("evaluator", "evaluator", 0, ""))
    first = job.observe.metrics_port
    return [
        ServicePlace(name, role, index, modules[role], first + offset if first else 0, policy=policy)
        for offset, (role, name, index, policy) in enumerate(roles)
    ]


def with_channel(job: JobConfig, *, several_hosts: bool) -> JobConfig:
    """Return `job` with the actual channel in place of `weights.channel: auto`: `zmq` on several hosts, else
    `shm`.

    With `nccl` on several hosts, `weights.codec: auto` becomes `delta`, because snapshots are also sent as
    with `zmq`."""
    channel = job.weights.channel
    if channel == "auto" and several_hosts:
        return with_fields(job, "weights", channel="zmq")
    if channel == "auto":
        return with_fields(job, "weights", channel="shm", channel_args={})
    by_delta = channel == "nccl" and several_hosts and job.weights.codec == "auto"
    return with_fields(job, "weights", codec="delta") if by_delta else job


def with_fields(job: JobConfig, section: str, **fields: object) -> JobConfig:
    """Return `job` with these fields of a section replaced."""
    return job.model_copy(update={section: getattr(job, section).model_copy(update=fields)})


def awaited_first(services: Sequence[ServicePlace]) -> list[str]:
    """Return the services that must serve before the other services start. This is only the buffer, if the
    job has one."""
    return [service.name for service in services if service.role == "buffer"]


def ends_the_job(services: Sequence[ServicePlace]) -> list[str]:
    """Return the names of services that end by themselves. The job is done once all have exited with status
    0."""
    return [service.name for service in services if service.role in ("trainer", "evaluator")]


def thread_count(job: JobConfig, role: Role) -> int:
    """Return the number of native threads for a process of `role`."""
    threads: Mapping[Role, int] = {
        "trainer": first_threads(job.trainer.torch_threads),
        "rollout": first_threads(job.rollout.torch_threads),
        "evaluator": job.evaluation.torch_threads,
    }
    return threads.get(role, 1)


def ready_limit_s(job: JobConfig) -> float:
    """Return the longest time from the start of a service until it serves.

    The server of an engine begins to load only once the trainer serves, and its load time has a separate
    limit. If the engine is in a user's file, this function runs the file. Raises `PartError` if that
    fails."""
    servers = [
        view.rollout.server.ready_s
        for view in job.views.values()
        if job.kind == "rl" and engine_part(view.rollout.engine).is_server
    ]
    return job.supervisor.ready_s + max(servers, default=0.0)


def supervisor_port(job: JobConfig, services: Sequence[ServicePlace]) -> int:
    """Return the port for the supervisor's own metrics: the port after the services' ports, or 0 for any free
    port."""
    first = job.observe.metrics_port
    return first + len(services) if first else 0


MAX_WORKERS = 1024  # Most workers on one host; a larger number is probably a typing error


def workers_to_change(
    staying: Sequence[ServicePlace], wanted: int, module: str, is_taken: Callable[[str], bool]
) -> tuple[list[ServicePlace], list[ServicePlace]]:
    """Return the workers that must join and the workers that must leave for a total of `wanted`.

    `staying` has the workers that are not leaving, oldest first. Raises `FaultError`."""
    if not 1 <= wanted <= MAX_WORKERS:
        raise FaultError("invalid", f"a run has 1 to {MAX_WORKERS} workers, not {wanted}")
    free = (number for number in itertools.count() if not is_taken(f"rollout-{number}"))
    joining = [
        # Port 0: the consecutive ports belong to the first services of the job.
        ServicePlace(f"rollout-{number}", "rollout", number, module, 0)
        for number in itertools.islice(free, max(0, wanted - len(staying)))
    ]
    return joining, list(reversed(staying[wanted:]))


def worker_to_drain(staying: Sequence[ServicePlace], name: str) -> ServicePlace:
    """Return the worker called `name`. Raises `FaultError` if no worker has this name, or if it is the last
    worker."""
    place = next((place for place in staying if place.name == name), None)
    names = ", ".join(place.name for place in staying)
    if place is None:
        ways = f"Its workers are {names}; one that was started by hand is drained with --outside"
        raise FaultError("invalid", f"{name} is no worker of this run, or leaves already. {ways}")
    if len(staying) == 1:
        why = "nothing would be generated. Scale to 2 first"
        raise FaultError("invalid", f"{name} is the only worker, and {why}")
    return place


def name_is_held(host: RunHost, name: str) -> bool:
    """Return whether a process of this host has this name (see `rollout_service/service.py`)."""
    with suppress(FileNotFoundError), (Path(host.socket_dir) / f"{name}.name").open("rb") as file:
        return is_locked(file.fileno())
    return False
