"""Finding a run that somebody wants to look into: by its folder or its job file, alive or not.

Only reads. What the job points at (model, tasks, reward) need not be there any more.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.launch.errors import RunFolderError
from areal_async.launch.folders import LOCK, check_run_folder, supervisor_of
from areal_async.ownfiles import NotOurs, read_own
from areal_async.rpc.secret import RunSecret
from areal_async.runtime.context import RunPlaces


@dataclass(frozen=True)
class Run:
    """A run's folder and its job. `places` says where a run that is alive has its endpoints."""

    folder: Path
    job: JobConfig
    places: RunPlaces | None

    @property
    def alive(self) -> bool:
        return self.places is not None

    @property
    def secret(self) -> RunSecret:
        """What the sockets of a run that is alive ask for. Raises `EndpointError`."""
        assert self.places is not None
        return RunSecret.read(Path(self.places.socket_dir))


def find_run(target: Path, overrides: Sequence[str] = ()) -> Run:
    """The run of kind `rl` at `target`, a run folder or a job file.

    Raises `RunFolderError` where there is none, `ConfigError` when its job cannot be read or an override does
    not fit it."""
    folder = target.resolve() if target.is_dir() else _folder_of(target)
    if not folder.is_dir():
        raise RunFolderError(f"{folder} does not exist: this job has not been run.{_neighbours(folder)}")
    check_run_folder(folder)
    if not (folder / LOCK).exists() or not (folder / "job.yaml").exists():
        inside = [path.parent.name for path in sorted(folder.glob(f"*/{LOCK}"))]
        hint = f" The runs in it are: {', '.join(inside)}." if inside else _neighbours(folder)
        raise RunFolderError(f"{folder} is not the folder of a run.{hint}")
    # The folder may have been moved since.
    job = load_job(folder / "job.yaml", [*overrides, f"run_dir={folder.parent}"], files=False)
    if job.kind == "sft":
        raise RunFolderError(
            f"{folder} is the run of a job of kind sft, which has no buffer and no episodes."
        )
    alive = supervisor_of(folder) is not None and (folder / "context.json").exists()
    places = _read_places(folder / "context.json") if alive else None
    if places is not None and not overrides:
        job = JobConfig.model_validate(places.job)
    return Run(folder, job, places)


def _folder_of(job_file: Path) -> Path:
    if not job_file.is_file():
        raise RunFolderError(f"there is no run folder or job file {job_file}.{_neighbours(job_file)}")
    job = load_job(job_file, files=False)
    return job.run_dir / job.job


def _neighbours(path: Path) -> str:
    """Runs beside `path` whose names are close."""
    names = [lock.parent.name for lock in path.parent.glob(f"*/{LOCK}")]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""


def _read_places(path: Path) -> RunPlaces:
    try:
        return msgspec.json.decode(read_own(path), type=RunPlaces)
    except (OSError, NotOurs, msgspec.DecodeError) as error:
        raise RunFolderError(f"{path}, which says where the run serves, cannot be read: {error}") from error
