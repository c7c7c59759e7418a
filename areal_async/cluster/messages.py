"""What the API of the controller answers and takes, beside a submission (`submission.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from areal_async.cluster.resources import Resources
from areal_async.cluster.states import ACTIVE, State
from areal_async.cluster.store import HistoryEntry, StoredJob


class JobAnswer(msgspec.Struct, frozen=True):
    """A job as it stands."""

    id: int
    name: str
    state: State
    doing: Literal["", "pausing", "stopping"]
    """What becomes of it while its processes end."""
    waits_for: str
    """What a job that is PENDING or STARTING waits for, in words: `waits for 2 GPUs`."""
    priority: int
    submitted_s: float
    """Unix time in seconds, as all times here."""
    changed_s: float
    """When it was last moved, to another state or by a wish."""
    reason: str
    """Why it was moved last; of one that failed, the run's own words."""
    attempt: int
    """How often it was started."""
    needs: Resources
    gpus: list[int]
    """Numbers of the GPUs that it holds."""
    run_folder: str
    """Its run folder, on the controller's machine."""

    @classmethod
    def of(cls, job: StoredJob, run_folder: str, waits_for: str) -> JobAnswer:
        doing = {"run": "", "pause": "pausing", "stop": "stopping"}[job.wish] if job.state in ACTIVE else ""
        own = {name: getattr(job, name) for name in cls.__struct_fields__ if hasattr(job, name)}
        return cls(**own, doing=doing, waits_for=waits_for, run_folder=run_folder)  # type: ignore[arg-type]


class JobsAnswer(msgspec.Struct, frozen=True):
    """Jobs, the one that was submitted first at the top."""

    jobs: list[JobAnswer]


class JobDetailAnswer(msgspec.Struct, frozen=True):
    """A job with its history and its fields."""

    job: JobAnswer
    history: list[HistoryEntry]
    config: dict[str, Any]
    """The content of its job file, every field resolved."""


class ClusterAnswer(msgspec.Struct, frozen=True):
    """The cluster, and what of it is free."""

    cluster: str
    launcher: str
    release: str
    since_s: float
    total: Resources
    free: Resources
    """Less than nothing where jobs that run take more than there is: they were scaled, or it was reduced."""
    jobs: dict[str, int]
    """Number of jobs in each state."""


class ResumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes with which a job goes on, as `key=value`."""

    overrides: list[str] = []


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Have so many rollout workers; each that leaves has `timeout_s` to finish what it has."""

    workers: int
    timeout_s: float = 60.0


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Have one worker finish what it has, and wait for it. `outside`: one that was started by hand."""

    worker: str
    timeout_s: float = 60.0
    outside: bool = False


class DownRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End the controller, and before that every job that runs, in order, unless they are to be kept."""

    keep_jobs: bool = False


class WorkersAnswer(msgspec.Struct, frozen=True):
    """What was done, in words, and the workers that are to stay."""

    text: str
    workers: list[str]


class FiguresAnswer(msgspec.Struct, frozen=True):
    """How the run of a job stands. None: not known, or not yet."""

    step: int | None = None
    steps: int | None = None
    eta_s: float | None = None
    reward: float | None = None
    accuracy: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    generated_per_s: float | None = None
    """Tokens a second."""
    trained_per_s: float | None = None
    message: str = ""


class LogFile(msgspec.Struct, frozen=True):
    """A log of a job. `run` is what its run printed, the others are those of its processes."""

    name: str
    size_bytes: int


class LogsAnswer(msgspec.Struct, frozen=True):
    logs: list[LogFile]


class MistakeAnswer(msgspec.Struct, frozen=True):
    field: str
    problem: str
    fix: str


class RefusalAnswer(msgspec.Struct, frozen=True):
    """Why nothing was done."""

    error: str
    mistakes: Sequence[MistakeAnswer] = ()
    """What is wrong with what was sent, field by field."""


class ScrapeTargets(msgspec.Struct, frozen=True):
    """Addresses that serve metrics, `HOST:PORT`, and the labels of their series, in Prometheus' form."""

    targets: list[str]
    labels: dict[str, str] = {}
