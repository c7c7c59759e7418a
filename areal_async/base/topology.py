"""The hosts, endpoints and interfaces of every process of a run.

A launcher makes the topology and writes it to a file on each host. The topology is the only source of
addresses. During a run, workers join and leave it, and a process that restarts on another host gets new
endpoints. The supervisor sends changes to the processes that need them (`service/control.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["buffer", "rollout", "evaluator", "reward", "trainer"]

GUEST_NAME = re.compile(r"rollout-([a-z0-9][a-z0-9-]{0,15})")
"""Names of rollout workers, including workers that the supervisor has not started."""


class RunHost(msgspec.Struct, frozen=True):
    """One host of a run. The folders are absolute paths on the host and private to this user."""

    node_id: str
    address: str
    """IP address at which the run's processes on other hosts reach this host, or loopback if the run has no
    other hosts."""
    loopback: str
    """IP address that only processes of the same host can reach."""
    run_dir: str
    """Folder for everything that outlives the run's processes on this host.

    On the home host it is the run's folder.
    """
    socket_dir: str
    """Folder of Unix sockets, locks and keys. Its path is short, and it is removed when the run ends."""
    shm_dir: str
    """Folder in shared memory, removed when the run ends."""
    local: str
    """Prefix of endpoints that only this host reaches. A full endpoint ends with a name from the run."""

    def local_endpoint(self, name: str) -> str:
        """Return the endpoint with this name on this host."""
        return self.local + name


class OnHost:
    """The folders of `host` as paths, for processes on that host."""

    host: RunHost

    @property
    def run_dir(self) -> Path:
        """Folder for everything that outlives a process of the run on this host."""
        return Path(self.host.run_dir)

    @property
    def socket_dir(self) -> Path:
        return Path(self.host.socket_dir)

    @property
    def shm_dir(self) -> Path:
        return Path(self.host.shm_dir)


class ServicePlace(msgspec.Struct, frozen=True):
    """One process of the run: its name, role, start command and endpoints."""

    name: str
    role: Role
    index: int
    module: str
    metrics_port: int  # 0: the process picks a free port and reports it when ready
    node_id: str = ""  # empty: it has no host yet
    status: str = ""  # endpoint of its status
    chunks: str = ""  # endpoint at which it serves snapshots to other hosts; empty: any port of its host
    gpus_of_its_own: bool = False  # whether it sees only the GPUs that it was given
    policy: str = ""  # the policy of this trainer, in a job of several policies

    @property
    def is_first(self) -> bool:
        """Whether it is the first of its role: rank 0 of the trainer."""
        return self.index == 0


class Topology(msgspec.Struct, frozen=True):
    """The processes of a run, their hosts, and their shared servers. `job` is the resolved job file as JSON
    values."""

    run_id: str
    home: str
    """Node id of the supervisor's host, which has the run's folder."""
    hosts: dict[str, RunHost]
    services: list[ServicePlace]
    control: str
    """Endpoint of the supervisor, for orders and for records of the run."""
    buffer: str
    weights: str
    job: dict[str, object]
    publishers: dict[str, str] = {}
    """Endpoints of the trainers' publishers by policy, if the job has several policies. They replace
    `weights`."""

    @classmethod
    def read(cls, path: Path) -> Topology:
        """Return the topology in a file. Raises `OSError` or `ValueError` if the file is invalid."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    @property
    def home_host(self) -> RunHost:
        return self.hosts[self.home]

    def place(self, name: str) -> ServicePlace:
        """Return the place of the process `name`. Raises `KeyError` for an unknown name.

        A rollout worker that is not in the topology may join from the home host if its name begins with
        `rollout-`.
        """
        for place in self.services:
            if place.name == name:
                return place
        guest = GUEST_NAME.fullmatch(name)
        if guest is None:
            raise KeyError(name)
        index = int(guest[1]) if guest[1].isdecimal() else 0
        status = self.home_host.local_endpoint(f"{name}.status")
        return ServicePlace(name, "rollout", index, "rollout_service", 0, self.home, status)
