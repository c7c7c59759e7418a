"""Who runs where: for every process of a run its host, endpoints and interfaces.

A launcher makes the topology and writes it to a file on each host; it is the only source of addresses. While
the run lives workers are added to it and taken out, and a process that is started again on another host has
new endpoints: the supervisor tells them to whoever needs them (`runtime/status.py`).
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
    """One host of a run. The folders are absolute paths on it, and this user's alone."""

    node_id: str
    address: str
    """IP address at which the run's processes on other hosts reach it; the loopback address if there are
    none."""
    loopback: str
    """IP address at which nobody but its own processes reach it."""
    run_dir: str
    """Folder of all that outlives the run's processes here. On the home host it is the run's folder."""
    socket_dir: str
    """Unix sockets, locks and keys: a short path, removed when the run ends."""
    shm_dir: str
    """Files in shared memory, removed when the run ends."""
    local: str
    """Prefix of endpoints that only this host reaches; a name of the run's follows."""

    def local_endpoint(self, name: str) -> str:
        """Return the endpoint of that name on this host."""
        return self.local + name


class OnHost:
    """The folders of `host` as paths, for whatever runs there."""

    host: RunHost

    @property
    def run_dir(self) -> Path:
        """Everything that outlives a process of the run here."""
        return Path(self.host.run_dir)

    @property
    def socket_dir(self) -> Path:
        return Path(self.host.socket_dir)

    @property
    def shm_dir(self) -> Path:
        return Path(self.host.shm_dir)


class ServicePlace(msgspec.Struct, frozen=True):
    """One process of the run: its name, role, command, and addresses for requests and metrics."""

    name: str
    role: Role
    index: int
    module: str
    metrics_port: int  # 0: the process picks a free one and reports it when ready
    node_id: str = ""  # Empty: it has no host yet
    status: str = ""  # Endpoint at which it says how it is
    chunks: str = ""  # Endpoint at which it serves snapshots to other hosts; empty: any port of its host
    gpus_of_its_own: bool = False  # Whether it sees the GPUs that it was given, and no others
    policy: str = ""  # Whose trainer it is, in a job of several policies

    @property
    def is_first(self) -> bool:
        """Whether it is the first of its role: rank 0 of the trainer."""
        return self.index == 0


class Topology(msgspec.Struct, frozen=True):
    """The processes of a run, their hosts, and the servers that they share. `job` is the resolved job file as
    JSON values."""

    run_id: str
    home: str
    """Node id of the supervisor's host, which has the run's folder."""
    hosts: dict[str, RunHost]
    services: list[ServicePlace]
    control: str
    """Endpoint of the supervisor: its control socket, and where records of the run go."""
    buffer: str
    weights: str
    job: dict[str, object]
    publishers: dict[str, str] = {}
    """Endpoints of the trainers' publishers by policy, in a job of several; they replace `weights`."""

    @classmethod
    def read(cls, path: Path) -> Topology:
        """Raises OSError or ValueError when the file is none."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    @property
    def home_host(self) -> RunHost:
        return self.hosts[self.home]

    def place(self, name: str) -> ServicePlace:
        """Return the place of the process called `name`. A rollout worker that nobody has placed may join
        from the home host by a name that is not known: `rollout-` and something. Raises KeyError for any
        other."""
        for place in self.services:
            if place.name == name:
                return place
        guest = GUEST_NAME.fullmatch(name)
        if guest is None:
            raise KeyError(name)
        index = int(guest[1]) if guest[1].isdecimal() else 0
        status = self.home_host.local_endpoint(f"{name}.status")
        return ServicePlace(name, "rollout", index, "rollout_service", 0, self.home, status)
