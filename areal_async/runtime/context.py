"""What a service process is told about the job it belongs to.

The supervisor writes one `context.json` for all services of a run; each process reads it with its own
name. While the run lives only its rollout workers change: those that join are added to `services`, those that
were drained are taken out. A service started again finds the same places.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from areal_async.config.job import JobConfig
from areal_async.rpc.secret import FILE as SECRET_FILE
from areal_async.rpc.secret import RunSecret
from areal_async.runtime.group import Meeting

Role = Literal["buffer", "rollout", "evaluator", "reward", "trainer"]

NODE_VARIABLE = "AREAL_ASYNC_NODE_ID"
"""Environment variable by which whoever starts a process on another host says which."""
SERVED_VARIABLE = "AREAL_ASYNC_SERVED_BEFORE"
"""Environment variable that the supervisor sets for a service that it starts again and that has served."""
SOCKET_PATH_LIMIT = 107
"""Bytes in a unix socket path, without its ending NUL (`sockaddr_un.sun_path` holds 108)."""
LONGEST_SOCKET_NAME = 32  # Room that a socket folder must leave for the names in it


GUEST_NAME = re.compile(r"rollout-([a-z0-9][a-z0-9-]{0,15})")
"""Names of rollout workers, also of those that the supervisor has not started."""


class ServicePlace(msgspec.Struct, frozen=True):
    """One process of the run: its name, what it is, how it is started, where it is watched."""

    name: str
    role: Role
    index: int
    module: str
    metrics_port: int  # 0: the process picks a free one and reports it when ready
    node_id: str = ""  # Name of its host; empty for what the job's `weights` say of its name


class RunPlaces(msgspec.Struct, frozen=True):
    """The content of `context.json`. Paths are absolute; `job` is the resolved job file as JSON values."""

    run_id: str
    supervisor_pid: int
    run_dir: str
    socket_dir: str
    shm_dir: str
    buffer_endpoint: str
    weights_endpoint: str
    services: list[ServicePlace]
    job: dict[str, object]


@dataclass(frozen=True)
class ServiceContext:
    """All a service needs to know about its place in the run.

    `stop` and `stopping` are one signal, for coroutines and for threads: once set, the service finishes
    what is short, closes its sockets and returns within a few seconds.
    """

    job: JobConfig
    role: Role
    name: str
    index: int
    run_dir: Path  # `<job.run_dir>/<job.job>`: everything that outlives the run
    socket_dir: Path  # The folder of unix sockets: short, mode 0700, removed when the run ends
    shm_dir: Path  # The folder of shared memory files, removed when the run ends
    secret: RunSecret  # What every socket of the run asks for
    buffer_endpoint: str
    weights_endpoint: str
    metrics_port: int  # The port this process serves metrics on; 0 in a test that serves none
    node_id: str = ""  # Name of the host that this process is on: processes of one name share memory
    ready_fd: int | None = None
    meeting: Meeting | None = None  # Where the ranks of the trainer meet; None for one alone
    served_before: bool = False  # Whether a process of this name has served in this run: it is started again
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    """Set by a service that has done all it was asked to: it ends with status 0 also after a stop."""
    _told: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def run_log(self) -> Path:
        """`metrics.jsonl`, shared by all processes of the run (one append per record)."""
        return self.run_dir / "metrics.jsonl"

    @property
    def has_served(self) -> bool:
        """Whether `ready` has been called."""
        return self._told.is_set()

    def ready(self) -> None:
        """Tell the supervisor that this service serves. A second call does nothing; so does a call in a
        process started by hand."""
        if self._told.is_set():
            return
        self._told.set()
        if self.ready_fd is None:
            return
        line = json.dumps({"ready": self.name, "pid": os.getpid(), "metrics_port": self.metrics_port})
        os.write(self.ready_fd, line.encode() + b"\n")
        os.close(self.ready_fd)

    @classmethod
    def load(cls, path: Path, name: str, *, ready_fd: int | None = None) -> ServiceContext:
        """The context of the service called `name`, from a run's `context.json`.

        A rollout worker may join by a name that is not in the file: `rollout-` and something.
        Raises OSError or ValueError when the file is no such context, `EndpointError` where the secret of the
        run is not there, KeyError for any other name."""
        places = msgspec.json.decode(path.read_bytes(), type=RunPlaces)
        by_name = {place.name: place for place in places.services}
        if name not in by_name and (guest := GUEST_NAME.fullmatch(name)):
            index = int(guest[1]) if guest[1].isdecimal() else 0
            by_name[name] = ServicePlace(name, "rollout", index, "rollout_service", 0)
        place = by_name[name]
        job = JobConfig.model_validate(places.job)
        return cls(
            job=job,
            role=place.role,
            name=place.name,
            index=place.index,
            run_dir=Path(places.run_dir),
            socket_dir=Path(places.socket_dir),
            shm_dir=Path(places.shm_dir),
            secret=RunSecret.read(Path(places.socket_dir)),
            buffer_endpoint=places.buffer_endpoint,
            weights_endpoint=places.weights_endpoint,
            metrics_port=place.metrics_port,
            node_id=os.environ.get(NODE_VARIABLE)
            or place.node_id
            or job.weights.nodes.get(name, job.weights.node_id),
            ready_fd=ready_fd,
            meeting=Meeting.from_environment() if place.role == "trainer" else None,
            served_before=SERVED_VARIABLE in os.environ,
        )

    @classmethod
    def for_test(
        cls, job: JobConfig, tmp_path: Path, role: Role, name: str, *, index: int = 0
    ) -> ServiceContext:
        """A context below `tmp_path` with its folders made. Contexts of one `tmp_path` share endpoints and a
        secret, so the services of a test find each other."""
        run_dir, shm_dir = tmp_path / "run", tmp_path / "shm"
        socket_dir = short_socket_dir(tmp_path / "s")
        for folder in (run_dir, shm_dir, socket_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = (socket_dir / SECRET_FILE).exists()
        secret = RunSecret.read(socket_dir) if made else RunSecret.make(socket_dir)
        return cls(
            job=job,
            role=role,
            name=name,
            index=index,
            run_dir=run_dir,
            socket_dir=socket_dir,
            shm_dir=shm_dir,
            secret=secret,
            buffer_endpoint=f"ipc://{socket_dir}/buffer",
            weights_endpoint=f"ipc://{socket_dir}/weights",
            metrics_port=0,
            node_id=job.weights.nodes.get(name, job.weights.node_id),
        )


def short_socket_dir(wanted: Path) -> Path:
    """`wanted` if unix sockets in it stay below the path limit, else a folder of /tmp named after it."""
    if len(os.fsencode(wanted)) + 1 + LONGEST_SOCKET_NAME <= SOCKET_PATH_LIMIT:
        return wanted
    digest = hashlib.blake2b(os.fsencode(wanted), digest_size=6).hexdigest()
    return Path("/tmp") / f"areal-{os.getuid()}-{digest}"
