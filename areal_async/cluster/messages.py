"""Messages of the controller's API, except for the submission (`submission.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from areal_async.base.mistakes import Mistake
from areal_async.cluster.resources import Resources
from areal_async.cluster.states import ACTIVE
from areal_async.cluster.store import HistoryEntry, ShownJob, StoredJob

OFFSET_HEADER, OVER_HEADER = "areal-log-offset", "areal-log-over"
LOG_WAIT_S = 30.0
"""Longest time that a request waits for new content at the end of a log."""


class JobAnswer(ShownJob, frozen=True, kw_only=True):
    """The present state of a job."""

    doing: Literal["", "pausing", "stopping"]
    """State that the job will enter once its processes have exited, if a stop or pause was requested."""
    waits_for: str
    """Reason why a PENDING or STARTING job waits, for example `waits for 2 GPUs`."""
    run_folder: str
    """The job's run folder, on the controller's machine."""

    @classmethod
    def of(cls, job: StoredJob, run_folder: str, waits_for: str) -> JobAnswer:
        doing = {"run": "", "pause": "pausing", "stop": "stopping"}[job.wish] if job.state in ACTIVE else ""
        own = {name: getattr(job, name) for name in ShownJob.__struct_fields__}
        return cls(**own, doing=doing, waits_for=waits_for, run_folder=run_folder)  # type: ignore[arg-type]


class JobsAnswer(msgspec.Struct, frozen=True):
    """Jobs in the order of submission."""

    jobs: list[JobAnswer]


class JobDetailAnswer(msgspec.Struct, frozen=True):
    """A job with its history and its fields."""

    job: JobAnswer
    history: list[HistoryEntry]
    config: dict[str, Any]
    """The job file's content, with every field resolved."""


class ClusterAnswer(msgspec.Struct, frozen=True):
    """The cluster and its free resources."""

    cluster: str
    launcher: str
    release: str
    since_s: float
    total: Resources
    free: Resources
    """Free resources. Negative if running jobs use more resources than exist, because they were scaled up or
    the cluster was reduced."""
    jobs: dict[str, int]
    """Number of jobs in each state."""


class ResumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Overrides for the resumed job, as `key=value`."""

    overrides: list[str] = []


class DownRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order to stop all running jobs (unless they are kept) and then the controller."""

    keep_jobs: bool = False


class FiguresAnswer(msgspec.Struct, frozen=True):
    """Progress of a job's run. None means unknown, or not known yet."""

    step: int | None = None
    steps: int | None = None
    eta_s: float | None = None
    reward: float | None = None
    accuracy: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    generated_per_s: float | None = None
    """Tokens per second."""
    trained_per_s: float | None = None
    message: str = ""


class RefusalAnswer(msgspec.Struct, frozen=True):
    """The reason why the request was refused."""

    error: str
    mistakes: Sequence[Mistake] = ()
    """Mistakes in the request, one for each wrong field."""


class ScrapeTargets(msgspec.Struct, frozen=True):
    """Addresses that serve metrics (`HOST:PORT`) and the labels of their series, in the format of
    Prometheus."""

    targets: list[str]
    labels: dict[str, str] = {}
