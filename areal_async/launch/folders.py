"""The folders of a run: their lock, their content, and the removal of volatile files.

Promises:

- At most one run uses a run folder at a time. The lock ends with its process.
- Work of an earlier run is deleted only on request.
- A folder that was not created by a run is never changed. Files of another user are never read, run or
  deleted.
- The run folder, sockets and shared memory are closed to other users from their creation, whatever the umask.
- Sockets and shared memory are removed at the end, or by the next run if the supervisor was killed. Snapshots
  in a directory that several hosts share are removed in the same way.

The parent folder (`run_dir` of the job file) belongs to the user. Anybody who can write to it can replace a
run folder."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_async.base.errors import RunFolderError
from areal_async.base.own_files import (
    NotOurs,
    check_owner,
    close_folder,
    delete_path,
    is_locked,
    is_own_folder,
    lock_file,
    read_own,
    read_record,
)
from areal_async.base.processes import start_of
from areal_async.base.topology import OnHost, RunHost
from areal_async.config.job import JobConfig
from areal_async.launch.one_host import HERE, SHM_ROOT, remove_volatile, sweep_processes, volatile_host
from areal_async.rpc.secret import ROLES, RunSecret
from areal_async.service.context import keys_file
from areal_async.service.record import holds_results
from areal_async.weights.channels import channel_of
from areal_async.weights.manifest import remove_snapshots

LOCK = "run.lock"
TOPOLOGY = "topology.json"
STATE = frozenset({LOCK, "job.yaml", TOPOLOGY, "logs", "buffer", "events", "failpoints"})
"""Entries of a run folder that a run needs only while it runs. All other entries count as work that must not
be lost, including unknown files."""
OWNER = "owner.json"
RECORD_BYTES = 4096
SWEEP_S = 5.0


class Owner(msgspec.Struct):
    """The supervisor of a run. The volatile folders of the run contain this record. The run's lock file
    contains it too, with the paths of these folders."""

    pid: int
    started: str  # Start time as `start_of` returns it
    job: str = ""
    run_id: str = ""
    socket_dir: str = ""
    shm_dir: str = ""

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """Return the record in a file of this user; None if there is no trusted record."""
        return read_record(path, Owner, max_bytes=RECORD_BYTES)

    @property
    def alive(self) -> bool:
        """Whether the process runs. A later process with the same pid does not count: its start time differs.
        A killed process that its parent has not reaped, as in containers without an init, does not count
        either."""
        with suppress(OSError):
            return start_of(self.pid) == self.started
        return False


@dataclass(frozen=True)
class RunFolders(OnHost):
    """The folders of one run. The run holds the lock of its run folder."""

    run_id: str
    host: RunHost
    """This machine."""
    targets: Path  # Prometheus file_sd targets of the run: `<job.run_dir>/prometheus/<job>.json`
    lock_fd: int
    secret: RunSecret  # Source of the keys of all roles; in a file beside the sockets
    snapshots: Path | None = None
    """The job's folder in the directory of weights channel `disk`. Snapshots in this folder outlive
    `shm_dir`."""

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"

    @property
    def topology(self) -> Path:
        return self.run_dir / TOPOLOGY

    def release(self) -> None:
        """Remove the volatile files and release the lock."""
        for folder in (self.socket_dir, self.shm_dir):
            shutil.rmtree(folder, ignore_errors=True)
        if self.snapshots is not None:
            with suppress(OSError):  # the next run removes the rest
                remove_snapshots(self.snapshots)
                self.snapshots.rmdir()
        with suppress(OSError):  # an error of the disk must not hide the end of the run
            self.targets.unlink(missing_ok=True)
            os.ftruncate(self.lock_fd, 0)
        os.close(self.lock_fd)


def claim_folders(
    job: JobConfig, *, overwrite: bool, resume: bool = False, shm_root: Path = SHM_ROOT
) -> RunFolders:
    """Claim the job's run folder, clean up after a dead run, and make the volatile folders.

    With `resume`, the work of the earlier run stays in the folder. Raises `RunFolderError` if another run
    uses the folder, if the folder has work and neither `resume` nor `overwrite` is set, or if the folder was
    not created by a run."""
    run_dir = job.run_dir / job.job
    if run_dir.is_dir():
        check_run_folder(run_dir)
        if any(run_dir.iterdir()) and not (run_dir / LOCK).exists():
            raise RunFolderError(
                f"{run_dir} is not empty and was not made by a run; nothing in it is touched. Give the job "
                "another name (`job:`) or another `run_dir`."
            )
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)
        close_folder(run_dir)  # before its content is trusted
        lock_fd = _lock(run_dir)
    except NotOurs as error:
        raise RunFolderError(str(error)) from error
    except OSError as error:
        raise RunFolderError(f"{run_dir} cannot be used: {error.strerror}. Set another `run_dir`.") from error
    try:
        _end_dead_run(lock_fd)
        if not resume:
            _clear(run_dir, overwrite)
        return _make(job, run_dir, lock_fd, shm_root)
    except BaseException:
        os.close(lock_fd)
        raise


def describe_work(run_dir: Path) -> str:
    """Return a description of the work in a run folder; empty if there is none."""
    if (run_dir / "summary.json").exists():
        return "a finished run"
    kept = [entry.name for entry in run_dir.iterdir() if entry.name not in STATE and _holds_anything(entry)]
    if "metrics.jsonl" in kept and not holds_results(run_dir / "metrics.jsonl"):
        kept.remove("metrics.jsonl")
    return f"an unfinished run ({', '.join(sorted(kept))})" if kept else ""


def supervisor_of(run_dir: Path) -> Owner | None:
    """Return the supervisor that runs the job of `run_dir` now; None if no supervisor runs it."""
    owner = Owner.read(run_dir / LOCK)
    return owner if owner is not None and owner.alive else None


def check_run_folder(run_dir: Path) -> None:
    """Raise `RunFolderError` if another user owns `run_dir` or its lock. `run_dir` must exist."""
    try:
        check_owner(run_dir)
        if os.path.lexists(run_dir / LOCK):
            read_own(run_dir / LOCK, max_bytes=RECORD_BYTES)
    except NotOurs as error:
        raise RunFolderError(str(error)) from error
    except OSError as error:
        raise RunFolderError(f"{run_dir} is not the folder of a run: {error}") from error


def leftovers(roots: Sequence[Path]) -> Iterator[Path]:
    """Yield this user's shared memory and socket folders below `roots` whose supervisor is dead."""
    for root in roots:
        for folder in sorted(root.glob(f"areal-{os.getuid()}-*")) if root.is_dir() else ():
            if not is_own_folder(folder):
                continue  # another user may have taken this name in /tmp or /dev/shm
            owner = Owner.read(folder / OWNER)
            if owner is not None and not owner.alive:
                yield folder


def mark_owned(folder: Path) -> None:
    """Write the record of this process into its `folder`, so that `leftovers` finds the folder if the process
    is killed."""
    (folder / OWNER).write_bytes(msgspec.json.encode(Owner(os.getpid(), start_of(os.getpid()))))


def _lock(run_dir: Path) -> int:
    if (lock_fd := lock_file(run_dir / LOCK)) is None:
        raise _running(run_dir)
    return lock_fd


def _running(run_dir: Path) -> RunFolderError:
    holder = Owner.read(run_dir / LOCK)
    pid = holder.pid if holder is not None else "unknown"
    return RunFolderError(
        f"this job is already running (process {pid} uses {run_dir}). Wait for "
        "it, stop it with Ctrl-C, or give this one another name (job=NAME)."
    )


def refuse_running(run_dir: Path) -> None:
    """Raise `RunFolderError` if a run holds the lock of `run_dir` now."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileNotFoundError), os.fdopen(os.open(run_dir / LOCK, flags), "rb") as lock:
        if is_locked(lock.fileno()):
            raise _running(run_dir)


def clean_up(run_dir: Path) -> None:
    """End the processes of a run without a supervisor and remove its volatile folders.

    Does nothing if there is no such run, or if a live run holds the lock."""
    if (run_dir / LOCK).exists():
        with suppress(RunFolderError, NotOurs, OSError), os.fdopen(_lock(run_dir), "r+b") as lock:
            _end_dead_run(lock.fileno())
            lock.truncate(0)


def _end_dead_run(lock_fd: int) -> None:
    """End the processes of a run that lost its supervisor, and remove its volatile folders.

    The lock of such a run is free, but the lock file still contains the supervisor's record."""
    try:
        record = msgspec.json.decode(os.pread(lock_fd, RECORD_BYTES, 0), type=Owner)
    except msgspec.DecodeError:
        return
    sweep_processes(record.run_id, SWEEP_S)
    remove_volatile((Path(record.socket_dir), Path(record.shm_dir)))


def _clear(run_dir: Path, overwrite: bool) -> None:
    if (work := describe_work(run_dir)) and not overwrite:
        is_done = (run_dir / "summary.json").exists()
        go_on = "" if is_done else f"go on with `areal-async resume {run_dir}`, "
        raise RunFolderError(
            f"{run_dir} holds {work}. Give the job another name (job=NAME), move that folder away, "
            f"{go_on}or add --overwrite to delete it and start anew."
        )
    for entry in run_dir.iterdir():
        if entry.name != LOCK:
            delete_path(entry)


def _make(job: JobConfig, run_dir: Path, lock_fd: int, shm_root: Path) -> RunFolders:
    run_id = secrets.token_hex(6)
    host = volatile_host(HERE, run_id, shm_root, run_dir=run_dir)
    socket_dir, shm_dir = Path(host.socket_dir), Path(host.shm_dir)
    pid = os.getpid()
    record = msgspec.json.encode(Owner(pid, start_of(pid), job.job, run_id, host.socket_dir, host.shm_dir))
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, record, 0)
    for folder in (socket_dir, shm_dir):
        folder.mkdir(mode=0o700)
        (folder / OWNER).write_bytes(record)
    folders = RunFolders(
        run_id=run_id,
        host=host,
        targets=job.run_dir / "prometheus" / f"{job.job}.json",
        lock_fd=lock_fd,
        secret=RunSecret.make(socket_dir),
        snapshots=channel_of(job).directory(job),
    )
    write_keys(folders.secret, socket_dir)
    folders.targets.unlink(missing_ok=True)
    folders.logs.mkdir(mode=0o700, exist_ok=True)
    return folders


def write_keys(secret: RunSecret, socket_dir: Path) -> None:
    """Write the keys of each role. The processes of the role on this host read them."""
    for role in ROLES:
        path = keys_file(socket_dir, role)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        secret.of(role).write(path)


def _holds_anything(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and path.stat().st_size > 0
