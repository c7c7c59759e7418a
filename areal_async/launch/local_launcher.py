"""The launcher of one machine: child processes, Unix sockets.

Promises: the ranks of a trainer meet at a socket. Each start of the ranks has a new socket, bound before the
first rank runs. A single rank has none. After `close`, no process of the run is left, not even a detached
process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from areal_async.base.own_files import write_whole
from areal_async.base.processes import ChildProcess, service_environment, start_service
from areal_async.base.topology import Role, ServicePlace, Topology
from areal_async.config.engines import engine_part, evaluation_engine
from areal_async.config.job import JobConfig
from areal_async.launch.folders import RunFolders
from areal_async.launch.forks import ForkServer, StartedService
from areal_async.launch.one_host import sweep_processes, topology_here
from areal_async.launch.plan import name_is_held, thread_count, with_channel
from areal_async.service.context import SERVED_VARIABLE
from areal_async.service.rank_group import LISTENING_VARIABLE, MEETING_VARIABLE, PULSE_VARIABLE

SWEEP_S = 1.0
OF_RAY = ("RAY_AUTH_TOKEN", "RAY_TLS_")  # Beginnings of variables with the secrets of a Ray cluster
BACKLOG = 1024  # Ranks that may connect at once


class LocalChild:
    """A service on this machine, with its line (the pipe to its launcher)."""

    def __init__(self, process: ChildProcess | StartedService, line_fd: int) -> None:
        self.ready_report, self.poll = process.ready_report, process.poll
        self.terminate, self.kill = process.terminate, process.kill
        self._process = process
        self._line_fd: int | None = line_fd

    @property
    def pid(self) -> int:
        return self._process.pid

    def lost(self) -> str:
        return ""

    def heard(self) -> bytes:
        if self._line_fd is not None:
            with suppress(BlockingIOError):
                return os.read(self._line_fd, 1 << 16)
        return b""

    def is_heard(self) -> bool:
        return True

    def close(self) -> None:
        self._process.close()
        fd, self._line_fd = self._line_fd, None
        if fd is not None:
            os.close(fd)


class RankLines:
    """Lines of the services on one host.

    Each service gets a line to the process that starts it. Ranks of a trainer also get the socket at which
    they meet, on an interface of the host."""

    def __init__(self, interface: str, *, several: bool, meeting: str = "") -> None:
        """Prepare the lines. `several` means that the trainer has more than one rank."""
        self._interface = interface
        self._several = several
        self.meeting = meeting
        """Address at which the ranks of this start meet. `prepare` sets it when it prepares rank 0."""

    def start(
        self,
        place: ServicePlace,
        topology: Path,
        logs: Path,
        environment: dict[str, str],
        pass_fds: Sequence[int] = (),
        forks: ForkServer | None = None,
    ) -> LocalChild:
        """Start a service with its lines, as a fork if there is a fork server. Rank 0 must be started
        first."""
        variables, given, line_fd = self.prepare(place)
        environment |= variables
        log_path = logs / f"{place.name}.log"
        try:
            process: ChildProcess | StartedService
            if forks is not None:
                process = forks.start(place, topology, log_path, environment, given)
            else:
                environment |= {variable: str(fd) for variable, fd in given.items()}
                process = start_service(place, topology, log_path, environment, [*given.values(), *pass_fds])
        finally:
            for fd in given.values():
                os.close(fd)
        return LocalChild(process, line_fd)

    def prepare(self, place: ServicePlace) -> tuple[dict[str, str], dict[str, int], int]:
        """Return the environment variables and descriptors for the process, and the launcher's end of its
        line.

        The keys of the descriptors are the environment variables that pass their numbers. The caller closes
        the descriptors after the process has inherited them."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        given = {PULSE_VARIABLE: write_fd}
        variables = {}
        if self._several and place.role == "trainer":
            if place.is_first:
                listening = socket.create_server((self._interface, 0), backlog=BACKLOG)
                self.meeting = f"{self._interface}:{listening.getsockname()[1]}"
                given[LISTENING_VARIABLE] = listening.detach()
            variables[MEETING_VARIABLE] = self.meeting
        return variables, given, read_fd


class LocalLauncher:
    """Starts all processes on this machine, in the folders of a run, as forks of `forks` if it is given.
    Without it, they inherit the descriptors `pass_fds`."""

    def __init__(
        self,
        job: JobConfig,
        folders: RunFolders,
        *,
        pass_fds: Sequence[int] = (),
        forks: ForkServer | None = None,
    ) -> None:
        self._job = job
        self._folders = folders
        self._pass_fds = pass_fds
        self._forks = forks
        if forks is not None:
            forks.light_roles |= roles_of_servers(job)
        self._lines = {  # Key "" has the only trainer and the services that belong to no policy
            name: RankLines(folders.host.loopback, several=job.of(name or job.policy).trainer.ranks > 1)
            for name in ("", *job.policies)
        }
        self._children: dict[str, LocalChild] = {}

    def begin(self, job: JobConfig, services: list[ServicePlace]) -> list[ServicePlace]:
        return topology_here(
            self._folders.run_id, self._folders.host, services, {}, job.placement.pretend
        ).services

    def join(self, place: ServicePlace) -> ServicePlace:
        (placed,) = self.begin(self._job, [place])
        return placed

    def leave(self, name: str) -> None:
        self._children.pop(name, None)

    def start(self, place: ServicePlace, *, served_before: bool) -> LocalChild:
        environment = self._environment(self._job.of(place.policy or self._job.policy), place.role)
        if served_before:
            environment[SERVED_VARIABLE] = "1"
        child = self._children[place.name] = self._lines[place.policy].start(
            place, self._folders.topology, self._folders.logs, environment, self._pass_fds, self._forks
        )
        return child

    def is_taken(self, name: str) -> bool:
        return name_is_held(self._folders.host, name)

    def publish(self, job: JobConfig, services: list[ServicePlace]) -> Topology:
        self._job = job
        pretend = job.placement.pretend
        told = with_channel(job, several_hosts=bool(pretend)).model_dump(mode="json")
        topology = topology_here(self._folders.run_id, self._folders.host, services, told, pretend)
        write_json(self._folders.topology, topology)
        return topology

    def tend(self, now_s: float, *, calm: bool) -> list[ServicePlace]:
        return []

    def close(self) -> None:
        """End every process: the services and their detached processes."""
        for child in self._children.values():
            child.kill()

        def are_reaped() -> bool:
            return all(child.poll() is not None for child in self._children.values())

        sweep_processes(self._folders.run_id, SWEEP_S, are_reaped)
        for child in self._children.values():
            child.close()

    def _environment(self, job: JobConfig, role: Role) -> dict[str, str]:
        environment = service_environment(self._folders.run_id, thread_count(job, role))
        if role != "buffer":
            # Reward and workflow code is the user's, so it must not see the buffer's passwords.
            environment.pop(self._job.buffer.redis_login.password_env, None)
        return {name: value for name, value in environment.items() if not name.startswith(OF_RAY)}


def roles_of_servers(job: JobConfig) -> set[Role]:
    """Return the roles whose engines are all servers, so that their processes need no torch."""
    views = job.views.values()
    rollout = all(engine_part(view.rollout.engine).is_server for view in views)
    evaluation = all(engine_part(evaluation_engine(view)).is_server for view in views)
    found: set[Role] = {"rollout"} if rollout else set()
    return found | {"evaluator"} if evaluation else found


def write_targets(path: Path, targets: Sequence[Mapping[str, object]]) -> None:
    """Write the metrics endpoints for Prometheus. The write is atomic, because Prometheus watches the
    file."""
    if not path.parent.is_dir():
        path.parent.mkdir()
        path.parent.chmod(0o755)
    # Prometheus may run as another user. The ports are no secret on this machine.
    write_json(path, targets, mode=0o644)


def write_json(path: Path, content: object, mode: int = 0o600) -> None:
    """Write `content` as indented JSON. Readers see the old file or the new file."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(content)), mode)
