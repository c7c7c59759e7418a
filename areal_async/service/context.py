"""The context of a service process: its job and its place in the run.

The launcher writes the topology of the run for all services of a host, and the keys of its role for each;
a process reads them with its own name.
"""

from __future__ import annotations

import asyncio
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
"""Environment variable that the supervisor sets for a service that it starts again and that has served."""


@dataclass(frozen=True)
class ServiceContext(OnHost):
    """The job of a service and its place in the run.

    `stop` and `stopping` are one signal, for coroutines and for threads. Once it is set, the service finishes
    short work, closes its sockets and returns within a few seconds.
    """

    job: JobConfig
    place: ServicePlace
    host: RunHost
    topology: Topology
    keys: RunAccess  # What it shows the other processes of the run, and recognises them by
    buffer: Address
    weights: Address
    metrics_port: int  # The port this process serves metrics on; 0 in a test that serves none
    ready_fd: int | None = None
    meeting: Meeting | None = None  # Where the ranks of the trainer meet; None for one alone
    inline: bool = False
    """Whether all roles of the run are in this process: then an error of a user's code ends the run, and
    rewards run on a thread of it."""
    served_before: bool = False  # Whether a process of this name has served in this run: it is started again
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    """Set by a service that has done all it was asked to: it ends with status 0 also after a stop."""
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
        """Return the index of a rank's GPU among the visible GPUs."""
        return 0 if self.place.gpus_of_its_own else self.index

    @property
    def node_id(self) -> str:
        """Name of the host that this process is on: processes of one name share memory."""
        return self.host.node_id

    @property
    def has_served(self) -> bool:
        """Whether `ready` has been called."""
        return self._told.is_set()

    def of(self, policy: str) -> ServiceContext:
        """Return the context for one policy of the job: a job of that policy alone, its trainer's publisher,
        and its own folders below the run's."""
        if not self.job.policies:
            return self
        run_dir, shm_dir = (str(folder / "policies" / policy) for folder in (self.run_dir, self.shm_dir))
        host = msgspec.structs.replace(self.host, run_dir=run_dir, shm_dir=shm_dir)
        weights = Address(self.topology.publishers[policy], "trainer")
        return replace(self, job=self.job.of(policy), host=host, weights=weights)

    def ready(self) -> None:
        """Tell the supervisor that this service serves. A second call does nothing; so does a call in a
        process started by hand."""
        was_told = self._told.is_set()
        self._told.set()
        if self.ready_fd is None or was_told:
            return
        line = json.dumps({"ready": self.name, "pid": os.getpid(), "metrics_port": self.metrics_port})
        os.write(self.ready_fd, line.encode() + b"\n")
        os.close(self.ready_fd)

    def moved(self, endpoints: dict[str, str]) -> None:
        """Take new endpoints of servers of the run, by their names (`buffer`, `weights`)."""
        for name, address in (("buffer", self.buffer), ("weights", self.weights)):
            if name in endpoints:
                address.move(endpoints[name])

    @classmethod
    def load(cls, path: Path, name: str, *, ready_fd: int | None = None) -> ServiceContext:
        """Return the context of the service called `name`, from the file of the run's topology.

        Raises OSError or ValueError when the file is no topology, `EndpointError` where the keys of its role
        are not there, KeyError for a name that nobody has."""
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
