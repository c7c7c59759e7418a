"""Targets on the command line: a run by its path or URL, or a job of the controller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_async.cluster.client import ControllerClient


def is_run(text: str) -> bool:
    """Return whether an argument names a run by its path or URL, instead of a job of the controller."""
    from areal_async.launch.folders import LOCK

    return os.sep in text or text.endswith((".yaml", ".yml")) or (Path(text) / LOCK).exists()


def of_controller(target: str | Path) -> ControllerClient | None:
    """Return the controller if `target` names one of its jobs, otherwise None. A `target` that is an existing
    path never names a job."""
    from areal_async.cluster.client import ControllerClient, ControllerGone
    from areal_async.cluster.states import UnknownJob

    if not _is_name(target):
        return None
    try:
        client = ControllerClient.find()
        client.job(str(target))
    except (ControllerGone, UnknownJob):
        return None
    return client


def run_target(target: str) -> str:
    """Return the run folder if `target` names a job of the controller on this machine. Otherwise return
    `target`."""
    from areal_async.cluster.client import URL_VARIABLE
    from areal_async.config.cluster import cluster_dir

    if not _is_name(target) or os.environ.get(URL_VARIABLE):
        return target
    found: dict[int, Path] = {}
    for folder in cluster_dir().glob(f"jobs/*-{target}/runs/{target}"):
        id, _, name = folder.parts[-3].partition("-")
        if name == target:
            found[int(id)] = folder
    return str(found[max(found)]) if found else target


def job_names(incomplete: str) -> list[str]:
    """Return the names of the controller's jobs, for shell completion."""
    from areal_async.cluster.client import ControllerClient

    try:
        found = ControllerClient.find().jobs(ended=True)
    except Exception:  # A shell cannot show errors during completion
        return []
    return sorted({job.name for job in found if job.name.startswith(incomplete)})


def _is_name(target: str | Path) -> bool:
    from areal_async.config.fields import JOB_NAME

    return JOB_NAME.fullmatch(str(target)) is not None and not Path(target).exists()
