"""The folder in which jobs and shared services of one user on one machine find each other.

    <folder>/job-<run id>.json   a job that wants to be served, written by it
    <folder>/reward.json         the shared reward service, and how it serves each job, written by it
    <folder>/reward.lock         held by that service: there is one for a folder

Promises: a reader sees a whole entry or none; the entry of a process that is gone counts as none, however it
ended, and is removed by the next who looks; entries of other machines on a shared disk are left alone.
Whoever may write here may have code run: the folder belongs to one user and is closed to others.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import psutil

from areal_async.errors import ArealError

VARIABLE = "AREAL_ASYNC_REGISTRY"
"""Environment variable that names the folder."""
SAME_START_S = 1.0


class RegistryError(ArealError):
    """The folder cannot be used, or another service holds it."""

    restart_helps = False


class Owner(msgspec.Struct, frozen=True):
    """A process, told from a later one of the same number by when it began."""

    pid: int
    created_s: float
    host: str

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Raises psutil.Error for a process that is not there."""
        return cls(pid, psutil.Process(pid).create_time(), socket.gethostname())

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """On this machine; of others nothing is known."""
        try:
            return (
                self.is_here and abs(psutil.Process(self.pid).create_time() - self.created_s) < SAME_START_S
            )
        except psutil.Error:
            return False


class JobEntry(msgspec.Struct, frozen=True):
    """A run that wants its episodes scored."""

    run_id: str
    job: str
    context: str
    """Path of its `context.json`: where its services are, and the resolved job file."""
    owner: Owner
    """Its supervisor."""


class Service(msgspec.Struct, frozen=True):
    """How a job is served."""

    state: Literal["starting", "serving", "waiting", "failed"]
    text: str = ""
    """What it waits for, or why it failed."""
    workers_alive: int = 0


class ServiceEntry(msgspec.Struct, frozen=True):
    """The shared reward service."""

    owner: Owner
    workers: int
    metrics_port: int
    jobs: dict[str, Service] = {}
    """By run id."""


def default_registry() -> Path:
    """The folder where no other is named."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "areal-async"
    return Path(tempfile.gettempdir()) / f"areal-{os.getuid()}-registry"


T = TypeVar("T", JobEntry, ServiceEntry)


class Registry:
    """Access to one folder, which is made when it is not there. Raises `RegistryError` when it is not a
    folder of this user, or others may write to it."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_registry()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.stat()
        except OSError as error:
            raise RegistryError(f"the registry {self.folder} cannot be used: {error.strerror}.") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise RegistryError(
                f"the registry {self.folder} must be a folder of your own that only you can write to. "
                f"Name another (reward.registry, --registry or {VARIABLE})."
            )

    # --- jobs ----------------------------------------------------------------------------------------

    def add_job(self, entry: JobEntry) -> None:
        _write(self._job_path(entry.run_id), entry)

    def remove_job(self, run_id: str) -> None:
        self._job_path(run_id).unlink(missing_ok=True)

    def jobs(self) -> list[JobEntry]:
        """The jobs whose supervisors live, the oldest entry first."""
        alive: list[tuple[int, JobEntry]] = []
        for path in self.folder.glob("job-*.json"):
            entry = _read(path, JobEntry)
            if entry is not None and entry.owner.is_alive:
                alive.append((_written_ns(path), entry))
            elif entry is not None and entry.owner.is_here:
                path.unlink(missing_ok=True)
        return [entry for _, entry in sorted(alive, key=lambda item: (item[0], item[1].run_id))]

    def _job_path(self, run_id: str) -> Path:
        return self.folder / f"job-{run_id}.json"

    # --- the service ---------------------------------------------------------------------------------

    def hold(self) -> int:
        """Become the folder's only service: the descriptor returned holds it until it is closed, or the
        process ends. Raises `RegistryError` when another does."""
        lock = os.open(self.folder / "reward.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            held = self.service()
            by = f" (process {held.owner.pid})" if held is not None else ""
            raise RegistryError(
                f"a reward service{by} already serves the jobs of {self.folder}. Stop it, or give this one "
                "another folder with --registry."
            ) from None
        return lock

    def write_service(self, entry: ServiceEntry) -> None:
        _write(self.folder / "reward.json", entry)

    def remove_service(self) -> None:
        (self.folder / "reward.json").unlink(missing_ok=True)

    def service(self) -> ServiceEntry | None:
        """The service that runs now."""
        entry = _read(self.folder / "reward.json", ServiceEntry)
        return entry if entry is not None and entry.owner.is_alive else None


def _write(path: Path, entry: JobEntry | ServiceEntry) -> None:
    """Readers see the old content or the new."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_bytes(msgspec.json.encode(entry))
    unfinished.replace(path)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
