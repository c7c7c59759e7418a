"""The context of a service process: its job and its place in the run.

The launcher writes the topology of the run for all services of a host, and the keys of each role. A process
reads both by its own name."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from areal_async.base.addresses import Address
from areal_async.base.topology import OnHost, Role, RunHost, ServicePlace, Topology
from areal_async.config.job import JobConfig
from areal_async.rpc.secret import KeyRole, RoleKeys, RunAccess
from areal_async.service.rank_group import Meeting

KEYS = "keys"  # Folder beside the sockets with the keys of each role
SERVED_VARIABLE = "AREAL_ASYNC_SERVED_BEFORE"
"""Environment variable that the supervisor sets if it restarts a service that has served before."""


GARBAGE_OBJECTS = 10_000
"""Number of new objects between two garbage collections. The number is large, because only failures leave
garbage with reference cycles, which only the collector can free."""


def settle() -> None:
    """Exempt all loaded objects from garbage collection. Call this once the process serves. The objects of
    modules live as long as the process, so scanning them repeatedly is useless, and it would take more time
    than a service's own work."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)


@dataclass(frozen=True)
class ServiceContext(OnHost):
    """The job of a service and its place in the run.

    `stop` and `stopping` are the same signal, for coroutines and for threads. Once it is set, the service
    finishes its short work, closes its sockets and returns within a few seconds."""

    job: JobConfig
    place: ServicePlace
    host: RunHost
    topology: Topology
    keys: RunAccess  # For authentication with the other processes of the run, in both directions
    buffer: Address
    weights: Address
    metrics_port: int  # Port of this process's metrics; 0 in a test without metrics
    ready_fd: int | None = None
    meeting: Meeting | None = None  # Meeting address of the trainer's ranks; None for a single rank
    inline: bool = False
    """Whether all roles of the run are in this process. If true, an error of user code ends the run, and
    rewards run on a thread of this process."""
    served_before: bool = False  # Whether a process of this name has served before in this run
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    """A service sets this when it has done all its work. Then it exits with status 0, even if it was asked to
    stop."""
    held_fds: list[int] = field(default_factory=list)
    """Descriptors of locks that servers started by this process must inherit."""
    _told: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def role(self) -> Role:
        return self.place.role

    @property
    def index(self) -> int:
        return self.place.index

    @property
    def gpu_index(self) -> int:
        """Index of a rank's GPU among the GPUs that the rank sees."""
        return 0 if self.place.gpus_of_its_own else self.index

    @property
    def node_id(self) -> str:
        """Name of the host of this process. Processes with the same host name share memory."""
        return self.host.node_id

    @property
    def has_served(self) -> bool:
        """Whether `ready` has been called."""
        return self._told.is_set()

    def of(self, policy: str) -> ServiceContext:
        """Return the context for one policy of the job.

        The context has a job with that policy alone, the publisher of its trainer, and its own folders below
        those of the run."""
        if not self.job.policies:
            return self
        run_dir, shm_dir = (str(folder / "policies" / policy) for folder in (self.run_dir, self.shm_dir))
        host = msgspec.structs.replace(self.host, run_dir=run_dir, shm_dir=shm_dir)
        weights = Address(self.topology.publishers[policy], "trainer")
        return replace(self, job=self.job.of(policy), host=host, weights=weights)

    def ready(self) -> None:
        """Report to the supervisor that this service serves, and let the garbage collector `settle`.

        Does nothing if it was called before, or if the process was started by hand."""
        was_told = self._told.is_set()
        self._told.set()
        if self.ready_fd is None or was_told:
            return
        settle()
        line = json.dumps({"ready": self.name, "pid": os.getpid(), "metrics_port": self.metrics_port})
        os.write(self.ready_fd, line.encode() + b"\n")
        os.close(self.ready_fd)

    def moved(self, endpoints: dict[str, str]) -> None:
        """Replace the endpoints of servers that moved. The keys are the servers' names (`buffer`,
        `weights`)."""
        for name, address in (("buffer", self.buffer), ("weights", self.weights)):
            if name in endpoints:
                address.move(endpoints[name])

    @classmethod
    def load(cls, path: Path, name: str, *, ready_fd: int | None = None) -> ServiceContext:
        """Return the context of the service called `name`, from the topology file of the run.

        Raises OSError or ValueError if the file is not a topology, `EndpointError` if the keys of its role
        are missing, and KeyError if no service has this name."""
        topology = Topology.read(path)
        place = topology.place(name)
        host = topology.hosts[place.node_id]
        return cls(
            job=JobConfig.model_validate(topology.job),
            place=place,
            host=host,
            topology=topology,
            keys=RoleKeys.read(keys_file(Path(host.socket_dir), place.role)),
            buffer=Address(topology.buffer, "buffer"),
            weights=Address(topology.weights, "trainer"),
            metrics_port=place.metrics_port,
            ready_fd=ready_fd,
            meeting=Meeting.from_environment() if place.role == "trainer" else None,
            served_before=SERVED_VARIABLE in os.environ,
        )


def keys_file(socket_dir: Path, role: KeyRole) -> Path:
    """Return the path of the keys of a role on a host."""
    return socket_dir / KEYS / f"{role}.json"
