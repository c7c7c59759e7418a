"""The folders of a run: who may use them, what is in them, and that nothing volatile is left behind.

Promises: one run at a time per run folder (a lock that dies with its process); work of an earlier run is
deleted only when asked; a folder that no run of ours made is never touched; sockets and shared memory are
in folders of mode 0700 that are removed at the end, or by the next run if the supervisor was killed; so are
snapshots in a directory that hosts share.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from areal_async.config.job import JobConfig
from areal_async.control.child import kill_processes_of
from areal_async.control.context import short_socket_dir
from areal_async.control.errors import RunFolderError
from areal_async.observe.record import holds_results
from areal_async.snapshot_folders import remove_snapshots, shared_directory

LOCK = "run.lock"
STATE = frozenset({LOCK, "job.yaml", "context.json", "logs", "buffer", "events", "failpoints"})
"""What a run needs while it lives. Everything else in its folder is work, also what we do not know."""
SHM_ROOT = Path("/dev/shm")


@dataclass(frozen=True)
class RunFolders:
    """The folders of one run that holds its lock."""

    run_id: str
    run_dir: Path
    socket_dir: Path
    shm_dir: Path
    targets: Path
    """Prometheus file_sd targets of the run: `<job.run_dir>/prometheus/<job>.json`."""
    lock_fd: int
    snapshots: Path | None = None
    """Where they outlive `shm_dir`: the job's folder in the directory of weights channel `disk`."""

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"

    @property
    def context(self) -> Path:
        return self.run_dir / "context.json"

    def release(self) -> None:
        """Remove what is volatile and give up the lock."""
        for folder in (self.socket_dir, self.shm_dir):
            shutil.rmtree(folder, ignore_errors=True)
        if self.snapshots is not None:
            with suppress(OSError):  # what cannot be removed now is removed by the next run
                remove_snapshots(self.snapshots)
                self.snapshots.rmdir()
        self.targets.unlink(missing_ok=True)
        os.ftruncate(self.lock_fd, 0)
        os.close(self.lock_fd)


def claim_folders(
    job: JobConfig, *, overwrite: bool, resume: bool = False, shm_root: Path = SHM_ROOT
) -> RunFolders:
    """Take the job's run folder, clean up after a dead run, and make the volatile folders.

    With `resume` what an earlier run left in its folder stays, to be gone on with. Raises `RunFolderError`
    when another run uses it, when it holds work that is neither to be resumed nor overwritten, or when it is
    not a run folder of ours.
    """
    run_dir = job.run_dir / job.job
    if run_dir.is_dir() and any(run_dir.iterdir()) and not (run_dir / LOCK).exists():
        raise RunFolderError(
            f"{run_dir} is not empty and was not made by a run; nothing in it is touched. Give the job "
            "another name (`job:`) or another `run_dir`."
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock_fd = _lock(run_dir)
    except OSError as error:
        raise RunFolderError(f"{run_dir} cannot be used: {error.strerror}. Set another `run_dir`.") from error
    try:
        _end_dead_run(lock_fd)
        if resume:
            return _make(job, run_dir, lock_fd, shm_root)
        if (work := describe_work(run_dir)) and not overwrite:
            is_done = (run_dir / "summary.json").exists()
            go_on = "" if is_done else f"go on with `areal-async resume {run_dir}`, "
            raise RunFolderError(
                f"{run_dir} holds {work}. Give the job another name (job=NAME), move that folder away, "
                f"{go_on}or add --overwrite to delete it and start anew."
            )
        _clear(run_dir)
        return _make(job, run_dir, lock_fd, shm_root)
    except BaseException:
        os.close(lock_fd)
        raise


def describe_work(run_dir: Path) -> str:
    """What a run folder holds that is worth keeping, in words; empty when there is nothing."""
    if (run_dir / "summary.json").exists():
        return "a finished run"
    kept = [entry.name for entry in run_dir.iterdir() if entry.name not in STATE and _holds_anything(entry)]
    if "metrics.jsonl" in kept and not holds_results(run_dir / "metrics.jsonl"):
        kept.remove("metrics.jsonl")
    return f"an unfinished run ({', '.join(sorted(kept))})" if kept else ""


def supervisor_of(run_dir: Path) -> dict[str, Any] | None:
    """What the supervisor that runs the job of `run_dir` now has written down; None while nobody does."""
    record = _read_json(run_dir / LOCK)
    return record if record is not None and _is_alive(record) else None


def volatile_roots() -> list[Path]:
    """Where shared memory and socket folders of runs are."""
    return list(dict.fromkeys((SHM_ROOT, Path(tempfile.gettempdir()), Path("/tmp"))))


def leftovers(roots: Sequence[Path]) -> Iterator[Path]:
    """Shared memory and socket folders below `roots` of this user's runs whose supervisor is gone."""
    for root in roots:
        for folder in sorted(root.glob(f"areal-{os.getuid()}-*")) if root.is_dir() else ():
            owner = _read_json(folder / "owner.json")
            if owner is not None and not _is_alive(owner):
                yield folder


def _lock(run_dir: Path) -> int:
    lock_fd = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _parse_json(os.pread(lock_fd, 4096, 0)) or {}
        os.close(lock_fd)
        raise RunFolderError(
            f"this job is already running (process {holder.get('pid', 'unknown')} uses {run_dir}). Wait for "
            "it, stop it with Ctrl-C, or give this one another name (job=NAME)."
        ) from None
    return lock_fd


def refuse_running(run_dir: Path) -> None:
    """Raise `RunFolderError` when a run holds the lock of `run_dir` at this moment."""
    os.close(_lock(run_dir))


def _end_dead_run(lock_fd: int) -> None:
    """End the processes and remove the volatile folders of a run that lost its supervisor: the lock was
    free, but its record was not taken out."""
    record = _parse_json(os.pread(lock_fd, 4096, 0))
    if record is None:
        return
    deadline_s = time.monotonic() + 5.0
    while kill_processes_of(record["run_id"]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for name in ("socket_dir", "shm_dir"):
        folder = Path(record[name])
        if folder.name.startswith("areal-"):
            shutil.rmtree(folder, ignore_errors=True)


def _clear(run_dir: Path) -> None:
    for entry in run_dir.iterdir():
        if entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _make(job: JobConfig, run_dir: Path, lock_fd: int, shm_root: Path) -> RunFolders:
    run_id = secrets.token_hex(6)
    name = f"areal-{os.getuid()}-{run_id}"
    usable = shm_root.is_dir() and os.access(shm_root, os.W_OK | os.X_OK)
    shm_dir = (shm_root if usable else Path(tempfile.gettempdir())) / f"{name}-shm"
    socket_dir = short_socket_dir(Path(tempfile.gettempdir()) / name)
    record = {"pid": os.getpid(), "created_s": psutil.Process().create_time(), "job": job.job}
    places = {"run_id": run_id, "socket_dir": str(socket_dir), "shm_dir": str(shm_dir)}
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, json.dumps(record | places).encode(), 0)
    for folder in (socket_dir, shm_dir):
        folder.mkdir(mode=0o700)
        (folder / "owner.json").write_text(json.dumps(record))
    folders = RunFolders(
        run_id=run_id,
        run_dir=run_dir,
        socket_dir=socket_dir,
        shm_dir=shm_dir,
        targets=job.run_dir / "prometheus" / f"{job.job}.json",
        lock_fd=lock_fd,
        snapshots=shared_directory(job),
    )
    folders.targets.unlink(missing_ok=True)
    folders.logs.mkdir(exist_ok=True)
    return folders


def _holds_anything(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.is_file() and path.stat().st_size > 0


def _is_alive(owner: dict[str, Any]) -> bool:
    """Whether the process of the record lives; its start time tells it from a later one of the same pid."""
    try:
        return abs(psutil.Process(owner["pid"]).create_time() - owner["created_s"]) < 1.0
    except psutil.Error:
        return False


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return _parse_json(path.read_bytes())
    except OSError:
        return None


def _parse_json(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
