"""Going on with a run that was killed or interrupted: finding it, and the job that it is.

The job is the one that the run folder has recorded, not what the job file says by now: the batches of the
redo log were made under it. Fields that decide neither tasks nor their order may be changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.config.yamlfile import read_mapping
from areal_async.launch.errors import RunFolderError
from areal_async.launch.folders import LOCK, check_run_folder, describe_work, refuse_running

FIXED = (
    "job",
    "kind",
    "run_dir",
    "seed",
    "model",
    "tasks.train",
    "tasks.passes",
    "rollout.group_size",
    "buffer.redis",
    "buffer.batch_groups",
)
"""What a resumed run cannot change, nor what is below it."""


def job_to_resume(target: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The job of the run at `target`: a run folder, or a job file whose run is meant.

    Raises `RunFolderError` when there is nothing to go on with, `ConfigError` when what was recorded cannot
    be run any more."""
    run_dir = target.resolve() if target.is_dir() else _run_dir_of(target)
    _check(run_dir, target)
    for override in overrides:
        name = override.partition("=")[0].strip()
        if any(name == field or name.startswith(f"{field}.") for field in FIXED):
            raise RunFolderError(
                f"{name} cannot be changed on resume: the run in {run_dir} was begun with another value, and "
                "its batches depend on it. Start a job of another name instead."
            )
    # The folder may have been moved since.
    job = load_job(run_dir / "job.yaml", [*overrides, f"run_dir={run_dir.parent}"])
    if job.job != run_dir.name:
        raise RunFolderError(f"{run_dir} holds the run of job {job.job!r}: rename the folder to {job.job}")
    return job


def note_on_changes(job_file: Path, job: JobConfig) -> str:
    """What to tell somebody who resumes by a job file that says something else than the run's own `job`;
    empty when it does not."""
    asked, recorded = _flat(load_job(job_file).model_dump(mode="json")), _flat(job.model_dump(mode="json"))
    changed = sorted(name for name in asked.keys() | recorded.keys() if asked.get(name) != recorded.get(name))
    if not changed:
        return ""
    shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if changed[5:] else "")
    return (
        f"{job_file} is not what the run was begun with ({shown}). The run goes on as its own job.yaml "
        "says; to change a field now, name it here: key=value."
    )


def _flat(section: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Fields by their full names, without `run_dir`: a folder may be named in more than one way."""
    fields: dict[str, object] = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            fields |= _flat(value, f"{above}{name}.")
        elif above or name != "run_dir":
            fields[f"{above}{name}"] = value
    return fields


def _run_dir_of(job_file: Path) -> Path:
    if not job_file.is_file():
        raise RunFolderError(f"there is no run folder or job file {job_file}.")
    job = load_job(job_file)
    return job.run_dir / job.job


def job_kind(run_dir: Path) -> object:
    """The kind of the recorded job."""
    return read_mapping(run_dir / "job.yaml").get("kind")


def _check(run_dir: Path, target: Path) -> None:
    start = f"`areal-async run {target}`" if target.is_file() else "`areal-async run`"
    if not run_dir.is_dir():
        raise RunFolderError(f"there is nothing to resume: {run_dir} does not exist. Start it with {start}.")
    check_run_folder(run_dir)
    if not (run_dir / LOCK).exists() or not (run_dir / "job.yaml").exists():
        raise RunFolderError(f"there is nothing to resume: {run_dir} is not the folder of a run.")
    refuse_running(run_dir)
    if (run_dir / "summary.json").exists():
        raise RunFolderError(
            f"there is nothing to resume: the run in {run_dir} is finished. Its model is "
            f"{run_dir / 'model'}; a job of another name can go on from there (`model:`)."
        )
    if job_kind(run_dir) == "sft":
        raise RunFolderError(
            f"there is nothing to resume: jobs of kind sft keep no checkpoints. Run it again with {start} "
            "and --overwrite."
        )
    if not describe_work(run_dir) and not any((run_dir / "buffer").glob("appendonly*")):
        raise RunFolderError(
            f"there is nothing to resume: the run in {run_dir} ended before it had done anything. Start it "
            f"again with {start}."
        )
